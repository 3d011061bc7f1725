"""`Pool`: the agent's shared memory and the only writer of slot headers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy.typing as npt

from kvpeer.model import KEY_BYTES, LocalProtocolError, Outcome
from kvpeer.native._arrays import PART_DTYPE, U1, U4, Keys, address, bytes_at, fixed_bytes, key_address, u4
from kvpeer.native._errors import check
from kvpeer.native._handle import Handle
from kvpeer.native._library import library

__all__ = ["Pool"]


class Pool(Handle):
    """Two sealed memfds: payload and headers. Clients map the first for writing and the second for reading only.

    One thread at a time may mark slots and assign extents; `touch_extent` blocks and may run in another thread
    meanwhile. A `DataServer` of this pool keeps it alive and must be closed first. run_id is the agent's id (16 bytes);
    capacity_bytes is rounded down to whole extents; hugepage_bytes is 0, 2 MiB or 1 GiB.

    Raises:
        LocalProtocolError: the sizes do not fit together.
        ConfigError: the system refuses such a memory file (huge pages that are not reserved, for one).
        CapacityError: address space or huge pages are exhausted.
    """

    def __init__(self, capacity_bytes: int, extent_bytes: int, run_id: bytes, hugepage_bytes: int = 0) -> None:
        out = ctypes.c_void_p()
        check(
            library().kvp_pool_create(
                capacity_bytes, extent_bytes, hugepage_bytes, fixed_bytes("run_id", run_id), ctypes.byref(out)
            ),
            f"create a pool of {capacity_bytes} bytes in extents of {extent_bytes}, huge pages of {hugepage_bytes}",
        )
        super().__init__(out.value, library().kvp_pool_destroy)
        self.run_id = run_id
        self.extent_bytes = extent_bytes
        self._n_users = 0

    @property
    def n_extents(self) -> int:
        """Extents of the pool, touched or not."""
        return int(library().kvp_pool_n_extents(self._pointer))

    @property
    def payload_bytes(self) -> int:
        """Size of the payload mapping."""
        return self.n_extents * self.extent_bytes

    @property
    def fds(self) -> tuple[int, int]:
        """Payload and header file descriptors. They belong to the pool: pass them on, never close them."""
        payload_fd, header_fd = ctypes.c_int(), ctypes.c_int()
        code = library().kvp_pool_fds(self._pointer, ctypes.byref(payload_fd), ctypes.byref(header_fd))
        check(code, "name the files of a pool")
        return payload_fd.value, header_fd.value

    @property
    def payload_address(self) -> int:
        """Address of the payload in this process: address + offset of a slot is where the slot lies."""
        n_bytes = ctypes.c_uint64()
        return int(library().kvp_pool_payload(self._pointer, ctypes.byref(n_bytes)))

    def slot_address(self, slot: int) -> int:
        """Address of a slot's payload in this process; it is a multiple of a memory page.

        Raises:
            LocalProtocolError: there is no such slot.
        """
        address = library().kvp_pool_slot_address(self._pointer, slot)
        if not address:
            raise LocalProtocolError(f"slot {slot} does not exist")
        return int(address)

    def payload_view(self) -> U1:
        """Returns the payload as an array over the mapping; the array must not outlive the pool."""
        return bytes_at(self.payload_address, self.payload_bytes)

    def touch_extent(self, extent: int) -> None:
        """Backs an extent's payload with memory, so that no later write can fault. Blocks meanwhile; idempotent.

        Raises:
            CapacityError: there is no memory left for it.
        """
        check(library().kvp_pool_touch_extent(self._pointer, extent), f"touch extent {extent}")

    def assign_extent(self, extent: int, slot_bytes: int) -> None:
        """Cuts an extent into slots of this size; none of its present slots may be in use.

        Raises:
            LocalProtocolError: a slot is in use, or the size does not fit the extent.
            CapacityError: there is no memory left for the headers.
        """
        check(
            library().kvp_pool_assign_extent(self._pointer, extent, slot_bytes),
            f"assign extent {extent} to slots of {slot_bytes} bytes",
        )

    def mark_writing(self, slots: U4, generations: U4) -> None:
        """Starts new generations: from now on nothing that a reader knows of these slots verifies. u4 [n] each.

        Raises:
            LocalProtocolError: a slot does not exist or had this generation already; nothing was marked.
        """
        self._mark(library().kvp_pool_mark_writing, slots, generations)

    def mark_committed(self, slots: U4, generations: U4, keys: Keys, parts: npt.NDArray[Any]) -> None:
        """Makes pages readable. The payload is complete: its writers fenced their stores and said so.

        slots, generations: u4 [n]; keys: n * 16 bytes; parts: `PART_DTYPE` [n, n_parts].

        Raises:
            LocalProtocolError: a slot is not being written under its generation, or a part does not lie in it; nothing
                was marked.
        """
        n = len(slots)
        n_parts = parts.shape[1] if parts.ndim == 2 else 0
        code = library().kvp_pool_mark_committed(
            self._pointer,
            n,
            address("slots", slots, u4, n),
            address("generations", generations, u4, n),
            key_address(keys, n),
            n_parts,
            address("parts", parts, PART_DTYPE, n, n_parts),
        )
        check(code, f"mark {n} slots committed")

    def mark_withdrawn(self, slots: U4, generations: U4) -> None:
        """Makes pages unreadable, whether committed or being written. Idempotent. u4 [n] each.

        Raises:
            LocalProtocolError: a slot is not in use under its generation; nothing was marked.
        """
        self._mark(library().kvp_pool_mark_withdrawn, slots, generations)

    def check(self, slot: int, generation: int, key: bytes) -> Outcome:
        """Computes the checksums of a page again where it lies: HIT if they are right, CORRUPT if not, STALE if this
        page is not (or no longer) in the slot. One pass over the page; in any thread, without the GIL.
        """
        code = library().kvp_pool_check(self._pointer, slot, generation, fixed_bytes("key", key, KEY_BYTES))
        return Outcome(check(code, f"check the page in slot {slot}"))

    def close(self) -> None:
        """Unmaps the memory and closes the fds.

        Raises:
            LocalProtocolError: a server still serves the pool.
        """
        if self._n_users > 0:
            raise LocalProtocolError("the pool is being served: close its DataServer first")
        super().close()

    def _mark(self, function: Any, slots: U4, generations: U4) -> None:
        n = len(slots)
        code = function(self._pointer, n, address("slots", slots, u4, n), address("generations", generations, u4, n))
        check(code, f"{function.__name__} of {n} slots")
