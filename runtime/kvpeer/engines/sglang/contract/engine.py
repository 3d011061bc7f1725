"""One process's cache: SGLang's radix cache, controller and host pools, made with the test kit of its wheel.

Runs in a worker process only, because SGLang keeps one configuration per process. The kit's private names are used on
purpose: they are what SGLang's own tests of its file backend use.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import unittest
from array import array
from dataclasses import replace
from typing import Any

import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    drop_hicache_atexit_pin,
    match_prefix,
    node_host_value,
)
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from kvpeer.engines.sglang.contract.kinds import KINDS, Attachment, Stored

__all__ = ["Engine"]

POLL_S = 0.02

RESTORE_DEADLINE_S = 30.0
"""For one restore on a busy machine; a backend that is this slow has hung."""


class Engine(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]
    """A cache with a backend attached. Not thread-safe, but for `storage`."""

    def __init__(self, kind: str, attachment: Attachment) -> None:
        super().__init__("run")
        self.kind = KINDS[kind]
        self.cfg = CacheConfig(
            page_size=self.kind.page_tokens,
            components=tuple(ComponentType[name] for name in self.kind.components),
            **self.kind.config,
        )
        os.environ.update(attachment.environment)
        try:
            self._parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
            self._parallel.__enter__()
            self._build(attachment)
            if attachment.rank:
                self._become_rank(attachment.rank)
        finally:
            for name in attachment.environment:
                del os.environ[name]

    def run(self, result: Any = None) -> None:
        """Nothing: the base class is there for its assertions."""

    def _build(self, attachment: Attachment) -> None:
        self.cache, self.allocator, self.requests = build_fixture(self.cfg)
        self._attachment = attachment
        arguments = ServerArgs(
            model_path="dummy",
            served_model_name=attachment.model_name,
            page_size=self.cfg.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout=attachment.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=attachment.backend,
            hicache_storage_backend_extra_config=self._extra_config(),
            hicache_storage_prefetch_policy="wait_complete",
        )
        arguments._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        self._allow_prefetch()

    def _become_rank(self, rank: dict[str, int]) -> None:
        """Replaces the backend by one that is told of another rank, without the process groups of a real one."""
        config = replace(self.controller.storage_config, **rank)
        if hasattr(self.storage, "close"):
            self.storage.close()
        anchor = self.controller.storage_host_pool
        storage = StorageBackendFactory.create_backend(self._attachment.backend, config, anchor)
        storage.register_mem_pool_host(anchor)
        for entry in self.controller.mem_pool_host.entries:
            storage.register_mem_host_pool_v2(entry.host_pool, entry.name)
        storage.on_host_pools_registered()
        self.controller.storage_backend = storage

    def _extra_config(self) -> str:
        extra = {"prefetch_threshold": 1, **self._attachment.extra_config}
        if self._attachment.is_v1:
            extra["interface_v1"] = 1
        return json.dumps(extra)

    def _allow_prefetch(self) -> None:
        """Host and device pools are equally large here, which would leave no room for reads."""
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)

    # ---- what SGLang does

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def host_pool(self, name: str) -> Any:
        return self.controller.mem_pool_host.entry_map[PoolName(name)].host_pool

    def tokens(self, seed: int, n_pages: int) -> list[int]:
        """A prompt that has no page in common with that of another seed."""
        return [seed * 100_000 + n for n in range(1, n_pages * self.kind.page_tokens + 1)]

    def store(self, seed: int, n_pages: int) -> Stored:
        """Computes a prompt (random bytes stand for KV), backs it up to host and storage, and says what was stored."""
        tokens = self.tokens(seed, n_pages)
        self._insert(self.cache, self.allocator, self.requests, tokens)
        self._fill_device_pools(seed)
        leaf = match_prefix(self.cache, tokens).last_device_node
        self._backup_node(self.cache, leaf)
        self._write_path_to_l3(self.cache, leaf)
        self._flush_l3_backups(self.cache, timeout=RESTORE_DEADLINE_S)
        return self._host_pages(leaf)

    def restore(self, seed: int, n_pages: int) -> tuple[int, Stored]:
        """Prefetches a prompt from storage; returns how many tokens are in the host pools then, and their pages."""
        tokens = self.tokens(seed, n_pages)
        handle = CacheRequestHandle(f"request-{seed}-{time.monotonic_ns()}", 0)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(self.cache, handle, timeout=RESTORE_DEADLINE_S)
        match = match_prefix(self.cache, tokens)
        return int(match.host_hit_length), self._host_pages(match.last_host_node)

    def _fill_device_pools(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kv = self.allocator.get_kvcache()
        for tensor in _tensors_of(kv) + _tensors_of(getattr(self.requests, "mamba_pool", None)):
            as_bytes = tensor.view(torch.uint8) if tensor.is_contiguous() else None
            if as_bytes is not None:
                as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, generator=generator, dtype=torch.uint8))

    def _host_pages(self, leaf: Any) -> Stored:
        hashes: list[str] = []
        digests: dict[str, dict[int, str]] = {}
        for node in self._path_chain(self.cache, leaf):
            of_node = list(self.cache.tree_core.get_hash_values(node))
            last = len(hashes) + len(of_node)
            for component, pool_name in (("FULL", "kv"), (self.kind.side_pool.upper(), self.kind.side_pool)):
                value = node_host_value(self.cache, node, ComponentType[component]) if component else None
                if value is None:
                    continue
                pool = self.host_pool(pool_name)
                firsts = value[:: pool.page_size].tolist()
                for place, index in enumerate(firsts, start=last - len(firsts)):
                    digests.setdefault(pool_name, {})[place] = _digest(pool.get_data_page(index, flat=True))
            hashes += of_node
        return Stored(hashes, digests)

    def evict_all(self) -> None:
        """Forgets all prompts, on device and host, as the scheduler's flush does."""
        self.cache.reset()
        self.requests.clear()
        self.allocator.clear()

    # ---- detach and attach, as an administrator does at run time

    def detach(self) -> None:
        is_done, message = self.cache.detach_storage_backend()
        assert is_done, message

    def attach(self) -> None:
        is_done, message = self.cache.attach_storage_backend(
            storage_backend=self._attachment.backend,
            storage_backend_extra_config_json=self._extra_config(),
            served_model_name=self._attachment.model_name,
        )
        assert is_done, message
        self._allow_prefetch()

    def close(self) -> None:
        try:
            if self.storage is not None:
                self.controller.detach_storage_backend()
        finally:
            drop_hicache_atexit_pin(self.cache)
            self._parallel.__exit__(None, None, None)

    # ---- the backend alone, on real host pools

    def put_pages(self, pool_name: str, keys: list[str]) -> list[bool]:
        """Stores pages whose bytes follow from pool and key."""
        pool = self.host_pool(pool_name)
        indices = self._host_indices(pool, len(keys))
        for key, index in zip(keys, _firsts(pool, indices), strict=True):
            pool.set_from_flat_data_page(index, _content(pool, pool_name, key))
        try:
            if pool_name != "kv":
                transfer = PoolTransfer(PoolName(pool_name), host_indices=indices, keys=keys)
                return list(self.storage.batch_set_v2([transfer])[transfer.name])
            if self._attachment.is_v1 and self._attachment.backend != "file":
                return list(self.storage.batch_set_v1(keys, indices))
            pages = [pool.get_data_page(index) for index in _firsts(pool, indices)]
            return [self.storage.batch_set([key], [page]) for key, page in zip(keys, pages, strict=True)]
        finally:
            pool.free(indices)

    def take_pages(self, pool_name: str, keys: list[str]) -> list[str]:
        """Reads pages into host pages that held something else: `right`, `wrong` or `missing` for each."""
        pool = self.host_pool(pool_name)
        indices = self._host_indices(pool, len(keys))
        firsts = _firsts(pool, indices)
        for index in firsts:
            pool.set_from_flat_data_page(index, _content(pool, "other", str(index)))
        try:
            are_there = self._read_pages(pool_name, pool, keys, indices)
            words = []
            for key, index, is_there in zip(keys, firsts, are_there, strict=True):
                found = _digest(pool.get_data_page(index, flat=True))
                is_right = found == _digest(_content(pool, pool_name, key))
                words.append("missing" if not is_there else "right" if is_right else "wrong")
            return words
        finally:
            pool.free(indices)

    def _read_pages(self, pool_name: str, pool: Any, keys: list[str], indices: torch.Tensor) -> list[bool]:
        if pool_name != "kv":
            transfer = PoolTransfer(PoolName(pool_name), host_indices=indices, keys=keys)
            return list(self.storage.batch_get_v2([transfer])[transfer.name])
        if self._attachment.is_v1 and self._attachment.backend != "file":
            return list(self.storage.batch_get_v1(keys, indices))
        pages = self.storage.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for index, page in zip(_firsts(pool, indices), pages, strict=True):
            if page is not None:
                pool.set_from_flat_data_page(index, page)
        return [page is not None for page in pages]

    def n_existing(self, keys: list[str]) -> int:
        return int(self.storage.batch_exists(keys))

    def stops(self, keys: list[str], policy: str, window: int | None) -> tuple[int, dict[str, int], list[int] | None]:
        """What exists_v2 says with the side pool under a policy: the pages to restore, hits by pool, all legal stops.
        The keys of the transfer are placeholders, as in SGLang's prefetch."""
        transfer = PoolTransfer(
            PoolName(self.kind.side_pool),
            keys=None if window is None else ["__placeholder__"] * window,
            hit_policy=PoolHitPolicy(policy),
        )
        result = self.storage.batch_exists_v2(keys, [transfer])
        hits = {str(name): n for name, n in result.extra_pool_hit_pages.items()}
        return result.kv_hit_pages, hits, result.restorable_prefix_pages

    def stats(self) -> list[tuple[list[int], list[int], list[float], list[float]]]:
        """What two looks at the backend's numbers say; empty where it has none."""
        looks = [self.storage.get_stats() for _ in range(2)]
        return [(s.prefetch_pgs, s.backup_pgs, s.prefetch_bandwidth, s.backup_bandwidth) for s in looks if s]

    def close_storage_twice(self) -> float:
        """Detaches with `close` called once more; returns how long that took."""
        storage, began_at = self.storage, time.monotonic()
        self.detach()
        if hasattr(storage, "close"):
            storage.close()
        return time.monotonic() - began_at

    @staticmethod
    def _host_indices(pool: Any, n_pages: int) -> torch.Tensor:
        indices = pool.alloc(n_pages * pool.page_size)
        assert indices is not None, f"the host pool has no room for {n_pages} pages"
        return indices


def _firsts(pool: Any, indices: torch.Tensor) -> list[int]:
    firsts: list[int] = indices[:: pool.page_size].tolist()
    return firsts


def _content(pool: Any, pool_name: str, key: str) -> torch.Tensor:
    page = pool.get_dummy_flat_data_page()
    seed = int.from_bytes(hashlib.sha256(f"{pool_name} {key}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    filled = torch.randint(0, 256, (page.nbytes,), generator=generator, dtype=torch.uint8)
    return filled.view(page.dtype)


def _digest(page: torch.Tensor) -> str:
    return hashlib.sha256(page.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _tensors_of(thing: Any, depth: int = 3) -> list[torch.Tensor]:
    """All tensors that an object holds, itself or in its pools, each once."""
    found: dict[int, torch.Tensor] = {}
    pending = [(thing, depth)]
    while pending:
        item, left = pending.pop()
        if isinstance(item, torch.Tensor):
            if item.dtype in (torch.bfloat16, torch.float32, torch.float16):
                found[item.data_ptr()] = item
        elif isinstance(item, (list, tuple)):
            pending += [(part, left) for part in item]
        elif left and hasattr(item, "__dict__") and type(item).__module__.startswith("sglang"):
            pending += [(part, left - 1) for part in vars(item).values()]
    return list(found.values())
