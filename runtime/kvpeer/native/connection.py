"""`DataConnection`: a reader's end of one tcp data connection."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpeer.model import PARTS_MAX, KvPeerError, Outcome, PeerUnavailableError, Verify
from kvpeer.native._arrays import (
    PART_DTYPE,
    U1,
    U2,
    U4,
    U8,
    Keys,
    address,
    fixed_bytes,
    key_address,
    u1,
    u2,
    u4,
    u8,
)
from kvpeer.native._errors import Code, check, error_for
from kvpeer.native._handle import Handle
from kvpeer.native._library import library
from kvpeer.native.server import CAPABILITY_BYTES

__all__ = ["DataConnection", "FetchedPages", "fetch_pages"]


@dataclass(slots=True, eq=False)
class FetchedPages:
    """What became of the pages of one fetch.

    outcomes: `Outcome` u1 [n]. parts: `PART_DTYPE` [n, 64] and n_parts: u2 [n], the producer's part tables; they count
    where the outcome is HIT, entries beyond n_parts are unspecified. error: None if the producer answered every page;
    otherwise why the connection is closed now (pages that it answered before keep their outcome).
    """

    outcomes: U1
    parts: npt.NDArray[Any]
    n_parts: U2
    error: KvPeerError | None = None

    @classmethod
    def unanswered(cls, n: int, error: KvPeerError | None = None) -> FetchedPages:
        """Returns n misses: the producer said nothing of them."""
        return cls(np.full(n, Outcome.MISS, u1), np.empty((n, PARTS_MAX), PART_DTYPE), np.zeros(n, u2), error)


def fetch_pages(
    function: Callable[..., int],
    connection: int,
    slots: U4,
    generations: U4,
    keys: Keys,
    lengths: U4,
    destinations: U8,
    verify: Verify,
    deadline_ns: int,
) -> tuple[int, FetchedPages]:
    """Calls a native fetch; returns its code and what became of the pages, without an error."""
    n = len(slots)
    fetched = FetchedPages.unanswered(n)
    code = function(
        connection,
        n,
        address("slots", slots, u4, n),
        address("generations", generations, u4, n),
        key_address(keys, n),
        address("lengths", lengths, u4, n),
        address("destinations", destinations, u8, n),
        verify,
        deadline_ns,
        fetched.parts.ctypes.data,
        fetched.n_parts.ctypes.data,
        fetched.outcomes.ctypes.data,
    )
    return code, fetched


class DataConnection(Handle):
    """An admitted connection to one producer. One fetch at a time; `shutdown` may be called from another thread.

    ip: numeric; capability: 32 bytes that the producer handed out for reader_id; deadline_ns: `monotonic_ns` time.
    Blocks until the producer answered.

    Raises:
        AdmissionRefusedError: the producer refused the capability.
        PeerUnavailableError: no answer by the deadline, or nobody there.
        RemoteProtocolError: the other side is not the producer asked for, or breaks the protocol.
    """

    def __init__(
        self, ip: str, port: int, capability: bytes, reader_id: bytes, producer_id: bytes, deadline_ns: int
    ) -> None:
        self._peer = f"{producer_id.hex()} at {ip} port {port}"
        out = ctypes.c_void_p()
        code = library().kvp_conn_open(
            ip.encode(),
            port,
            fixed_bytes("capability", capability, CAPABILITY_BYTES),
            fixed_bytes("reader_id", reader_id),
            fixed_bytes("producer_id", producer_id),
            deadline_ns,
            ctypes.byref(out),
        )
        check(code, f"connect to {self._peer}", PeerUnavailableError)
        super().__init__(out.value, library().kvp_conn_free)

    @property
    def pages_max(self) -> int:
        """Pages that one fetch may ask for: what the producer allows."""
        return int(library().kvp_conn_pages_max(self._pointer))

    def fetch(
        self,
        slots: U4,
        generations: U4,
        keys: Keys,
        lengths: U4,
        destinations: U8,
        verify: Verify,
        deadline_ns: int,
    ) -> FetchedPages:
        """Fetches n pages in one request, verified. After it returned, nothing writes to the destinations any more.

        slots, generations, lengths: u4 [n]; keys: n * 16 bytes; destinations: u8 [n], addresses of lengths[i] writable
        bytes each, which the caller keeps in place. Blocks until the deadline at most.

        Raises:
            LocalProtocolError: an array is not as described, or n is more than a request may hold.
        """
        action = f"fetch {len(slots)} pages from {self._peer}"
        batch = (slots, generations, keys, lengths, destinations)
        code, fetched = fetch_pages(library().kvp_conn_fetch, self._pointer, *batch, verify, deadline_ns)
        if code == Code.EINVAL:
            raise error_for(code, action)
        if code != Code.OK:
            fetched.error = error_for(code, action, PeerUnavailableError)
        return fetched

    def shutdown(self) -> None:
        """Makes a fetch in another thread return soon, with an error in its result. Thread-safe; never blocks."""
        library().kvp_conn_shutdown(self._pointer)
