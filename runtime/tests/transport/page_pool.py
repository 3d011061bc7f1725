"""A real pool whose pages' bytes follow from their keys, and all ways to read it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from kvpeer.model import KvPeerError, Verify
from kvpeer.native import (
    CAPABILITY_BYTES,
    PART_DTYPE,
    DataServer,
    Pool,
    PoolMap,
    ServerLimits,
    VerbsDevice,
    VerbsSettings,
    crc64,
    monotonic_ns,
)
from kvpeer.transport import FetchBatch, FetchResult, NoPathError, Producer, ShmTransport, TcpPeer, Transport, VerbsPeer

SLOT_BYTES = 64 << 10
N_SLOTS = 8
AMPLE_S = 20.0
"""Longer than anything takes that is not stuck."""

SERVER_PAGES_MAX = 16
LIMITS = ServerLimits(
    connections_max=8,
    pages_max=SERVER_PAGES_MAX,
    idle_timeout_ms=20_000,
    io_timeout_ms=20_000,
    handshake_timeout_ms=20_000,
)
UNTOUCHED = 0xEE
RDMA_DEVICE = os.environ.get("KVPEER_TEST_RDMA_DEVICE", "")
"""Set where there is one (`make test-rdma`); without it, nothing is read by verbs."""
RDMA_DEVICES = ("rxe0", "rxe1")
"""All that the small machine has, see e2e/rdma/rxe.sh."""
READER_ID = b"r" * 16


def soon(seconds: float = AMPLE_S) -> int:
    return monotonic_ns() + round(seconds * 1e9)


@dataclass(frozen=True)
class Location:
    slot: int
    generation: int
    key: bytes
    length: int = SLOT_BYTES


def key_of(slot: int, generation: int) -> bytes:
    return slot.to_bytes(8, "little") + generation.to_bytes(8, "little")


_RAMP = np.arange(SLOT_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def page_bytes_of(key: bytes, length: int = SLOT_BYTES) -> np.ndarray:
    """u1 [length]: what the page with this key holds."""
    slot, generation = np.frombuffer(key, dtype="<u8")
    return (_RAMP + slot * np.uint64(1 << 40) + generation).view(np.uint8)[:length]


class PagePool:
    """One extent of N_SLOTS slots. Marking is for one thread at a time."""

    def __init__(self, run_id: bytes = b"p" * 16) -> None:
        self.pool = Pool(N_SLOTS * SLOT_BYTES, N_SLOTS * SLOT_BYTES, run_id)
        self.pool.touch_extent(0)
        self.pool.assign_extent(0, SLOT_BYTES)
        self.payload = self.pool.payload_view()

    def publish(self, slot: int, generation: int, length: int = SLOT_BYTES) -> Location:
        key = key_of(slot, generation)
        page = page_bytes_of(key, length)
        slots, generations = np.array([slot], np.uint32), np.array([generation], np.uint32)
        parts = np.array([[(0, length, crc64(page))]], PART_DTYPE)
        start, middle = slot * SLOT_BYTES, length // 2
        self.pool.mark_writing(slots, generations)
        # The end first: whoever reads from the beginning meets it.
        self.payload[start + middle : start + length] = page[middle:]
        self.payload[start : start + middle] = page[:middle]
        self.pool.mark_committed(slots, generations, key, parts)
        return Location(slot, generation, key, length)

    def withdraw(self, location: Location) -> None:
        self.pool.mark_withdrawn(np.array([location.slot], np.uint32), np.array([location.generation], np.uint32))

    def flip_byte(self, location: Location, at: int) -> None:
        self.payload[location.slot * SLOT_BYTES + at] ^= 1

    def close(self) -> None:
        self.payload = None
        self.pool.close()


class Destinations:
    """Room for n pages, full of UNTOUCHED. Keep it until the fetch of its `batch` is over."""

    def __init__(self, locations: list[Location]) -> None:
        self.pages = np.full((len(locations), SLOT_BYTES), UNTOUCHED, np.uint8)
        self.locations = locations

    @property
    def batch(self) -> FetchBatch:
        addresses = self.pages.ctypes.data + np.arange(len(self.locations), dtype=np.uint64) * np.uint64(SLOT_BYTES)
        return FetchBatch(
            slots=np.array([each.slot for each in self.locations], np.uint32),
            generations=np.array([each.generation for each in self.locations], np.uint32),
            keys=b"".join(each.key for each in self.locations),
            lengths=np.array([each.length for each in self.locations], np.uint32),
            destinations=addresses.astype(np.uint64),
        )

    def holds(self, idx: int) -> bool:
        location = self.locations[idx]
        return np.array_equal(self.pages[idx, : location.length], page_bytes_of(location.key, location.length))

    @property
    def is_untouched(self) -> bool:
        return bool((self.pages == UNTOUCHED).all())


@contextmanager
def shm_transport(pages: PagePool, verify: Verify) -> Iterator[Transport]:
    with PoolMap(*pages.pool.fds, pages.pool.extent_bytes, pages.pool.run_id) as pool_map:
        yield ShmTransport(pool_map, extent_bytes=pages.pool.extent_bytes, slot_bytes=SLOT_BYTES, verify=verify)


class Serving:
    """A data server on a pool, and the control channel's part played by a function call."""

    def __init__(self, pages: PagePool, limits: ServerLimits = LIMITS) -> None:
        self.server = DataServer(pages.pool, "127.0.0.1", 0, limits)
        self.producer = Producer("127.0.0.1", self.server.port, pages.pool.run_id, READER_ID)
        self.n_admitted = itertools.count()

    def capability(self, deadline_ns: int) -> bytes:
        capability = os.urandom(CAPABILITY_BYTES)
        self.server.admit(capability, READER_ID, deadline_ns)
        next(self.n_admitted)
        return capability


@contextmanager
def tcp_transport(pages: PagePool, verify: Verify) -> Iterator[Transport]:
    serving = Serving(pages)
    peer = TcpPeer(serving.producer, serving.capability, verify=verify, connections_max=2)
    yield peer
    peer.close()
    serving.server.close()


class Control:
    """The control channel's part in reading by verbs, played by function calls on the producer's devices."""

    def __init__(self, *rails: VerbsDevice) -> None:
        self.rails = rails
        self.n_opened = itertools.count()

    def open_queue_pair(self, reader_end: bytes, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        next(self.n_opened)
        try:
            return self.rails[rail].accept(READER_ID, reader_end), len(self.rails)
        except KvPeerError as error:  # as the agent's: the producer answered that it will not
            raise NoPathError(str(error)) from error

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        return self.rails[rail].extents(first, 1), self.rails[rail].n_extents


class RegisteringPeer(VerbsPeer):
    """Registers the destinations of each fetch, as an agent does once with its pool."""

    def __init__(self, rails: Sequence[VerbsDevice], *arguments: object, **settings: object) -> None:
        super().__init__(rails, *arguments, **settings)
        self._rails = rails

    def fetch(self, batch: FetchBatch, deadline_ns: int, abort: threading.Event | None = None) -> FetchResult:
        if not len(batch):
            return super().fetch(batch, deadline_ns, abort)
        start = int(batch.destinations.min())
        for device in self._rails:
            device.register(start, int(batch.destinations.max()) - start + SLOT_BYTES)
        try:
            return super().fetch(batch, deadline_ns, abort)
        finally:
            for device in self._rails:
                device.unregister(start)


class Reading:
    """Two agents' RDMA devices, the producer's on `pages`. devices: names of the rails of the reader, and of the
    producer where it has others."""

    def __init__(
        self,
        pages: PagePool,
        reader_connections_max: int = 16,
        devices: tuple[str, ...] = (RDMA_DEVICE,),
        producer_devices: tuple[str, ...] = (),
    ) -> None:
        self.producer_id = pages.pool.run_id
        self.reader_pool = Pool(SLOT_BYTES, SLOT_BYTES, READER_ID)
        self.rails = [VerbsDevice(self.reader_pool, VerbsSettings(name)) for name in devices]
        self.producers = [
            VerbsDevice(pages.pool, VerbsSettings(name, reader_connections_max=reader_connections_max))
            for name in producer_devices or devices
        ]
        self.control = Control(*self.producers)

    @property
    def producer(self) -> VerbsDevice:
        return self.producers[0]

    def peer(self, **settings: object) -> RegisteringPeer:
        settings = {"verify": Verify.FULL, "connections_max": 2, **settings}
        return RegisteringPeer(self.rails, self.producer_id, self.control, **settings)

    def close(self) -> None:
        for device in (*self.rails, *self.producers):
            device.close()
        self.reader_pool.close()


@contextmanager
def verbs_transport(pages: PagePool, verify: Verify) -> Iterator[Transport]:
    reading = Reading(pages)
    peer = reading.peer(verify=verify)
    yield peer
    peer.close()
    reading.close()


@contextmanager
def rails_transport(pages: PagePool, verify: Verify) -> Iterator[Transport]:
    reading = Reading(pages, devices=RDMA_DEVICES)
    peer = reading.peer(verify=verify)
    yield peer
    peer.close()
    reading.close()


TRANSPORTS = {"shm": shm_transport, "tcp": tcp_transport}
if RDMA_DEVICE:
    TRANSPORTS["verbs"] = verbs_transport
    TRANSPORTS["verbs_rails"] = rails_transport
