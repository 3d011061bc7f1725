"""Moving page bytes into memory of this process: one interface, one module a path.

`fetch` returns only when nothing writes into the destinations any more, whatever happened.
"""

from __future__ import annotations

from kvpeer.transport.base import CHUNK_BYTES_MAX, FetchBatch, FetchResult, NoPathError, NotAskedError, Transport
from kvpeer.transport.fallback import FallbackPeer
from kvpeer.transport.lanes import Lanes
from kvpeer.transport.peer import PooledPeer
from kvpeer.transport.shm import ShmTransport
from kvpeer.transport.tcp import CapabilitySource, Producer, TcpPeer
from kvpeer.transport.verbs import ProducerControl, VerbsPeer

__all__ = [
    "CHUNK_BYTES_MAX",
    "CapabilitySource",
    "FallbackPeer",
    "FetchBatch",
    "FetchResult",
    "Lanes",
    "NoPathError",
    "NotAskedError",
    "PooledPeer",
    "Producer",
    "ProducerControl",
    "ShmTransport",
    "TcpPeer",
    "Transport",
    "VerbsPeer",
]
