"""`kvpeer sim cluster`: runs simulated clusters, seed by seed, and prints what they broke and how to see it again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from kvpeer.cli.fleet import add_fleet
from kvpeer.model import ConfigError

if TYPE_CHECKING:
    from kvpeer.sim import Profile, RunResult

__all__ = ["add_sim"]

EXIT_FAILED = 1
"""Some seed broke a promise."""

TRACE_LINES = 60
"""Printed of a failing seed that was asked for with --seed; --trace says otherwise."""


def add_sim(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    sim = commands.add_parser("sim", help="simulate clusters under faults, and fleets of engines")
    kinds = sim.add_subparsers(title="simulations", required=True, metavar="WHAT")
    cluster = kinds.add_parser("cluster", help="agents with a hostile network, clock and memory, from a seed")
    cluster.add_argument("--agents", type=int, default=16, metavar="N", help="agents in the cluster (16)")
    cluster.add_argument("--seeds", type=int, default=200, metavar="N", help="how many seeds to run (200)")
    cluster.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of them (0)")
    cluster.add_argument("--seed", type=int, metavar="N", help="run this seed alone and print the end of its trace")
    cluster.add_argument("--minutes", type=float, metavar="M", help="simulated minutes of faults (0.1)")
    cluster.add_argument("--profile", default="standard", help="how hostile: see docs/simulation.md (standard)")
    cluster.add_argument("--trace", type=int, metavar="N", help="lines of the trace to print of a seed that fails")
    cluster.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the seeds (1)")
    cluster.set_defaults(run=_run_cluster)
    add_fleet(kinds)


def _run_cluster(options: argparse.Namespace) -> int:
    from kvpeer.sim import profile_named

    hostile_s = None if options.minutes is None else options.minutes * 60
    profile = profile_named(options.profile, options.agents, hostile_s)
    if options.seeds < 1 or options.jobs < 1:
        raise ConfigError("--seeds and --jobs must be at least 1")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    default_lines = 0 if options.seed is None else TRACE_LINES
    n_lines = default_lines if options.trace is None else options.trace
    began_at = time.monotonic()
    n_failed, simulated_s = 0, 0.0
    for result in _results(seeds, profile, n_lines, options.jobs):
        simulated_s += result.simulated_s
        n_failed += not result.is_green
        if not result.is_green or options.seed is not None:
            _print_result(result, options)
    _print_summary(profile, len(seeds), n_failed, simulated_s, time.monotonic() - began_at)
    return EXIT_FAILED if n_failed else 0


def _results(seeds: range, profile: Profile, n_lines: int, jobs: int) -> Iterator[RunResult]:
    from kvpeer.sim import simulate

    run = partial(simulate, profile=profile, n_lines=n_lines)
    if jobs == 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as executor:
        yield from executor.map(run, seeds)


def _print_result(result: RunResult, options: argparse.Namespace) -> None:
    out = sys.stdout.write
    for line in result.lines:
        out(f"{line}\n")
    out(f"seed {result.seed}: {'green' if result.is_green else 'FAILED'}, digest {result.digest}\n")
    for violation in result.violations:
        out(f"  {violation}\n")
    if not result.is_green:
        minutes = "" if options.minutes is None else f" --minutes {options.minutes:g}"
        size = f"--agents {options.agents} --profile {options.profile}{minutes}"
        out(f"  replay: kvpeer sim cluster {size} --seed {result.seed}\n")
    sys.stdout.flush()


def _print_summary(profile: Profile, n_seeds: int, n_failed: int, simulated_s: float, took_s: float) -> None:
    sys.stdout.write(
        f"{n_seeds} seeds of {profile.n_agents} agents, profile {profile.name}: {n_failed} failed; "
        f"{simulated_s / 3600:.3f} simulated hours in {took_s:.1f} s, {took_s / simulated_s * 3600:.0f} s an hour\n"
    )
