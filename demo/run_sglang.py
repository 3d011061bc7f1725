"""The demo with SGLang: a cold server restores the pages that another one computed, through kvpeer's agents.

Three real SGLang servers on this CPU, with HiCache, tiny random models of equal shapes, and the same name:

    A       computes prompts and publishes their pages
    B       restores the pages of A: the same tokens, with the same log-probabilities
    other   has other weights, so it finds nothing, and says something else

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from engines.harness import keep_logs, prompt, say
from engines.sglang.servers import PAGE_TOKENS, Answer, SGLangFleet, make_model

N_PAGES = 40
PROMPT_TOKENS = N_PAGES * PAGE_TOKENS + 5
N_PROMPTS = 5
N_GENERATED = 16

LOGPROB_TOLERANCE = 1e-6


def share(fleet: SGLangFleet) -> dict[str, list[Answer]]:
    """Each prompt to A (computes), to A again (own cache), to B (restores), and to the one with other weights."""
    say("starting three SGLang servers on the CPU (one to four minutes)")
    other_model = make_model(fleet.folder, fleet.python, seed=2)
    a, b, other = fleet.serve("A"), fleet.serve("B"), fleet.serve("other", model=other_model)
    fleet.ready(a, b, other)
    for server in (a, b, other):
        server.generate(prompt(f"warm up {server.name}", PROMPT_TOKENS), N_GENERATED)
    answers: dict[str, list[Answer]] = {"A computes": [], "A again": [], "B restores": [], "other weights": []}
    for number in range(N_PROMPTS):
        tokens = prompt(f"demo {number}", PROMPT_TOKENS)
        answers["A computes"].append(a.compute(tokens))
        answers["A again"].append(a.generate(tokens, N_GENERATED))
        answers["B restores"].append(b.generate(tokens, N_GENERATED))
        answers["other weights"].append(other.generate(tokens, N_GENERATED))
        say(f"prompt {number + 1} of {N_PROMPTS}: B restored {answers['B restores'][-1].cached['storage']} tokens")
    return answers


def table(answers: dict[str, list[Answer]]) -> str:
    """Medians of the requests of each kind."""
    lines = [f"{'':16}{'from device':>12}{'from host':>11}{'from storage':>14}{'computed':>10}{'ms':>8}"]
    for name, group in answers.items():
        cached = {
            source: statistics.median(a.cached[source] for a in group) for source in ("device", "host", "storage")
        }
        computed = PROMPT_TOKENS - sum(cached.values())
        lines.append(
            f"{name:16}{cached['device']:>12.0f}{cached['host']:>11.0f}{cached['storage']:>14.0f}{computed:>10.0f}"
            f"{statistics.median(a.seconds for a in group) * 1000:>8.0f}"
        )
    return "\n".join(lines)


def claims(answers: dict[str, list[Answer]]) -> dict[str, bool]:
    """What was to be seen, and whether it was."""
    own, restored, other = answers["A again"], answers["B restores"], answers["other weights"]
    return {
        "B restored every whole page of every prompt": all(
            answer.cached["storage"] == N_PAGES * PAGE_TOKENS for answer in restored
        ),
        "B says the same tokens": all(a.tokens == b.tokens for a, b in zip(own, restored, strict=True)),
        "B gives them the same log-probabilities": all(
            abs(x - y) <= LOGPROB_TOLERANCE
            for a, b in zip(own, restored, strict=True)
            for x, y in zip(a.logprobs, b.logprobs, strict=True)
        ),
        "the server with other weights restored nothing": all(answer.cached["storage"] == 0 for answer in other),
        "and says something else": all(a.tokens != o.tokens for a, o in zip(own, other, strict=True)),
    }


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo-sglang.json"), help="where the results go")
    parser.add_argument("--logs", type=Path, help="keep the logs of servers and agents in this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are ended then, too
    # Unix sockets lie below it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/tmp"))
    fleet = SGLangFleet(folder, make_model(folder, sys.executable), sys.executable)
    try:
        answers = share(fleet)
    finally:
        fleet.close()
        say("all servers and agents are stopped")
        if options.logs:
            keep_logs(fleet, str(options.logs))
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\nmedian of {N_PROMPTS} prompts of {PROMPT_TOKENS} tokens\n\n{table(answers)}\n", flush=True)
    seen = claims(answers)
    result = {
        "claims": seen,
        "restored_tokens": sum(answer.cached["storage"] for answer in answers["B restores"]),
        "median_ms": {name: statistics.median(a.seconds for a in group) * 1000 for name, group in answers.items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for claim, is_so in seen.items():
        print(f"{'yes' if is_so else 'NO ':4}{claim}")
    print(f"\nresults: {options.out}")
    return 0 if all(seen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
