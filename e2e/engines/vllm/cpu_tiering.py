"""`CpuTieringSpec`: vLLM's tiering on a machine without a GPU. Test support; nothing of it ships.

What it stands in for: vLLM's `CPUOffloadingWorker`, which copies blocks between the device and the primary tier with
CUDA streams and refuses to start on a CPU. Here the device's memory is host memory, so `_MemoryCopies` copies at once,
by numpy, into the same rows in the same order. Everything else (the primary tier in shared memory, its eviction, jobs,
lookups, promotion) is vLLM's own `TieringOffloadingSpec`, unmodified. What it cannot show: copies that are still
running on a device when a job is submitted, which vLLM orders by events before it reports a block as stored.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CpuTieringSpec"]


class _MemoryCopies(OffloadingWorker):
    """Copies between this rank's blocks and its part of the primary tier's rows; a job is over once submitted."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = caches.group_data_refs
        self._blocks = [cache.tensor.numpy() for cache in caches.tensors]
        self._rows = [region.create_next_worker_view(cache.page_size_bytes).numpy() for cache in caches.tensors]
        self._over: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, self._blocks, self._rows, src_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, dst_spec.block_ids, self._rows, self._blocks, src_spec.block_ids)

    def _copy(self, job_id: int, blocks: Any, targets: Any, source: list, target: list, sources: Any) -> bool:
        began_at, n_bytes, first = time.perf_counter(), 0, 0
        for group, n_blocks in zip(self._groups, blocks.group_sizes, strict=True):
            these = slice(first, first + n_blocks)
            for cache in group:
                target[cache.tensor_idx][targets[these]] = source[cache.tensor_idx][sources[these]]
                n_bytes += n_blocks * cache.page_size_bytes
            first += n_blocks
        self._over.append(TransferResult(job_id, True, n_bytes, time.perf_counter() - began_at))
        return True

    def get_finished(self) -> list[TransferResult]:
        over, self._over = self._over, []
        return over

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever running."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """See the module docstring."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "a row of the CPU's primary tier is one block"
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _MemoryCopies(kv_caches, region)
        return self._worker
