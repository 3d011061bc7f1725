"""Copies between the engine's memory and the pool: one interface, one implementation per kind of device memory.

A page part is the concatenation of `EngineLayout`'s segments of one block. `gather` copies blocks into pool slots and
returns the checksums of what arrived there; `scatter` copies slots into blocks and says of each page what became of
it. Both return only when no copy is running any more, so that blocks and slots may be reused at once.

Work that the engine has queued on its device is ordered by fences: `fence()` is called on the engine's thread,
`wait_for` on the copying thread before it touches the blocks.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.model import KEY_BYTES, LocalProtocolError, Outcome, Verify

if TYPE_CHECKING:
    from kvpeer.native import PoolMap

__all__ = ["Copier", "CudaCopier", "EngineLayout", "NativeCopier", "SlotPages"]


@dataclass(frozen=True)
class EngineLayout:
    """The engine's memory: block b of segment s is `length[s]` bytes at `base[s] + b * stride[s]`.

    base and stride are u64 [n_segments], length is u32 [n_segments]; the memory stays where it is as long as the
    layout is in use. memory: what owns it, kept alive with the layout, also by a thread that copies while the process
    ends.

    Raises:
        LocalProtocolError: the columns do not fit together.
    """

    base: npt.NDArray[np.uint64]
    stride: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint32]
    memory: object = None

    def __post_init__(self) -> None:
        for name, column, dtype in (
            ("base", self.base, np.uint64),
            ("stride", self.stride, np.uint64),
            ("length", self.length, np.uint32),
        ):
            if column.dtype != dtype or column.shape != self.base.shape or column.ndim != 1 or not len(column):
                raise LocalProtocolError(f"{name} must be a non-empty {np.dtype(dtype)} column as long as base")

    @property
    def part_bytes(self) -> int:
        """Bytes of one page part: the sum of the segments."""
        return int(self.length.sum())


@dataclass(frozen=True)
class SlotPages:
    """Pages of the pool as a reader found them: packed keys and, as columns of n, slot, generation and payload
    offset."""

    keys: bytes
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]


class Copier(Protocol):
    """Moves page parts between blocks and slots. `gather` and `scatter` may be called by several threads at once."""

    def fence(self) -> object:
        """Returns a mark after all work that the engine has queued so far. Cheap; on the engine's thread."""

    def wait_for(self, fence: object) -> None:
        """Makes the calling thread's following copies come after the mark."""

    def seconds_since(self, fence: object) -> float:
        """Returns how long ago the work before the mark was over: 0 while it is not, infinite if it was when the mark
        was made. Does not wait for that work."""

    def gather(
        self, pool: PoolMap, offsets: npt.NDArray[np.uint64], part_offset: int, blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        """Copies blocks into the slots at `offsets`; returns the CRC-64 of each part, u64 [n]. Blocking."""

    def scatter(
        self,
        pool: PoolMap,
        pages: SlotPages,
        part: int,
        part_offset: int,
        blocks: npt.NDArray[np.int64],
        verify: Verify,
    ) -> npt.NDArray[np.uint8]:
        """Copies this rank's part of the pages into blocks; returns the outcome of each, u8 [n]. Blocking.

        The blocks of anything but HIT hold unspecified bytes.
        """


class NativeCopier:
    """Engine memory that this process can address: copy and checksum in one native pass, the GIL released."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout

    def fence(self) -> object:
        """Nothing: an engine on the CPU has done its work when it calls us."""
        return None

    def wait_for(self, fence: object) -> None:
        """Returns at once, see `fence`."""

    def seconds_since(self, fence: object) -> float:
        """See `Copier.seconds_since`."""
        return math.inf

    def gather(
        self, pool: PoolMap, offsets: npt.NDArray[np.uint64], part_offset: int, blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        """See `Copier.gather`."""
        return pool.gather(offsets, part_offset, self._layout, blocks)

    def scatter(
        self,
        pool: PoolMap,
        pages: SlotPages,
        part: int,
        part_offset: int,
        blocks: npt.NDArray[np.int64],
        verify: Verify,
    ) -> npt.NDArray[np.uint8]:
        """See `Copier.scatter`."""
        return pool.scatter(
            pages.slots, pages.generations, pages.offsets, pages.keys, part, self._layout, blocks, verify
        )


STAGING_PAGES = 32
"""Pages a lane stages at once, in device and in pinned host memory: enough for one copy to hide the launch of the
next kernels, and small next to the KV cache."""


class CudaCopier:
    """Engine memory on a CUDA device, through pinned staging. Not proven: it never ran on a GPU.

    Blocks are collected into one device buffer by a kernel per segment, cross to pinned host memory in one transfer,
    and go from there into the slots by the same native pass (copy, checksum, verification) that `NativeCopier` uses;
    `scatter` is the way back. The pool itself is not registered with the driver: that would fault all of it in at
    once, while the agent grows it by extents.

    views: per segment a strided uint8 tensor [n_blocks, length] on the device. Each calling thread has a lane of its
    own (stream, buffers), made at its first call.
    """

    def __init__(self, views: list[Any]) -> None:
        self._views = views
        self._part_bytes = sum(int(view.shape[1]) for view in views)
        self._lanes = threading.local()

    def fence(self) -> object:
        """See `Copier.fence`: an event on the engine's current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait_for(self, fence: object) -> None:
        """See `Copier.wait_for`: the lane's stream waits, the thread does not."""
        self._lane().stream.wait_event(fence)

    def seconds_since(self, fence: Any) -> float:
        """See `Copier.seconds_since`: the device's own clock says it. The lane's stream has nothing queued between two
        copies, so that the second event is reached at once."""
        import torch

        if not fence.query():
            return 0.0
        now = torch.cuda.Event(enable_timing=True)
        now.record(self._lane().stream)
        now.synchronize()
        return float(fence.elapsed_time(now)) / 1000

    def gather(
        self, pool: PoolMap, offsets: npt.NDArray[np.uint64], part_offset: int, blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        """See `Copier.gather`."""
        checksums = np.empty(len(blocks), np.uint64)
        lane = self._lane()
        for start in range(0, len(blocks), STAGING_PAGES):
            batch = slice(start, start + STAGING_PAGES)
            n_pages = lane.collect(self._views, blocks[batch])
            checksums[batch] = pool.gather(offsets[batch], part_offset, lane.layout, np.arange(n_pages, dtype=np.int64))
        return checksums

    def scatter(
        self,
        pool: PoolMap,
        pages: SlotPages,
        part: int,
        part_offset: int,
        blocks: npt.NDArray[np.int64],
        verify: Verify,
    ) -> npt.NDArray[np.uint8]:
        """See `Copier.scatter`."""
        outcomes = np.full(len(blocks), Outcome.STALE, np.uint8)
        lane = self._lane()
        for start in range(0, len(blocks), STAGING_PAGES):
            batch = slice(start, start + STAGING_PAGES)
            n_pages = len(blocks[batch])
            outcomes[batch] = pool.scatter(
                pages.slots[batch],
                pages.generations[batch],
                pages.offsets[batch],
                pages.keys[start * KEY_BYTES : (start + n_pages) * KEY_BYTES],
                part,
                lane.layout,
                np.arange(n_pages, dtype=np.int64),
                verify,
            )
            lane.distribute(self._views, blocks[batch])
        return outcomes

    def _lane(self) -> _CudaLane:
        lane: _CudaLane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _CudaLane(self._part_bytes, self._views[0].device)
        return lane


class _CudaLane:
    """One thread's stream and its two staging buffers of `STAGING_PAGES` page parts."""

    def __init__(self, part_bytes: int, device: Any) -> None:
        import torch

        self._torch = torch
        self.stream = torch.cuda.Stream(device)
        self._on_device = torch.empty((STAGING_PAGES, part_bytes), dtype=torch.uint8, device=device)
        self._on_host = torch.empty((STAGING_PAGES, part_bytes), dtype=torch.uint8, pin_memory=True)
        self.layout = EngineLayout(
            base=np.array([self._on_host.data_ptr()], np.uint64),
            stride=np.array([part_bytes], np.uint64),
            length=np.array([part_bytes], np.uint32),
            memory=self._on_host,
        )

    def collect(self, views: list[Any], blocks: npt.NDArray[np.int64]) -> int:
        """Copies blocks into the host buffer; returns how many, when they are there."""
        n_pages, column = len(blocks), 0
        with self._torch.cuda.stream(self.stream):
            index = self._torch.from_numpy(blocks.copy()).to(self._on_device.device)
            for view in views:
                length = int(view.shape[1])
                self._on_device[:n_pages, column : column + length].copy_(view.index_select(0, index))
                column += length
            self._on_host[:n_pages].copy_(self._on_device[:n_pages], non_blocking=True)
        self.stream.synchronize()
        return n_pages

    def distribute(self, views: list[Any], blocks: npt.NDArray[np.int64]) -> None:
        """Copies the host buffer into blocks; returns when it may be used again."""
        n_pages, column = len(blocks), 0
        with self._torch.cuda.stream(self.stream):
            index = self._torch.from_numpy(blocks.copy()).to(self._on_device.device)
            self._on_device[:n_pages].copy_(self._on_host[:n_pages], non_blocking=True)
            for view in views:
                length = int(view.shape[1])
                view.index_copy_(0, index, self._on_device[:n_pages, column : column + length])
                column += length
        self.stream.synchronize()
