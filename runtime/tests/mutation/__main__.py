"""`python -m mutation [MODULE ...]`, run in runtime/tests: changes modules of `core` and `wire` in small ways, one at a
time, and lists the changes that no test noticed.

Each module has a workspace of its own below build/mutants with a copy of the sources and tests, where mutmut works and
remembers what it knows: a run that was interrupted goes on where it stopped, and after a change of tests only the
survivors are tried again. `--minutes` bounds a call. Texts of errors are not mutated: their words are for people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mutation.modules import TESTS_OF_MODULE

TESTS = Path(__file__).parents[1]
RUNTIME = TESTS.parent
OUT = RUNTIME.parent / "build" / "mutants"

KILLED_MIN = 0.80

_SURVIVED = (0, 33)
"""mutmut's exit codes: all tests passed; there was no test that calls the function."""
_KILLED = (1, 3, 36, 24, -24, 152, 255)
"""Tests failed, pytest failed, or the tests did not end in time, in the ways in which mutmut says so."""

SHOW_S = 120
"""To print the differences; a fraction of a second each."""

_SHOW = """
import sys
from mutmut.__main__ import show
for name in sys.stdin.read().split():
    show.callback(name)
"""

_SETTINGS = """
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "-p no:cacheprovider --strict-markers"
markers = ["process", "engine", "long", "soak"]

[tool.mutmut]
source_paths = ["kvpeer"]
only_mutate = ["kvpeer/{module}.py"]
pytest_add_cli_args = ["--hypothesis-profile=quick"]
pytest_add_cli_args_test_selection = {tests}
also_copy = ["kvpeer/native/libkvpeer.so"]
do_not_mutate_patterns = ['raise \\w+', 'f"']
use_git_change_detection = false
track_dependencies = false
"""


@dataclass(frozen=True)
class Tally:
    """What is known of a module's mutants."""

    module: str
    survivors: list[str]
    n_killed: int
    n_unknown: int

    @property
    def killed(self) -> float:
        return self.n_killed / max(1, self.n_killed + len(self.survivors))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="for example core/ring; all without any")
    parser.add_argument("--minutes", type=float, default=240.0, help="stop after so long; the next run goes on")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    arguments = parser.parse_args()
    unknown = set(arguments.modules) - TESTS_OF_MODULE.keys()
    if unknown:
        parser.error(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(TESTS_OF_MODULE)}")
    ends_at = time.monotonic() + arguments.minutes * 60
    for module in arguments.modules or TESTS_OF_MODULE:
        if (left_s := ends_at - time.monotonic()) > 0:
            mutate(module, arguments.jobs, left_s)
            write_survivors(module)
    tallies = [tally_of(module) for module in TESTS_OF_MODULE if workspace(module).exists()]
    return report(tallies)


def workspace(module: str) -> Path:
    return OUT / module.replace("/", "-")


def mutate(module: str, n_jobs: int, left_s: float) -> None:
    """Runs mutmut on the module's mutants whose fate is not known."""
    space = workspace(module)
    if copy_sources(module, space):
        forget_survivors(module)
    print(f"== {module}", flush=True)
    with open(space / "mutmut.log", "ab") as log:
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(n_jobs)]
        # A session of its own, so that mutants that loop for ever end with it.
        running = subprocess.Popen(command, cwd=space, stdout=log, stderr=log, start_new_session=True)
    try:
        running.wait(left_s)
    except subprocess.TimeoutExpired:
        print("   out of time; the next run goes on here")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def forget_survivors(module: str) -> None:
    """Makes the survivors unknown again, and which test calls what: the tests have changed."""
    mutants = workspace(module) / "mutants"
    (mutants / "mutmut-stats.json").unlink(missing_ok=True)
    results = mutants / "kvpeer" / f"{module}.py.meta"
    if results.exists():
        known = json.loads(results.read_text())
        codes = known["exit_code_by_key"]
        known["exit_code_by_key"] = {name: None if code in _SURVIVED else code for name, code in codes.items()}
        results.write_text(json.dumps(known))


def copy_sources(module: str, space: Path) -> bool:
    """Brings the workspace up to date; returns whether a test of the module changed."""
    tests = [f"tests/{name}" for name in TESTS_OF_MODULE[module]]
    sources = [*RUNTIME.glob("kvpeer/**/*.py"), RUNTIME / "kvpeer/native/libkvpeer.so"]
    support = [path for path in TESTS.glob("**/*.py") if not path.name.startswith("test_")]
    changed = False
    for path in [*sources, *support, *(RUNTIME / test for test in tests)]:
        target = space / path.relative_to(RUNTIME)
        if not target.exists() or target.read_bytes() != path.read_bytes():
            changed |= target.exists() or "tests" in target.parts
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            stale_copy = space / "mutants" / path.relative_to(RUNTIME)
            if "tests" in path.relative_to(RUNTIME).parts and stale_copy.exists():
                stale_copy.unlink()
    settings = _SETTINGS.format(module=module, tests=json.dumps(tests))
    if not (space / "pyproject.toml").exists() or (space / "pyproject.toml").read_text() != settings:
        (space / "pyproject.toml").write_text(settings)
        changed = True
    return changed


def tally_of(module: str) -> Tally:
    results = workspace(module) / "mutants" / "kvpeer" / f"{module}.py.meta"
    codes = json.loads(results.read_text())["exit_code_by_key"] if results.exists() else {}
    survivors = [name for name, code in codes.items() if code in _SURVIVED]
    n_killed = sum(code in _KILLED for code in codes.values())
    return Tally(module, survivors, n_killed, len(codes) - n_killed - len(survivors))


def write_survivors(module: str) -> None:
    """The differences that no test noticed, into survivors.txt of the module's workspace."""
    space = workspace(module)
    with open(space / "survivors.txt", "w") as out:
        names = "\n".join(tally_of(module).survivors)
        command = [sys.executable, "-c", _SHOW]
        subprocess.run(command, cwd=space, input=names, text=True, stdout=out, timeout=SHOW_S, check=False)


def report(tallies: list[Tally]) -> int:
    for tally in tallies:
        n_tried = tally.n_killed + len(tally.survivors)
        unknown = f", {tally.n_unknown} not tried" if tally.n_unknown else ""
        print(f"{tally.killed:7.1%}  {tally.module}: {len(tally.survivors)} of {n_tried} survived{unknown}")
    n_killed, n_survived = sum(t.n_killed for t in tallies), sum(len(t.survivors) for t in tallies)
    killed = n_killed / max(1, n_killed + n_survived)
    print(f"{killed:7.1%}  in all; what survived is in {OUT}/<module>/survivors.txt")
    return 0 if killed >= KILLED_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
