"""`VerbsDevice`: a pool behind one RDMA device; `VerbsConnection`: a reader's end of one queue pair to a producer;
`fetch_by_verbs`: pages by several of them at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvpeer.model import ConfigError, KvPeerError, LocalProtocolError, PeerUnavailableError, RemoteProtocolError, Verify
from kvpeer.native._arrays import U4, U8, Keys, address, fixed_bytes, u4
from kvpeer.native._errors import Code, check, error_for
from kvpeer.native._handle import Handle
from kvpeer.native._library import VerbsCounters, library
from kvpeer.native._library import VerbsSettings as SettingValues
from kvpeer.native.connection import FetchedPages, fetch_pages
from kvpeer.native.pool import Pool

__all__ = [
    "ENDPOINT_BYTES",
    "EXTENT_BYTES",
    "RAILS_MAX",
    "VerbsConnection",
    "VerbsDevice",
    "VerbsSettings",
    "VerbsStats",
    "fetch_by_verbs",
]

ENDPOINT_BYTES = 32
"""One end of a queue pair, as the other end must know it (kvp_verbs_endpoint)."""

EXTENT_BYTES = 32
"""Where the pages of one extent can be read (kvp_verbs_extent)."""

RAILS_MAX = 16
"""Connections of one fetch (KVP_RAILS_MAX)."""

REASON_BYTES_MAX = 512

PAGES_MAX = 4096
"""Pages of one call, which posts them in several chains: as many as a request to a data server may hold by default."""


@dataclass(frozen=True, slots=True)
class VerbsSettings:
    """Which device, and what readers can make it hold."""

    device: str = ""
    """Its name; empty: the first that has an active port with a usable address."""
    gid_index: int = -1
    """Of the port's table of addresses; -1: RoCE v2 and routable, IPv4 first."""
    connections_max: int = 1024
    """Queue pairs that are served at a time."""
    reader_connections_max: int = 64
    """Of these, for one reader; a further one replaces its oldest. Four connections of a reader with 16 rails, all of
    which may end here."""


@dataclass(frozen=True, slots=True)
class VerbsStats:
    """Counters since the start; connections_open and registered_bytes are the present numbers."""

    connections_open: int
    connections_accepted: int
    connections_replaced: int
    registered_bytes: int


class VerbsDevice(Handle):
    """Serves the pool's pages to one-sided READs, and is what `VerbsConnection`s read by. Keeps its pool alive.

    All methods but `close` are thread-safe.

    Raises:
        ConfigError: this machine has no such device that can be used; the message says what is missing.
    """

    def __init__(self, pool: Pool, settings: VerbsSettings) -> None:
        out, reason = ctypes.c_void_p(), ctypes.create_string_buffer(REASON_BYTES_MAX)
        values = SettingValues(
            settings.device.encode(),
            settings.gid_index,
            settings.connections_max,
            settings.reader_connections_max,
        )
        code = library().kvp_verbs_open(
            pool._pointer, ctypes.byref(values), reason, REASON_BYTES_MAX, ctypes.byref(out)
        )
        if code == Code.ENODEVICE:
            raise ConfigError(f"no RDMA: {reason.value.decode(errors='replace')}")
        check(code, "open an RDMA device")
        super().__init__(out.value, library().kvp_verbs_close)
        self.n_extents = pool.n_extents
        self._lock = threading.Lock()  # protects _n_reading
        self._n_reading = 0
        self._pool = pool
        pool._n_users += 1

    @property
    def name(self) -> str:
        """The device's name, such as mlx5_0."""
        return str(library().kvp_verbs_device(self._pointer).decode())

    def register(self, start: int, n_bytes: int) -> None:
        """Makes memory beyond the pool a destination for fetches, until `unregister`.

        Raises:
            CapacityError: this much memory may not be pinned (limit "memlock").
        """
        check(library().kvp_verbs_register(self._pointer, start, n_bytes), f"register {n_bytes} bytes")

    def unregister(self, start: int) -> None:
        """Takes `register` back. No fetch may be writing there.

        Raises:
            LocalProtocolError: nothing was registered from there on.
        """
        check(library().kvp_verbs_unregister(self._pointer, start), "unregister memory")

    def extents(self, first: int, n_max: int) -> bytes:
        """Returns what readers may be told of extents [first, first + n_max), as far as there are: 32 bytes each.

        Registers those that were assigned since the last call, which takes some milliseconds each.

        Raises:
            CapacityError: the memory may not be pinned (limit "memlock").
        """
        n = max(0, min(n_max, self.n_extents - first))
        out = ctypes.create_string_buffer(max(1, n * EXTENT_BYTES))
        check(library().kvp_verbs_extents(self._pointer, first, n, out), f"register {n} extents")
        return out.raw[: n * EXTENT_BYTES]

    def accept(self, reader_id: bytes, reader: bytes) -> bytes:
        """Returns this end (32 bytes) of a new queue pair, which serves the reader's end.

        Raises:
            CapacityError: there are as many connections as there may be.
            RemoteProtocolError: the reader's end is none.
            ConfigError: the device refuses.
        """
        out = ctypes.create_string_buffer(ENDPOINT_BYTES)
        whose = fixed_bytes("reader_id", reader_id)
        if len(reader) != ENDPOINT_BYTES:
            raise RemoteProtocolError(f"an end of a queue pair has {ENDPOINT_BYTES} bytes, not {len(reader)}")
        code = library().kvp_verbs_accept(self._pointer, whose, reader, out)
        if code == Code.EINVAL:
            raise RemoteProtocolError(f"reader {reader_id.hex()} described no end of a queue pair: {reader.hex()}")
        check(code, f"serve reader {reader_id.hex()}")
        return out.raw

    def revoke(self, reader_id: bytes) -> None:
        """Ends all connections by which this reader reads from here."""
        check(library().kvp_verbs_revoke(self._pointer, fixed_bytes("reader_id", reader_id)), "revoke a reader")

    def stats(self) -> VerbsStats:
        """Returns the counters."""
        counters = VerbsCounters()
        library().kvp_verbs_get_stats(self._pointer, ctypes.byref(counters))
        return VerbsStats(*(getattr(counters, name) for name, *_ in VerbsCounters._fields_))

    def close(self) -> None:
        """Ends what is served and frees the device.

        Raises:
            LocalProtocolError: a connection still reads by it.
        """
        if self._n_reading > 0:
            raise LocalProtocolError(f"{self._n_reading} connections read by {self.name}: close them first")
        if not self.is_closed:
            super().close()
            self._pool._n_users -= 1

    def _count_reading(self, change: int) -> None:
        with self._lock:
            self._n_reading += change


class VerbsConnection(Handle):
    """A queue pair to one producer: made with `own_end`, of use after `connect`, until `error` is set. In one fetch at
    a time; `shutdown` may be called from another thread.

    Raises:
        PeerUnavailableError: the device makes no further queue pair.
    """

    pages_max = PAGES_MAX

    def __init__(self, device: VerbsDevice, producer_id: bytes) -> None:
        out, own_end = ctypes.c_void_p(), ctypes.create_string_buffer(ENDPOINT_BYTES)
        self._peer = f"{producer_id.hex()} by {device.name}"
        code = library().kvp_verbs_conn_create(
            device._pointer, fixed_bytes("producer_id", producer_id), own_end, ctypes.byref(out)
        )
        check(code, f"make a queue pair to {self._peer}", PeerUnavailableError)
        super().__init__(out.value, library().kvp_verbs_conn_free)
        self.own_end = own_end.raw
        """What the producer must be told of this end."""
        self._device = device
        self.error: KvPeerError | None = None
        """Why the queue pair has ended; None while it has not."""
        self.has_delivered = False
        """Whether pages came by it in the latest fetch."""
        self.is_timed_out = False
        """Whether it ended because nothing had come in time."""
        device._count_reading(1)

    def connect(self, producer_end: bytes) -> None:
        """Connects to the end that the producer made for `own_end`. Does not wait for it.

        Raises:
            RemoteProtocolError: that is no end of a queue pair.
            PeerUnavailableError: there is no way to its address.
        """
        action = f"connect to {self._peer}"
        if len(producer_end) != ENDPOINT_BYTES:
            raise RemoteProtocolError(f"{action}: an end of a queue pair has {ENDPOINT_BYTES} bytes")
        code = library().kvp_verbs_conn_connect(self._pointer, producer_end)
        if code == Code.EINVAL:
            raise RemoteProtocolError(f"{action}: {producer_end.hex()} describes no end of a queue pair")
        check(code, action, PeerUnavailableError)

    def learn(self, first: int, extents: bytes) -> None:
        """Takes over what the producer told of its extents from `first` on: 32 bytes each.

        Raises:
            RemoteProtocolError: the bytes are not that, or too many.
        """
        n, rest = divmod(len(extents), EXTENT_BYTES)
        code = Code.EINVAL if rest else library().kvp_verbs_conn_learn(self._pointer, first, n, extents)
        if code == Code.EINVAL:
            raise RemoteProtocolError(f"{self._peer} told of extents from {first} on in {len(extents)} bytes")
        check(code, f"learn {n} extents")

    def knows(self, slots: U4) -> bool:
        """True if the extents of all these slots were learnt."""
        n = len(slots)
        return bool(library().kvp_verbs_conn_knows(self._pointer, n, address("slots", slots, u4, n)))

    def probe(self, deadline_ns: int) -> bool:
        """True once a header of the producer came this way, or nothing was learnt that could be read; else the queue
        pair has ended. Blocks until deadline_ns at most."""
        self._take_code(library().kvp_verbs_conn_probe(self._pointer, deadline_ns), "probe")
        return self.error is None

    def shutdown(self) -> None:
        """Makes a fetch in another thread return soon, with an error in its result. Thread-safe; never blocks."""
        library().kvp_verbs_conn_shutdown(self._pointer)

    def close(self) -> None:
        """Ends the queue pair: when it returns, nothing is written by it any more."""
        if not self.is_closed:
            super().close()
            self._device._count_reading(-1)

    def _take_code(self, code: int, action: str) -> None:
        """What a native call says of this connection."""
        self.has_delivered = code > 0
        if code >= 0 or self.error is not None:
            return
        self.is_timed_out = code == Code.ETIMEOUT
        what = f"{action}: {self._peer}"
        if code == Code.ECLOSED:
            fault = library().kvp_verbs_conn_fault(self._pointer).decode()
            self.error = PeerUnavailableError(f"{what}: {fault or 'the queue pair is closed'}")
        else:
            self.error = error_for(code, what, PeerUnavailableError)


def fetch_by_verbs(
    connections: Sequence[VerbsConnection],
    slots: U4,
    generations: U4,
    keys: Keys,
    lengths: U4,
    destinations: U8,
    verify: Verify,
    deadline_ns: int,
) -> FetchedPages:
    """Reads n pages of one producer, verified, by 1 to RAILS_MAX different connections at once; see
    `DataConnection.fetch`.

    The pages are shared out by their bytes. Those of a connection that fails go by the others, as do those of one that
    is silent for half of the time while others are done; it has its `error` then. Pages of extents that were not learnt
    are STALE. Destinations lie in the pool of all devices or in memory that was registered with each of them. With an
    error in the result, pages had no connection left, or no time. However it ends, nothing writes to the destinations.

    Raises:
        LocalProtocolError: an array is not as described, or a destination does not lie in registered memory.
    """
    n = len(connections)
    handles = (ctypes.c_void_p * n)(*[connection._pointer for connection in connections])
    codes = (ctypes.c_int32 * n)()
    action = f"read {len(slots)} pages"

    def call(_: int, *batch: object) -> int:
        return int(library().kvp_verbs_fetch(handles, n, codes, *batch))

    code, fetched = fetch_pages(call, 0, slots, generations, keys, lengths, destinations, verify, deadline_ns)
    for connection, its_code in zip(connections, codes, strict=True):
        connection._take_code(its_code, action)
    if code == Code.EINVAL:
        raise error_for(code, action)
    if code != Code.OK:
        errors = [connection.error for connection in connections if connection.error is not None]
        fetched.error = errors[-1] if errors else error_for(code, action, PeerUnavailableError)
    return fetched
