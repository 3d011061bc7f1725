"""Publishing and fetching within one host: the client's native calls against memcpy of the same bytes.

Locations are held (the agent was asked before), so that a batch's copy, checksum and verification are what is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from kvpeer.bench import reference
from kvpeer.bench.bandwidth import Batch, Walk
from kvpeer.bench.memory import MEMORY_BYTES, PIECE_BYTES, EngineMemory, FullPool, full_pool
from kvpeer.bench.rounds import Comparison, Experiment
from kvpeer.client import NativeCopier, SlotPages
from kvpeer.model import InternalError, Outcome, Verify

__all__ = ["SHM_BUDGETS", "publishing", "shared_memory"]

SHM_BUDGETS = {Verify.GENERATION: "ratio >= 0.9", Verify.FULL: "ratio >= 0.7"}


class _Moves:
    """Each move of a batch between an engine and a pool, prepared."""

    def __init__(self, engine: EngineMemory, pages: FullPool) -> None:
        self._engine = engine
        self._pages = pages
        self._copier = NativeCopier(engine.layout)

    def gather(self, _: int, batch: Batch) -> Callable[[], None]:
        offsets = self._pages.offsets[batch]

        def move() -> None:
            self._copier.gather(self._pages.map, offsets, 0, batch)

        return move

    def scatter(self, verify: Verify, _: int, batch: Batch) -> Callable[[], None]:
        pages = self._pages
        located = SlotPages(
            pages.keys[batch].tobytes(), pages.slots[batch], pages.generations[batch], pages.offsets[batch]
        )

        def move() -> None:
            if (self._copier.scatter(pages.map, located, 0, 0, batch, verify) != Outcome.HIT).any():
                raise InternalError("a page of the benchmark was not read back right")

        return move

    def copy_in(self, _: int, batch: Batch) -> Callable[[], None]:
        to, source = self._pages.pieces(batch), self._engine.pieces(batch)
        return lambda: reference.copy(to, source, PIECE_BYTES)

    def copy_in_and_sum(self, _: int, batch: Batch) -> Callable[[], None]:
        to, source = self._pages.pieces(batch), self._engine.pieces(batch)

        def move() -> None:
            reference.copy_and_sum(to, source, PIECE_BYTES)

        return move

    def copy_out(self, _: int, batch: Batch) -> Callable[[], None]:
        to, source = self._engine.pieces(batch), self._pages.pieces(batch)
        return lambda: reference.copy(to, source, PIECE_BYTES)


@contextmanager
def publishing(page_bytes: int) -> Iterator[Experiment]:
    """`PoolMap.gather`, against memcpy with a checksum of the copy, and against memcpy alone."""
    with _memory(page_bytes) as moves, closing(Walk(page_bytes, 1)) as walk:
        row = functools.partial(
            Comparison, name="publish.copy", unit="ms/batch", subject="gather", page_bytes=page_bytes, threads=1
        )
        yield Experiment(
            {
                "copy and sum": walk.batch_ms(moves.copy_in_and_sum),
                "gather": walk.batch_ms(moves.gather),
                "copy": walk.batch_ms(moves.copy_in),
            },
            [
                row(reference="copy and sum", reference_name="memcpy, checksum", budget="ratio <= 1.1"),
                row(reference="copy", reference_name="memcpy"),
            ],
        )


@contextmanager
def shared_memory(page_bytes: int, threads_max: int) -> Iterator[Experiment]:
    """`PoolMap.scatter` with each way to verify, against memcpy; and several threads that fetch against one."""
    with _memory(page_bytes) as moves, closing(Walk(page_bytes, threads_max)) as walk:
        subjects = {"memcpy": walk.bandwidth(moves.copy_out)}
        rows = []
        for verify, budget in SHM_BUDGETS.items():
            name = verify.name.lower()
            mover = functools.partial(moves.scatter, verify)
            subjects |= {name: walk.bandwidth(mover), f"{name} threads": walk.bandwidth(mover, threads_max)}
            row = functools.partial(Comparison, unit="GB/s", page_bytes=page_bytes)
            title = f"fetch.shm.{name}"
            one = row(title, subject=name, reference="memcpy", reference_name="memcpy", threads=1, budget=budget)
            together = row(
                f"{title}.together", subject=f"{name} threads", reference=name, reference_name="one thread",
                threads=threads_max, budget="ratio >= 1",
            )  # fmt: skip
            rows += [one, together]
        yield Experiment(subjects, rows)


@contextmanager
def _memory(page_bytes: int) -> Iterator[_Moves]:
    engine = EngineMemory(page_bytes, MEMORY_BYTES // page_bytes)
    with full_pool(page_bytes, engine.layout) as pages:
        yield _Moves(engine, pages)
