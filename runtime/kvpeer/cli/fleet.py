"""`kvpeer sim fleet`: sets published results of pulls between peers beside what a simulated fleet makes of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvpeer.model import ConfigError

if TYPE_CHECKING:
    from kvpeer.sim.fleet.pool import Arm, Stage, Variant

__all__ = ["add_fleet"]


def add_fleet(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the simulation to the parser of `kvpeer sim`."""
    fleet = kinds.add_parser("fleet", help="engines that pull or recompute, beside published results")
    fleet.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds to take means over (3)")
    fleet.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the runs (1)")
    fleet.add_argument("--page", metavar="FILE", help="write the page there; without, it is printed")
    fleet.set_defaults(run=_run_fleet)


def _run_fleet(options: argparse.Namespace) -> int:
    from kvpeer.sim.fleet import Runs, page, planned

    if options.seeds < 1 or options.jobs < 1:
        raise ConfigError("--seeds and --jobs must be at least 1")
    if options.page is not None and not Path(options.page).parent.is_dir():
        raise ConfigError(f"--page {options.page}: there is no folder {Path(options.page).parent}")
    began_at = time.monotonic()
    seeds = range(options.seeds)
    runs = [(arm, variant, seed) for arm, variant in planned() for seed in seeds]
    stages: dict[tuple[str, str], list[list[Stage]]] = {}
    for (arm, variant, _), stages_of_run in zip(runs, _results(runs, options.jobs), strict=True):
        stages.setdefault((arm.name, variant.name), []).append(stages_of_run)
    text = page(Runs(stages), seeds)
    if options.page is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(options.page).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {options.page} cannot be written: {error}") from error
    sys.stdout.write(f"{len(runs)} runs in {time.monotonic() - began_at:.0f} s, written to {options.page}\n")
    return 0


def _results(runs: Sequence[tuple[Arm, Variant, int]], jobs: int) -> Iterator[list[Stage]]:
    if jobs == 1:
        yield from map(_run, runs)
        return
    with ProcessPoolExecutor(jobs) as executor:
        yield from executor.map(_run, runs)


def _run(run: tuple[Arm, Variant, int]) -> list[Stage]:
    from kvpeer.sim.fleet import run_pool

    arm, variant, seed = run
    return run_pool(arm, seed, variant)
