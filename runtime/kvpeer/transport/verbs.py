"""Pages of another agent's pool, read out of it by RDMA: the producer's processor does nothing.

The destinations lie in the pool of the `VerbsDevice`, or in memory that was registered with it.
"""

from __future__ import annotations

from typing import Protocol

from kvpeer.model import KvPeerError, PeerUnavailableError, Verify
from kvpeer.native import EXTENT_BYTES, FetchedPages, VerbsConnection, VerbsDevice
from kvpeer.transport.base import FetchBatch, NoPathError
from kvpeer.transport.peer import IDLE_CLOSE_S, PooledPeer

__all__ = ["ProducerControl", "VerbsPeer"]


class ProducerControl(Protocol):
    """What a reader asks the producer over the control channel, from a fetch thread.

    Raises, each of them:
        KvPeerError: no answer by the deadline (`monotonic_ns`), or a refusal; nothing else may come out.
    """

    def open_queue_pair(self, reader_end: bytes, deadline_ns: int) -> bytes:
        """Returns the producer's end of a new queue pair; a NoPathError says that the producer has none to give."""

    def extents(self, first: int, deadline_ns: int) -> tuple[bytes, int]:
        """Returns the extents from `first` on, as many as one answer holds, and how many there are in all."""


class VerbsPeer(PooledPeer):
    """One producer, see `PooledPeer`. control: called on the fetching thread. The device stays the caller's."""

    def __init__(
        self,
        device: VerbsDevice,
        producer_id: bytes,
        control: ProducerControl,
        *,
        verify: Verify,
        connections_max: int,
        idle_close_s: float = IDLE_CLOSE_S,
    ) -> None:
        def connect(deadline_ns: int) -> _VerbsConnection:
            return _VerbsConnection(device, producer_id, control, deadline_ns)

        super().__init__("verbs", connect, verify=verify, connections_max=connections_max, idle_close_s=idle_close_s)


class _VerbsConnection:
    """See `Connection`. Learns of the producer's extents when a fetch needs one that it does not know."""

    def __init__(self, device: VerbsDevice, producer_id: bytes, control: ProducerControl, deadline_ns: int) -> None:
        self._control = control
        try:
            self._native = VerbsConnection(device, producer_id)
        except KvPeerError as error:
            raise NoPathError(str(error)) from error
        self.pages_max = self._native.pages_max
        self.shutdown = self._native.shutdown
        self.close = self._native.close
        try:
            producer_end = control.open_queue_pair(self._native.own_end, deadline_ns)
            self._connect(producer_end)
        except BaseException:
            self._native.close()
            raise

    def _connect(self, producer_end: bytes) -> None:
        try:
            self._native.connect(producer_end)
        except PeerUnavailableError as error:
            raise NoPathError(str(error)) from error

    def fetch(self, batch: FetchBatch, verify: Verify, deadline_ns: int) -> FetchedPages:
        if not self._native.knows(batch.slots):
            try:
                self._learn(deadline_ns)
            except KvPeerError as error:
                return FetchedPages.unanswered(len(batch), error)
        return self._native.fetch(
            batch.slots, batch.generations, batch.keys, batch.lengths, batch.destinations, verify, deadline_ns
        )

    def _learn(self, deadline_ns: int) -> None:
        """Asks for all extents: those that were known may have been cut into other slots meanwhile."""
        first, n_extents = 0, 1
        while first < n_extents:
            extents, n_extents = self._control.extents(first, deadline_ns)
            self._native.learn(first, extents)
            n_told = len(extents) // EXTENT_BYTES
            if n_told == 0:
                break
            first += n_told
