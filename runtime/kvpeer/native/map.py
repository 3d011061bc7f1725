"""`PoolMap`: a client's view of its agent's pool, and the copies between slots and the engine's memory."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np

from kvpeer.model import Verify
from kvpeer.native._arrays import I8, U1, U4, U8, Keys, address, bytes_at, fixed_bytes, i8, key_address, u1, u4, u8
from kvpeer.native._errors import check
from kvpeer.native._handle import Handle
from kvpeer.native._library import Layout, library

__all__ = ["PoolMap", "StridedLayout"]


class StridedLayout(Protocol):
    """The engine's memory: block b of segment s is `length[s]` bytes at `base[s] + b * stride[s]`.

    base, stride: u8 [n_segments]; length: u4 [n_segments]. A page part is the concatenation of a block's segments.
    """

    @property
    def base(self) -> U8: ...
    @property
    def stride(self) -> U8: ...
    @property
    def length(self) -> U4: ...


class PoolMap(Handle):
    """Payload mapped read-write, headers read-only; both are gone in a forked child, which must not use the map.

    Calls may run in several threads at once as long as they touch different slots and blocks. The engine's memory must
    stay where it is until a call returns. The fds may be closed after construction. run_id: the agent's id.

    Raises:
        LocalProtocolError: the files are not those of a pool with such extents, or they are not sealed.
        CapacityError: address space is exhausted.
    """

    def __init__(self, payload_fd: int, header_fd: int, extent_bytes: int, run_id: bytes) -> None:
        out = ctypes.c_void_p()
        check(
            library().kvp_map_create(
                payload_fd, header_fd, extent_bytes, fixed_bytes("run_id", run_id), ctypes.byref(out)
            ),
            f"map a pool with extents of {extent_bytes} bytes",
        )
        super().__init__(out.value, library().kvp_map_destroy)

    def payload_view(self) -> U1:
        """Returns the payload as an array over the mapping; the array must not outlive the map."""
        n_bytes = ctypes.c_uint64()
        start = library().kvp_map_payload(self._pointer, ctypes.byref(n_bytes))
        return bytes_at(start, n_bytes.value)

    def gather(self, offsets: U8, part_offset: int, layout: StridedLayout, blocks: I8) -> U8:
        """Copies engine blocks into slots, and returns the checksum of each part (u8 [n]). Ends with a store fence.

        offsets: u8 [n], each slot's place in the payload; part_offset: the part's place in the page; blocks: i8 [n].

        Raises:
            LocalProtocolError: a part does not lie in its extent, a block is negative, or an array is not as described;
                nothing was copied.
        """
        n = len(blocks)
        checksums = np.empty(n, u8)
        native_layout = _native(layout)
        code = library().kvp_map_gather(
            self._pointer,
            n,
            address("offsets", offsets, u8, n),
            part_offset,
            ctypes.byref(native_layout),
            address("blocks", blocks, i8, n),
            checksums.ctypes.data,
        )
        check(code, f"gather {n} pages")
        return checksums

    def scatter(
        self,
        slots: U4,
        generations: U4,
        offsets: U8,
        keys: Keys,
        part: int,
        layout: StridedLayout,
        blocks: I8,
        verify: Verify,
    ) -> U1:
        """Copies slots into engine blocks, verified; returns an `Outcome` per page (u1 [n]): HIT, STALE or CORRUPT.

        The blocks of anything but HIT hold unspecified bytes. slots, generations: u4 [n]; offsets: u8 [n]; keys: n * 16
        bytes; part: this rank's index in the page; blocks: i8 [n].

        Raises:
            LocalProtocolError: a location lies outside the pool, a block is negative, or an array is not as described;
                nothing was copied.
        """
        n = len(blocks)
        outcomes = np.empty(n, u1)
        native_layout = _native(layout)
        code = library().kvp_map_scatter(
            self._pointer,
            n,
            address("slots", slots, u4, n),
            address("generations", generations, u4, n),
            address("offsets", offsets, u8, n),
            key_address(keys, n),
            part,
            ctypes.byref(native_layout),
            address("blocks", blocks, i8, n),
            verify,
            outcomes.ctypes.data,
        )
        check(code, f"scatter {n} pages")
        return outcomes

    def checksums(self, offsets: U8, part_offset: int, part_bytes: int) -> U8:
        """Returns the checksums (u8 [n]) of parts that lie in the pool already: a device copied them in.

        Raises:
            LocalProtocolError: a part does not lie in its extent.
        """
        n = len(offsets)
        checksums = np.empty(n, u8)
        code = library().kvp_map_checksum(
            self._pointer, n, address("offsets", offsets, u8, n), part_offset, part_bytes, checksums.ctypes.data
        )
        check(code, f"checksum {n} parts")
        return checksums


def _native(layout: StridedLayout) -> Layout:
    n = len(layout.base)
    return Layout(
        n,
        address("layout.base", layout.base, u8, n),
        address("layout.stride", layout.stride, u8, n),
        address("layout.length", layout.length, u4, n),
    )
