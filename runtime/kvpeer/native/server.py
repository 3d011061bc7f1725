"""`DataServer`: native threads that serve a pool's committed slots to admitted readers over tcp."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass

from kvpeer.model import ConfigError
from kvpeer.native._arrays import fixed_bytes
from kvpeer.native._errors import check
from kvpeer.native._handle import Handle
from kvpeer.native._library import ServerCounters, ServerLimitValues, library
from kvpeer.native.pool import Pool

__all__ = ["CAPABILITY_BYTES", "DataServer", "ServerLimits", "ServerStats"]

CAPABILITY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What readers can make the server hold or wait for."""

    connections_max: int
    """Further connections are closed at accept and counted."""
    pages_max: int
    """Pages in one request."""
    idle_timeout_ms: int
    """A connection without a request for this long is closed."""
    io_timeout_ms: int
    """A reader that takes this long for one send is dropped."""
    handshake_timeout_ms: int
    """A connection that did not present its capability by then is closed."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counters since the start; connections_open is the present number."""

    connections_open: int
    connections_accepted: int
    connections_refused: int
    protocol_errors: int
    requests: int
    pages_sent: int
    pages_stale: int
    bytes_sent: int
    io_timeouts: int


class DataServer(Handle):
    """Serves from construction until `close`. All methods but `close` are thread-safe. Keeps its pool alive.

    bind_ip: a numeric address; port 0 picks one, see `port`.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, pool: Pool, bind_ip: str, port: int, limits: ServerLimits) -> None:
        out, bound_port = ctypes.c_void_p(), ctypes.c_uint16()
        code = library().kvp_server_start(
            pool._pointer,
            bind_ip.encode(),
            port,
            ctypes.byref(ServerLimitValues(**asdict(limits))),
            ctypes.byref(out),
            ctypes.byref(bound_port),
        )
        check(code, f"serve page data on {bind_ip} port {port}", ConfigError)
        super().__init__(out.value, library().kvp_server_stop)
        self.port = bound_port.value
        self._pool = pool
        pool._n_users += 1

    def admit(self, capability: bytes, reader_id: bytes, expires_ns: int) -> None:
        """Admits one connection that presents these 32 bytes before expires_ns (`monotonic_ns`) and names reader_id.

        Raises:
            CapacityError: too many capabilities are waiting to be used.
        """
        code = library().kvp_server_admit(
            self._pointer,
            fixed_bytes("capability", capability, CAPABILITY_BYTES),
            fixed_bytes("reader_id", reader_id),
            expires_ns,
        )
        check(code, f"admit reader {reader_id.hex()}")

    def revoke(self, reader_id: bytes) -> None:
        """Closes every connection of a reader and forgets its capabilities."""
        code = library().kvp_server_revoke(self._pointer, fixed_bytes("reader_id", reader_id))
        check(code, f"revoke reader {reader_id.hex()}")

    def stats(self) -> ServerStats:
        """Returns the counters."""
        counters = ServerCounters()
        library().kvp_server_get_stats(self._pointer, ctypes.byref(counters))
        return ServerStats(*(getattr(counters, name) for name, *_ in ServerCounters._fields_))

    def close(self) -> None:
        """Stops accepting, closes all connections and joins the threads. Blocks, at most for the io timeout."""
        if not self.is_closed:
            super().close()
            self._pool._n_users -= 1
