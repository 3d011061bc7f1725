"""`kvpeer bench local`: the benchmark of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvpeer.bench.copies import publishing, shared_memory
from kvpeer.bench.disk import disk
from kvpeer.bench.locate import locating
from kvpeer.bench.process import idling, starting
from kvpeer.bench.records import directory_records
from kvpeer.bench.rounds import Experiment, measure
from kvpeer.bench.rows import Row
from kvpeer.bench.tcp import tcp

__all__ = ["CASES", "Case", "Progress", "run"]

PAGE_BYTES = (128 << 10, 1 << 20)
"""Pages of 16 tokens of a small model, and of a mid-sized one."""

THREADS_MAX = 4

N_ROUNDS = 15
"""Odd, so that a median is a measured number; enough for quartiles that mean something."""

N_ROUNDS_QUICK = 3

_Open = Callable[[], AbstractContextManager[Experiment]]


@dataclass(frozen=True, slots=True)
class Case:
    """One experiment: what people read while it runs, how it is opened, and how often it takes turns."""

    title: str
    open: _Open
    n_rounds: int = N_ROUNDS
    n_rounds_quick: int = N_ROUNDS_QUICK


Progress = Callable[[str], None]


def _cases() -> Iterator[Case]:
    # First, because it is told from this process's own memory, which nothing has used yet.
    yield Case("memory of a directory record", lambda: directory_records(1_000_000), 2, 1)
    for page_bytes in PAGE_BYTES:
        size = f"{page_bytes >> 10} KiB pages"
        yield Case(f"publish, {size}", lambda n=page_bytes: publishing(n))  # type: ignore[misc]
        yield Case(f"fetch by shared memory, {size}", lambda n=page_bytes: shared_memory(n, THREADS_MAX))  # type: ignore[misc]
        yield Case(f"fetch by tcp, {size}", lambda n=page_bytes: tcp(n, THREADS_MAX))  # type: ignore[misc]
    yield Case("the disk tier, 1024 KiB pages", lambda: disk(1 << 20), 5, 1)
    yield Case("locate, three agents", locating)
    yield Case("start of an agent", starting)
    yield Case("an idle agent", lambda: idling(2.0), 5, 1)


CASES = tuple(_cases())


def run(say: Progress, *, is_quick: bool = False) -> list[Row]:
    """Returns the rows of all cases, one after another; two to three minutes, or half of one when quick. `say` is told
    what is going on. Needs 1 GiB of memory.

    Raises:
        ConfigError: something that the benchmark needs is not installed.
        InternalError: the product did not do what was to be measured.
    """
    rows: list[Row] = []
    for number, case in enumerate(CASES, 1):
        say(f"[{number}/{len(CASES)}] {case.title} ...")
        started = time.monotonic()
        with case.open() as experiment:
            rows += measure(experiment, case.n_rounds_quick if is_quick else case.n_rounds)
        say(f" {time.monotonic() - started:.0f} s\n")
    return rows
