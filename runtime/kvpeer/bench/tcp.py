"""Fetching over tcp: the agent's way to a peer's pages (`TcpPeer` from a `DataServer`) against a bare loop of readv and
writev over a loopback connection, between the same memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np

from kvpeer.bench.bandwidth import Batch, Walk
from kvpeer.bench.memory import MEMORY_BYTES, EngineMemory, FullPool, full_pool
from kvpeer.bench.reference import Loopback
from kvpeer.bench.rounds import Comparison, Experiment
from kvpeer.model import InternalError, Outcome, Verify
from kvpeer.native import CAPABILITY_BYTES, DataServer, Pool, ServerLimits, monotonic_ns
from kvpeer.transport import FetchBatch, Producer, TcpPeer

__all__ = ["TCP_BUDGETS", "tcp"]

TCP_BUDGETS = {Verify.GENERATION: "ratio >= 0.95", Verify.FULL: "ratio >= 0.85"}

HOST = "127.0.0.1"
READER_ID = b"benchmark reader"

FETCH_DEADLINE_NS = 10_000_000_000
"""A batch takes milliseconds; one that takes this long ends the benchmark with an error."""

LIMITS = ServerLimits(
    connections_max=64, pages_max=4096, idle_timeout_ms=60_000, io_timeout_ms=5_000, handshake_timeout_ms=2_000
)
"""As agents have them by default."""


class _Moves:
    """Each move of a batch from the producer's pool into the reader's, prepared."""

    def __init__(self, pages: FullPool, destination: int, loopbacks: list[Loopback]) -> None:
        self._pages = pages
        self._destination = destination
        self._loopbacks = loopbacks

    def product(self, peer: TcpPeer, _: int, batch: Batch) -> Callable[[], None]:
        pages = self._pages
        wanted = FetchBatch(
            slots=pages.slots[batch],
            generations=pages.generations[batch],
            keys=pages.keys[batch].tobytes(),
            lengths=np.full(len(batch), pages.page_bytes, np.uint32),
            destinations=pages.offsets[batch] + np.uint64(self._destination),
        )

        def move() -> None:
            fetched = peer.fetch(wanted, monotonic_ns() + FETCH_DEADLINE_NS)
            if (fetched.outcomes != Outcome.HIT).any():
                raise InternalError(f"a page of the benchmark was not fetched: {fetched.error}")

        return move

    def bare(self, thread: int, batch: Batch) -> Callable[[], None]:
        source = self._pages.addresses(batch)
        to = self._pages.offsets[batch] + np.uint64(self._destination)
        return lambda: self._loopbacks[thread].fetch(to, source, self._pages.page_bytes)


@contextmanager
def tcp(page_bytes: int, threads_max: int) -> Iterator[Experiment]:
    """One thread and several, each way to verify, against as many bare connections; and several against one."""
    with ExitStack() as closing_all:
        enter = closing_all.enter_context
        engine = EngineMemory(page_bytes, MEMORY_BYTES // page_bytes)
        pages = enter(full_pool(page_bytes, engine.layout))
        reader = enter(Pool(MEMORY_BYTES, pages.pool.extent_bytes, READER_ID))
        for extent in range(reader.n_extents):
            reader.touch_extent(extent)
        server = enter(DataServer(pages.pool, HOST, 0, LIMITS))
        walk = enter(closing(Walk(page_bytes, threads_max)))
        loopbacks = [enter(closing(Loopback())) for _ in range(threads_max)]
        moves = _Moves(pages, reader.payload_address, loopbacks)
        peers = {verify: enter(closing(_peer(server, pages, verify, threads_max))) for verify in Verify}
        yield _experiment(page_bytes, threads_max, walk, moves, peers)


def _experiment(
    page_bytes: int, threads_max: int, walk: Walk, moves: _Moves, peers: dict[Verify, TcpPeer]
) -> Experiment:
    subjects, rows = {}, []
    row = functools.partial(Comparison, unit="GB/s", page_bytes=page_bytes)
    for n_threads in (1, threads_max):
        subjects[f"bare {n_threads}"] = walk.bandwidth(moves.bare, n_threads)
        for verify, budget in TCP_BUDGETS.items():
            name = verify.name.lower()
            subject = f"{name} {n_threads}"
            subjects[subject] = walk.bandwidth(functools.partial(moves.product, peers[verify]), n_threads)
            rows.append(
                row(
                    name=f"fetch.tcp.{name}", subject=subject, reference=f"bare {n_threads}",
                    reference_name="readv/writev loop", threads=n_threads, budget=budget,
                )
            )  # fmt: skip
    rows += [
        row(
            name=f"fetch.tcp.{verify.name.lower()}.together", subject=f"{verify.name.lower()} {threads_max}",
            reference=f"{verify.name.lower()} 1", reference_name="one thread", threads=threads_max,
            budget="ratio >= 1",
        )
        for verify in TCP_BUDGETS
    ]  # fmt: skip
    return Experiment(subjects, rows)


def _peer(server: DataServer, pages: FullPool, verify: Verify, connections_max: int) -> TcpPeer:
    def admission(deadline_ns: int) -> bytes:
        capability = os.urandom(CAPABILITY_BYTES)
        server.admit(capability, READER_ID, deadline_ns)
        return capability

    producer = Producer(HOST, server.port, pages.pool.run_id, READER_ID)
    return TcpPeer(producer, admission, verify=verify, connections_max=connections_max)
