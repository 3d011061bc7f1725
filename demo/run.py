"""The demo: real vLLM engines on this CPU share KV pages, and what would happen if nobody checked the bytes.

Four engines with a tiny random model:

    A          computes prompts and publishes their pages
    B          pulls the pages of A (verify: full, the default)
    unchecked  pulls too, but does not check payloads (verify: generation), and publishes nothing
    plain      vLLM without kvpeer: what a recompute gives and costs

Writes a JSON file with the results; ends with status 0 when everything that it claims was seen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from engines.harness import PAGE_TOKENS, Fleet, Server, make_fleet, prompt, say
from engines.pools import flip_pool

SHARED_TOKENS = 1024
"""Long enough to be pulled (the floor is 512), short enough for two cores."""

PROMPT_TOKENS = SHARED_TOKENS + 2 * PAGE_TOKENS + 5
N_PROMPTS = 6
N_CONTROL_PROMPTS = 3
N_GENERATED = 24


@dataclass(frozen=True)
class Answer:
    """One request: its tokens, the time to the first one, and where the prompt's tokens came from."""

    tokens: list[int]
    ttft_ms: float
    computed: int
    pulled: int
    local: int
    bytes_moved: int


def ask(server: Server, tokens: list[int]) -> Answer:
    """A greedy completion; its numbers are differences of the engine's own counters."""
    before = _counters(server)
    streamed = server.stream(tokens, N_GENERATED)
    after = _counters(server)
    changes = {name: round(after[name] - before[name]) for name in before}
    return Answer(
        streamed.tokens, streamed.ttft_ms, changes["computed"], changes["pulled"], changes["local"], changes["bytes"]
    )


def _counters(server: Server) -> dict[str, float]:
    by_source = "vllm:prompt_tokens_by_source_total"
    return {
        "computed": server.metric(by_source, source="local_compute"),
        "pulled": server.cached_tokens("p2p"),
        "local": server.metric(by_source, source="local_cache_hit"),
        "bytes": server.agent_metric("kvpeer_transport_pulled_bytes_total") if server.has_agent() else 0,
    }


def start_engines(fleet: Fleet) -> tuple[Server, Server, Server, Server]:
    """All four, ready. They start together because starting is mostly waiting for imports."""
    say("starting four vLLM engines on the CPU (one to three minutes)")
    a = fleet.start("A")
    b = fleet.start("B")
    unchecked = fleet.start(
        "unchecked", extra={"publish": False}, environment={"KVPEER_TRANSPORT_VERIFY": "generation"}
    )
    plain = fleet.start("plain", with_kvpeer=False)
    for server in (a, b, unchecked, plain):
        server.wait_ready()
        say(f"engine {server.name} is ready")
    return a, b, unchecked, plain


def prompts(kind: str, n: int) -> list[list[int]]:
    """Each has a long prefix of its own, which an engine that saw it can reuse."""
    return [prompt(f"{kind} {number}", PROMPT_TOKENS) for number in range(n)]


def share(a: Server, b: Server, plain: Server) -> dict[str, list[Answer]]:
    """Each prompt to A (computes), to B (pulls), to B again (own cache), to the plain engine (recomputes)."""
    answers: dict[str, list[Answer]] = {"A computes": [], "B pulls": [], "B again": [], "plain recomputes": []}
    for server in (a, b, plain):
        ask(server, prompt(f"warm up {server.name}", PROMPT_TOKENS))
    a.published()
    for number, tokens in enumerate(prompts("shared", N_PROMPTS)):
        answers["A computes"].append(ask(a, tokens))
        a.published()
        answers["B pulls"].append(ask(b, tokens))
        b.settled()
        answers["B again"].append(ask(b, tokens))
        answers["plain recomputes"].append(ask(plain, tokens))
        say(f"prompt {number + 1} of {N_PROMPTS}: B pulled {answers['B pulls'][-1].pulled} tokens")
    return answers


def corrupt(a: Server, b: Server, unchecked: Server, plain: Server) -> tuple[bool, bool, bool]:
    """Flips bytes in A's pool. Returns: did outputs differ where nobody checks, was it caught where somebody does, and
    were the outputs there right."""
    tokens = prompts("flipped", N_CONTROL_PROMPTS)
    expected = [ask(plain, prompt_tokens).tokens for prompt_tokens in tokens]
    for prompt_tokens in tokens:
        ask(a, prompt_tokens)
    a.published()
    say("flipping bytes in the pool of A")
    flip_pool(a.socket)
    careless = [ask(unchecked, prompt_tokens) for prompt_tokens in tokens]
    n_caught = -b.agent_metric("kvpeer_fetch_pages_total", outcome="corrupt")
    careful = [ask(b, prompt_tokens) for prompt_tokens in tokens]
    n_caught += b.agent_metric("kvpeer_fetch_pages_total", outcome="corrupt")
    say(f"B found {n_caught:.0f} pages with wrong bytes and recomputed them")
    differs = all(answer.tokens != right for answer, right in zip(careless, expected, strict=True))
    was_pulled = all(answer.pulled >= SHARED_TOKENS for answer in careless)
    caught = n_caught >= N_CONTROL_PROMPTS and all(answer.computed > SHARED_TOKENS for answer in careful)
    is_right = all(answer.tokens == right for answer, right in zip(careful, expected, strict=True))
    return differs and was_pulled, caught, is_right


def table(answers: dict[str, list[Answer]]) -> str:
    """Medians of the requests of each kind."""
    head = f"{'':18}{'recomputed':>12}{'pulled':>9}{'local':>8}{'MB moved':>10}{'TTFT ms':>10}{'(min - max)':>18}"
    lines = [head]
    for name, group in answers.items():
        times = sorted(answer.ttft_ms for answer in group)
        middle = [
            statistics.median(getattr(answer, field) for answer in group) for field in ("computed", "pulled", "local")
        ]
        megabytes = statistics.median(answer.bytes_moved for answer in group) / 1e6
        spread = f"({times[0]:.0f} - {times[-1]:.0f})"
        lines.append(
            f"{name:18}{middle[0]:>12.0f}{middle[1]:>9.0f}{middle[2]:>8.0f}{megabytes:>10.2f}"
            f"{statistics.median(times):>10.0f}{spread:>18}"
        )
    return "\n".join(lines)


def run(folder: Path) -> dict[str, object]:
    """Everything; ends all processes whatever happens."""
    say("making a tiny random model")
    fleet = make_fleet(folder, sys.executable)
    try:
        a, b, unchecked, plain = start_engines(fleet)
        answers = share(a, b, plain)
        differs, caught, is_right = corrupt(a, b, unchecked, plain)
    finally:
        fleet.close()
        say("all engines and agents are stopped")
    print(f"\nmedian of {N_PROMPTS} prompts of {PROMPT_TOKENS} tokens, in tokens\n\n{table(answers)}\n", flush=True)
    outputs = [[answer.tokens for answer in group] for group in answers.values()]
    is_same = all(group == outputs[0] for group in outputs)
    median_ms = {name: statistics.median(answer.ttft_ms for answer in group) for name, group in answers.items()}
    return {
        "identical_outputs": is_same and is_right,
        "negative_control_differs": differs,
        "corruption_caught": caught,
        "pulled_tokens": sum(answer.pulled for answer in answers["B pulls"]),
        "bytes_pulled": sum(answer.bytes_moved for answer in answers["B pulls"]),
        "ttft_ms": {
            "recompute": median_ms["plain recomputes"],
            "pull": median_ms["B pulls"],
            "local": median_ms["B again"],
        },
        "agents": 3,
    }


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"), help="where the results go")
    parser.add_argument("--logs", type=Path, help="keep the logs of engines and agents in this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines are ended then, too
    # Unix sockets lie below it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/tmp"))
    try:
        result = run(folder)
    finally:
        if options.logs:
            from engines.harness import keep_logs

            keep_logs(Fleet(folder, folder / "model", sys.executable), str(options.logs))
        shutil.rmtree(folder, ignore_errors=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    claims = {
        "the output of B is the output of vLLM without kvpeer": result["identical_outputs"],
        "B pulled from A": bool(result["pulled_tokens"]),
        "wrong bytes in the pool change the output where nobody checks": result["negative_control_differs"],
        "wrong bytes in the pool are caught and recomputed where kvpeer checks": result["corruption_caught"],
    }
    for claim, is_so in claims.items():
        print(f"{'yes' if is_so else 'NO ':4}{claim}")
    print(f"\nresults: {options.out}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
