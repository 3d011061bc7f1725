"""Pages of another agent's pool, over its native data server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpeer.model import Verify
from kvpeer.native import DataConnection, FetchedPages
from kvpeer.transport.base import CHUNK_BYTES_MAX, FetchBatch
from kvpeer.transport.peer import IDLE_CLOSE_S, PooledPeer

__all__ = ["CapabilitySource", "Producer", "TcpPeer"]

CapabilitySource = Callable[[int], bytes]
"""Asks the producer for a capability (32 bytes) by a deadline (`monotonic_ns`): the control channel does.

Raises:
    KvPeerError: there is none; nothing else may come out.
"""


@dataclass(frozen=True, slots=True)
class Producer:
    """Whose pages are read, by whom, and where. host is numeric; the ids are those of this run of the two agents."""

    host: str
    data_port: int
    producer_id: bytes
    reader_id: bytes


class TcpPeer(PooledPeer):
    """One producer, see `PooledPeer`. capability: see `CapabilitySource`; called on the fetching thread."""

    def __init__(
        self,
        producer: Producer,
        capability: CapabilitySource,
        *,
        verify: Verify,
        connections_max: int,
        idle_close_s: float = IDLE_CLOSE_S,
    ) -> None:
        def connect(deadline_ns: int) -> _TcpConnection:
            return _TcpConnection(producer, capability(deadline_ns), deadline_ns)

        super().__init__("tcp", connect, verify=verify, connections_max=connections_max, idle_close_s=idle_close_s)


class _TcpConnection:
    """See `Connection`."""

    bytes_max = CHUNK_BYTES_MAX

    def __init__(self, to: Producer, capability: bytes, deadline_ns: int) -> None:
        self._native = DataConnection(to.host, to.data_port, capability, to.reader_id, to.producer_id, deadline_ns)
        self.pages_max = self._native.pages_max
        self.shutdown = self._native.shutdown
        self.close = self._native.close

    def fetch(self, batch: FetchBatch, verify: Verify, deadline_ns: int) -> FetchedPages:
        return self._native.fetch(
            batch.slots, batch.generations, batch.keys, batch.lengths, batch.destinations, verify, deadline_ns
        )
