"""Pages of another agent's pool, read out of it by RDMA: the producer's processor does nothing.

A connection has a queue pair on every lane (`transport.lanes`) that works; a fetch shares its pages out over them. The
destinations lie in the pool of the `VerbsDevice`s, or in memory that was registered with each of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvpeer.model import KvPeerError, PeerUnavailableError, Verify
from kvpeer.native import (
    EXTENT_BYTES,
    FetchedPages,
    VerbsConnection,
    VerbsDevice,
    fetch_by_verbs,
    monotonic_ns,
)
from kvpeer.transport.base import CHUNK_BYTES_MAX, FetchBatch, NoPathError
from kvpeer.transport.lanes import Lanes, Standing
from kvpeer.transport.peer import IDLE_CLOSE_S, PooledPeer

__all__ = ["PROBE_S_MAX", "ProducerControl", "VerbsPeer"]

PROBE_S_MAX = 0.2
"""For the READ of one header over a lane that was out. It takes microseconds; a packet that is lost is sent again after
67 ms."""


class ProducerControl(Protocol):
    """What a reader asks the producer over the control channel, from a fetch thread.

    Raises, each of them:
        KvPeerError: no answer by the deadline (`monotonic_ns`), or a refusal; nothing else may come out.
    """

    def open_queue_pair(self, reader_end: bytes, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        """Returns the end of a new queue pair by the producer's rail of this number, and how many rails it has; a
        NoPathError says that there is none to be had."""

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        """Returns the extents from `first` on as they can be read by this rail, as many as one answer holds, and how
        many there are in all."""


class VerbsPeer(PooledPeer):
    """One producer, see `PooledPeer`. rails: at least one, of one pool; they stay the caller's. control: called on the
    fetching thread, as is on_lane_change (see `Lanes`)."""

    def __init__(
        self,
        rails: Sequence[VerbsDevice],
        producer_id: bytes,
        control: ProducerControl,
        *,
        verify: Verify,
        connections_max: int,
        idle_close_s: float = IDLE_CLOSE_S,
        on_lane_change: Callable[[int, str], None] = lambda number, reason: None,
    ) -> None:
        self.lanes = Lanes(len(rails), on_lane_change)

        def connect(deadline_ns: int) -> _LanesConnection:
            return _LanesConnection(rails, self.lanes, producer_id, control, deadline_ns)

        super().__init__("verbs", connect, verify=verify, connections_max=connections_max, idle_close_s=idle_close_s)


class _LanesConnection:
    """See `Connection`: a queue pair on every lane that works, renewed and probed at the begin of each fetch."""

    pages_max = VerbsConnection.pages_max

    def __init__(
        self,
        rails: Sequence[VerbsDevice],
        lanes: Lanes,
        producer_id: bytes,
        control: ProducerControl,
        deadline_ns: int,
    ) -> None:
        self._rails = rails
        self._lanes = lanes
        self._producer_id = producer_id
        self._control = control
        self._turns = itertools.count()
        self._lock = threading.Lock()  # protects everything below
        self._open: dict[int, VerbsConnection] = {}  # by lane; changed by the thread that fetches
        self._opened_ns: dict[int, int] = {}
        self._is_shut_down = False
        error = self._bring_up(deadline_ns)
        if not self._open:
            raise error or NoPathError(f"no lane to {producer_id.hex()} works: {lanes.reason}")

    @property
    def bytes_max(self) -> int:
        """Page bytes that one fetch should ask for."""
        return CHUNK_BYTES_MAX * len(self._open)

    def fetch(self, batch: FetchBatch, verify: Verify, deadline_ns: int) -> FetchedPages:
        """See `Connection`."""
        error = self._bring_up(deadline_ns)
        if not self._open:
            return FetchedPages.unanswered(len(batch), error or PeerUnavailableError("no lane works"))
        if not all(native.knows(batch.slots) for native in self._open.values()):
            error = self._learn_all(deadline_ns)
            if not self._open:
                return FetchedPages.unanswered(len(batch), error)
        # Each fetch begins with another lane: batches of few pages would all go by the first.
        turn = next(self._turns) % len(self._open)
        order = [*self._open.values()]
        fetched = fetch_by_verbs(
            [*order[turn:], *order[:turn]],
            *(batch.slots, batch.generations, batch.keys, batch.lengths, batch.destinations),
            verify,
            deadline_ns,
        )
        self._judge()
        return fetched

    def shutdown(self) -> None:
        """See `Connection`."""
        with self._lock:
            self._is_shut_down = True
            for native in self._open.values():
                native.shutdown()

    def close(self) -> None:
        """See `Connection`."""
        for number in [*self._open]:
            self._close_lane(number)

    def _bring_up(self, deadline_ns: int) -> KvPeerError | None:
        """Opens what is not open and carries pages. Returns the last error."""
        error: KvPeerError | None = None
        number = 0
        while number < len(self._lanes):  # which grows when the producer says how many rails it has
            if number not in self._open:
                standing = self._lanes.standing(number)
                if standing is not Standing.OUT:
                    error = self._open_lane(number, deadline_ns, is_probe=standing is Standing.DUE) or error
            number += 1
        return error

    def _open_lane(self, number: int, deadline_ns: int, *, is_probe: bool) -> KvPeerError | None:
        own, theirs = self._lanes.ends(number)
        try:
            native = VerbsConnection(self._rails[own], self._producer_id)
        except KvPeerError as error:
            self._lanes.failed(number, str(error), is_certain=True)
            return NoPathError(str(error))
        with self._lock:
            self._open[number], self._opened_ns[number] = native, monotonic_ns()
            if self._is_shut_down:
                native.shutdown()
        try:
            producer_end, n_rails = self._control.open_queue_pair(native.own_end, theirs, deadline_ns)
            self._lanes.learn(n_rails)
            _connect(native, producer_end)
            if is_probe:
                self._probe(number, native, deadline_ns)
        except NoPathError as error:
            self._lanes.failed(number, str(error), is_certain=True)
            self._close_lane(number)
            return error
        except KvPeerError as error:  # says nothing of the lane
            self._close_lane(number)
            return error
        except BaseException:
            self._close_lane(number)
            raise
        return None

    def _probe(self, number: int, native: VerbsConnection, deadline_ns: int) -> None:
        self._learn(number, native, deadline_ns)
        now_ns = monotonic_ns()
        if not native.probe(now_ns + min(round(PROBE_S_MAX * 1e9), (deadline_ns - now_ns) // 4)):
            raise NoPathError(f"probe: {native.error}")
        self._lanes.worked(number)

    def _learn_all(self, deadline_ns: int) -> KvPeerError | None:
        """Asks for all extents by all lanes: those that were known may have been cut into other slots meanwhile. Lanes
        of which nothing can be learnt are closed. Returns the last error."""
        last: KvPeerError | None = None
        for number, native in [*self._open.items()]:
            try:
                self._learn(number, native, deadline_ns)
            except KvPeerError as error:
                self._close_lane(number)
                last = error
        return last

    def _learn(self, number: int, native: VerbsConnection, deadline_ns: int) -> None:
        _, theirs = self._lanes.ends(number)
        first, n_extents = 0, 1
        while first < n_extents:
            extents, n_extents = self._control.extents(first, theirs, deadline_ns)
            native.learn(first, extents)
            n_told = len(extents) // EXTENT_BYTES
            if n_told == 0:
                break
            first += n_told

    def _judge(self) -> None:
        """Tells which lanes brought pages and which broke, and closes these. One is blamed for its silence only if
        another one spoke: else the deadline was short, or the producer is slow."""
        has_delivered = any(native.has_delivered for native in self._open.values())
        for number, native in [*self._open.items()]:
            if native.error is not None:
                if has_delivered or not native.is_timed_out:
                    self._lanes.failed(number, str(native.error), opened_ns=self._opened_ns[number])
                self._close_lane(number)
            elif native.has_delivered:
                self._lanes.worked(number)

    def _close_lane(self, number: int) -> None:
        with self._lock:
            native = self._open.pop(number)
        native.close()


def _connect(native: VerbsConnection, producer_end: bytes) -> None:
    try:
        native.connect(producer_end)
    except PeerUnavailableError as error:
        raise NoPathError(str(error)) from error
