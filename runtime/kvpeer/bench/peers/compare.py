"""One run: which systems are there, their turns, and the rows of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple, Protocol

from kvpeer.bench.peers.report import NotRun, Report, system_of
from kvpeer.bench.peers.system import SystemFailedError, Way
from kvpeer.bench.rounds import Comparison, Experiment, measure
from kvpeer.bench.rows import Row

__all__ = ["PAGE_BYTES", "SHAPES", "Candidate", "Running", "Shape", "comparisons", "run"]

PAGE_BYTES = (128 << 10, 1 << 20)
"""As in the benchmark of one machine."""

N_ROUNDS = 9
"""Odd, so that a median is a measured number. A round has a turn of each system in each shape."""

N_ROUNDS_QUICK = 3


class Shape(NamedTuple):
    """Who reads at a time."""

    processes: int
    threads: int

    @property
    def suffix(self) -> str:
        """Of a row's name: rows tell the threads themselves."""
        return f".{self.processes}_processes" if self.processes > 1 else ""


SHAPES = (Shape(1, 1), Shape(1, 4), Shape(4, 1))


class Running(Protocol):
    """A system that runs."""

    def bandwidth(self, n_processes: int, n_threads: int) -> Callable[[], float] | None:
        """Returns a subject, in GB/s; None where it has no such shape."""

    def close(self) -> None:
        """Ends it."""


class Candidate(Protocol):
    """A system that may run here."""

    @property
    def name(self) -> str:
        """In rows."""

    @property
    def way(self) -> Way:
        """What its bytes pass through."""

    def missing(self) -> str | None:
        """Returns why it cannot run here, as far as that can be told without trying."""

    def start(self, page_bytes: int) -> Running:
        """Starts it.

        Raises:
            SystemFailedError: it does not run, or brings wrong bytes.
        """


OWN = {Way.MEMORY: "kvpeer.shm", Way.TCP: "kvpeer.tcp", Way.RDMA: "kvpeer.verbs"}
"""What the others of a way are held against: kvpeer as agents have it by default."""

BARE = {"memcpy": None, "sockets": None, "ib_read_bw": "ratio >= 0.97"}
"""What is under kvpeer on each way, and the budget beside it. `kvpeer bench local` judges the first two."""


def run(candidates: Sequence[Candidate], say: Callable[[str], None], *, is_quick: bool = False) -> Report:
    """Returns what was measured of these, and why the others were not; four minutes for all, and 7 GB of memory."""
    not_run = dict(_missing(candidates))
    rows: list[Row] = []
    for page_bytes in PAGE_BYTES:
        started = time.monotonic()
        with ExitStack() as closing_all:
            running = {}
            for candidate in candidates:
                if candidate.name not in not_run:
                    say(f"{page_bytes >> 10} KiB pages: {candidate.name} starts\n")
                    try:
                        running[candidate.name] = closing_all.enter_context(closing(candidate.start(page_bytes)))
                    except SystemFailedError as error:
                        not_run[candidate.name] = error.reason
            say(f"{page_bytes >> 10} KiB pages: {len(running)} systems take turns ...")
            ways = {candidate.name: candidate.way for candidate in candidates}
            rows += _measure(page_bytes, ways, running, not_run, N_ROUNDS_QUICK if is_quick else N_ROUNDS)
        say(f" {time.monotonic() - started:.0f} s\n")
    # What was measured of a system before it failed says nothing of it.
    kept = [row for row in rows if not any(_concerns(row, name) for name in not_run)]
    return Report(kept, [NotRun(name, reason) for name, reason in not_run.items()])


def _measure(
    page_bytes: int, ways: Mapping[str, Way], running: dict[str, Running], not_run: dict[str, str], n_rounds: int
) -> list[Row]:
    """Starts over without a system that fails, and says why it is not there."""
    while True:
        try:
            return measure(_experiment(page_bytes, ways, running), n_rounds)
        except SystemFailedError as error:
            not_run[error.system] = error.reason
            del running[error.system]


def _missing(candidates: Sequence[Candidate]) -> Iterator[tuple[str, str]]:
    for candidate in candidates:
        reason = candidate.missing()
        if reason is not None:
            yield candidate.name, reason


def _experiment(page_bytes: int, ways: Mapping[str, Way], running: Mapping[str, Running]) -> Experiment:
    """System by system: its shapes next to each other in time, since what is expected of them differs least."""
    subjects = {}
    for name, system in running.items():
        for shape in SHAPES:
            subject = system.bandwidth(*shape)
            if subject is not None:
                subjects[f"{name} {shape}"] = subject
    present = {name: ways[name] for name in running}
    rows = [row for row in comparisons(page_bytes, present) if {row.subject, row.reference} - {None} <= subjects.keys()]
    return Experiment(subjects, rows)


def _concerns(row: Row, name: str) -> bool:
    return row.reference_name == name or system_of(row) == name


def comparisons(page_bytes: int, ways: Mapping[str, Way]) -> Iterator[Comparison]:
    """All rows of these systems, by their ways: each one's bandwidth; kvpeer's beside each other system of its way;
    several readers of kvpeer's beside one."""
    for shape in SHAPES:
        row = partial(Comparison, unit="GB/s", page_bytes=page_bytes, threads=shape.threads)
        for name, way in ways.items():
            yield row(name=f"peers.{name}{shape.suffix}", subject=f"{name} {shape}")
            own = OWN[way]
            if own in ways and not name.startswith(own):
                yield row(
                    name=f"peers.{own}{shape.suffix}.beside.{name}", subject=f"{own} {shape}",
                    reference=f"{name} {shape}", reference_name=name, budget=BARE.get(name, "ratio >= 1"),
                )  # fmt: skip
        for name in (*OWN.values(), *BARE):
            if name in ways and shape != SHAPES[0]:
                yield row(
                    name=f"peers.{name}{shape.suffix}.together", subject=f"{name} {shape}",
                    reference=f"{name} {SHAPES[0]}", reference_name="one thread",
                    budget=None if name in BARE else "ratio >= 1",
                )  # fmt: skip
