"""`python -m fuzz.run`: fuzzes every target for a while, some at a time, and keeps what broke one.

Starts from the kept inputs; what is new and interesting lies in build/fuzz/corpus afterwards, what broke a target in
build/fuzz/crashes. `--keep` copies the smallest set of inputs that reaches as much into runtime/tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
RUNTIME = FOLDER.parents[1]
OUT = RUNTIME.parent / "build" / "fuzz"
BINARIES = RUNTIME / "native" / "build" / "fuzz"

PYTHON_TARGETS = ("wire", "files", "sockets")
NATIVE_TARGETS = ("server", "connection", "slots")

GRACE_S = 120
"""To start, to read the kept inputs and to write a report, on a busy machine."""

LIMITS = {
    "max_len": 8192,  # longer inputs say the same more slowly
    "timeout": 10,  # seconds for one input: nothing that a peer sends may keep a thread busy for so long
    "rss_limit_mb": 1024,
    "use_value_profile": 1,  # an input that comes nearer to a limit is kept too
}
NATIVE_LIMITS = {"malloc_limit_mb": 64}  # at once, whatever lengths an input announces


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.run", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", default=PYTHON_TARGETS + NATIVE_TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="keep what was found interesting")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        codes = list(pool.map(lambda target: fuzz(target, arguments.seconds), arguments.targets))
    if arguments.keep:
        for target in arguments.targets:
            keep(target)
    return int(any(codes))  # the code of a target that a signal ended is negative


def command_of(target: str) -> list[str]:
    if target in PYTHON_TARGETS:
        return [sys.executable, "-m", "fuzz", target]
    return [str(BINARIES / f"{target}_fuzz")]


def run(target: str, log: Path, timeout_s: float, *arguments: str) -> int:
    """libFuzzer's exit code, or 1 when it did not end in time."""
    limits = LIMITS if target in PYTHON_TARGETS else LIMITS | NATIVE_LIMITS
    options = [f"-{name}={value}" for name, value in limits.items()]
    path = os.pathsep.join([str(RUNTIME), str(FOLDER.parent)])
    with open(log, "wb") as out:
        try:
            return subprocess.run(
                [*command_of(target), *options, *arguments],
                cwd=OUT,
                env=os.environ | {"PYTHONPATH": path, "UBSAN_OPTIONS": "print_stacktrace=1"},
                stdout=out,
                stderr=out,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            out.write(b"it did not end by itself\n")
            return 1


def fuzz(target: str, seconds: int) -> int:
    """Fuzzes one target and says how it went; not 0 when it found something."""
    working, crashes, log = OUT / "corpus" / target, OUT / "crashes" / target, OUT / f"{target}.log"
    for folder in (working, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    kept = [str(path) for kind in ("corpus", "crashes") if (path := FOLDER / kind / target).is_dir()]
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={crashes}/"]
    code = run(target, log, seconds + GRACE_S, *options, str(working), *kept)
    lines = log.read_text("utf-8", "replace").splitlines()
    if code:
        print(f"{target}: broken by an input in {crashes}; the report is in {log}", flush=True)
        print("\n".join(lines[-40:]), flush=True)
        print(f"when it is mended, keep the input: cp {crashes}/<input> {FOLDER}/crashes/{target}/", flush=True)
    else:
        print(f"{target}: {next((line for line in reversed(lines) if 'DONE' in line), 'ended')}", flush=True)
    return code


def keep(target: str) -> None:
    """Replaces the kept inputs, but for the seeds, by the fewest that reach as much as all that were found."""
    kept = FOLDER / "corpus" / target
    merged = OUT / "merged" / target
    merged.mkdir(parents=True, exist_ok=True)
    for path in [*merged.iterdir(), *kept.glob("[!s]*")]:
        path.unlink()
    run(target, OUT / f"{target}-merge.log", 600, "-merge=1", str(merged), str(kept), str(OUT / "corpus" / target))
    seeds = {path.read_bytes() for path in kept.iterdir()}
    for path in merged.iterdir():
        if path.read_bytes() not in seeds:
            path.rename(kept / path.name[:12])


if __name__ == "__main__":
    sys.exit(main())
