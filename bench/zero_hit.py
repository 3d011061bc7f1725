"""What kvpeer costs an engine that it cannot help: three real vLLM engines, one with kvpeer, one without it, and one
with a connector that does nothing, get prompts that nobody has seen before, in turns.

Every prompt is looked up in a directory of two agents, found nowhere, computed, and its pages are published. The order
of the engines changes with every round, and each round gives one ratio, so that what else the machine does meets all.
The connector that does nothing shows how much of it is vLLM's own path of a connector. Prints a table; writes rows as
JSON; ends with status 1 with `--check` when the engine with kvpeer is below the budget.

An engine on the CPU computes on every core that there is, so that whatever an agent does is done in its place, and its
threads wait for each other meanwhile. `--cores` leaves the rest of the machine to the agents, as it is beside a GPU.
The tiny model computes a token in less time than any that is of use; `--model small` takes several times as long.

Not what it measures: a device copy (this engine's KV is in host memory).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from engines.harness import Fleet, Server, eventually, make_fleet, prompt, say
from kvpeer.bench.report import table
from kvpeer.bench.rounds import Comparison, row_of
from kvpeer.bench.rows import Row, encode_rows

PROMPT_TOKENS = 1029
"""Beyond the floor of a pull (512), so that every prompt is looked up."""

N_GENERATED = 32
N_ALONE = 5
"""Requests one after the other: the time to first token of a request that shares the engine with others is mostly the
time of the others."""

N_CONCURRENT = 4
N_TOGETHER = 12
"""Requests of which N_CONCURRENT run at a time, for the throughput."""

N_WARM_UP = 4
"""Rounds that are not measured. After their 68 prompts an engine that never found anything waits for no answer any more
(`kvpeer.engines.vllm.worth`)."""

MODELS = {"tiny": (), "small": ("qwen3", "1", "4", "384")}
"""Arguments of tiny_model.py."""

MEASURED = (
    ("throughput", "tokens_per_s", "tokens/s", "ratio >= 0.97"),
    ("ttft", "ttft_ms", "ms", "ratio <= 1.03"),
)

IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "idle_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True)
class Turn:
    """N_ALONE requests one by one, then N_TOGETHER at once, on one engine."""

    tokens_per_s: float
    ttft_ms: float


def take_turn(server: Server, seed: str) -> Turn:
    """Unseen prompts: the median time to first token of those alone; prompt and generated tokens per second of those
    together."""
    prompts = [prompt(f"{server.name} {seed} {number}", PROMPT_TOKENS) for number in range(N_ALONE + N_TOGETHER)]
    alone = [server.stream(each, N_GENERATED).ttft_ms for each in prompts[:N_ALONE]]
    began_at = time.perf_counter()
    with ThreadPoolExecutor(N_CONCURRENT) as asking:
        for _ in asking.map(lambda each: server.stream(each, N_GENERATED), prompts[N_ALONE:]):
            pass
    n_tokens = N_TOGETHER * (PROMPT_TOKENS + N_GENERATED)
    return Turn(n_tokens / (time.perf_counter() - began_at), statistics.median(alone))


Rounds = dict[str, list[Turn]]
"""By the engine's name, one turn a round."""


def measure(servers: Sequence[Server], n_rounds: int) -> Rounds:
    """All take turns, each round beginning with another one."""
    rounds: Rounds = {server.name: [] for server in servers}
    for number in range(-N_WARM_UP, n_rounds):
        first = number % len(servers)
        for server in (*servers[first:], *servers[:first]):
            turn = take_turn(server, f"round {number}")
            if number >= 0:
                rounds[server.name].append(turn)
        if number % 5 == 4:
            say(f"round {number + 1} of {n_rounds}")
    return rounds


def start_neighbour(fleet: Fleet) -> subprocess.Popen[bytes]:
    """A second agent, so that half of the directory is in another process."""
    folder = fleet.folder / "neighbour"
    folder.mkdir(mode=0o700)
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen(
            [fleet.python, "-m", "kvpeer.cli", "agent", "--embedded"],
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "KVPEER_AGENT_RUNTIME_DIR": str(fleet.runtime_folder),
                "KVPEER_AGENT_SOCKET": str(folder / "agent.sock"),
                "KVPEER_POOL_SIZE": "16Mi",
                "KVPEER_POOL_EXTENT_SIZE": "8Mi",
            },
        )


def run(folder: Path, n_rounds: int, n_cores: int, model: str) -> Rounds:
    """Starts everything, measures, ends everything. n_cores: that each engine computes on; 0 for all."""
    fleet = make_fleet(folder, sys.executable, MODELS[model])
    say("starting three vLLM engines on the CPU (one to three minutes)")
    neighbour: subprocess.Popen[bytes] | None = None
    try:
        bound = {"OMP_NUM_THREADS": str(n_cores)} if n_cores else {}
        bench = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
        plain = fleet.start("plain", with_kvpeer=False, environment=bound)
        idle = fleet.start(
            "idle", "--kv-transfer-config", json.dumps(IDLE), with_kvpeer=False, environment={**bench, **bound}
        )
        ours = fleet.start("ours", environment=bound)
        for server in (plain, idle, ours):
            server.wait_ready()
        neighbour = start_neighbour(fleet)
        eventually(lambda: ours.agent_metric("kvpeer_membership_members", state="alive") == 2, "two agents are members")
        say("measuring")
        rounds = measure((plain, idle, ours), n_rounds)
        published = ours.agent_metric("kvpeer_pool_pages", state="committed")
        if ours.cached_tokens("p2p") or ours.cached_tokens("host") or not published:
            raise SystemExit("the prompts were meant to be published and never to be found: this run proves nothing")
        return rounds
    finally:
        fleet.close()
        if neighbour is not None:
            neighbour.terminate()
            neighbour.wait(20)


def rows_of(rounds: Rounds, model: str, n_cores: int) -> list[Row]:
    """kvpeer against vLLM without a connector, which is judged; and what the difference is made of."""
    names = {"plain": "vLLM without kvpeer", "idle": "vLLM with an idle connector"}
    pairs = (("zero_hit", "ours", "plain"), ("zero_hit_above_idle", "ours", "idle"), ("idle", "idle", "plain"))
    rows = []
    for what, field, unit, budget in MEASURED:
        samples = {name: [getattr(turn, field) for turn in turns] for name, turns in rounds.items()}
        for row, subject, reference in pairs:
            comparison = Comparison(
                name=f"engine.vllm.{row}.{model}.{what}",
                unit=unit,
                subject=subject,
                reference=reference,
                reference_name=names[reference],
                threads=n_cores or os.cpu_count(),
                budget=budget if row == "zero_hit" else None,
            )
            rows.append(row_of(comparison, samples))
    return rows


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds to measure (each one turn on all three engines)")
    parser.add_argument("--cores", type=int, default=0, help="cores that each engine computes on (default: all)")
    parser.add_argument("--model", choices=MODELS, default="tiny", help="how much an engine has to compute")
    parser.add_argument("--check", action="store_true", help="status 1 when a budget does not hold")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/tmp"))  # Unix sockets lie below it: their paths must be short
    try:
        rounds = run(folder, options.rounds, options.cores, options.model)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = rows_of(rounds, options.model, options.cores)
    print(table(rows))
    if options.json:
        options.json.write_bytes(encode_rows(rows))
    return int(options.check and not all(each.holds is not False for each in rows))


if __name__ == "__main__":
    sys.exit(main())
