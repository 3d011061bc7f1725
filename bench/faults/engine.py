"""An engine process without a model: SGLang's own host pool, and a storage backend attached to it as SGLang does.

Pages are numbers here. The bytes of a page are a function of its number and of what the engine is, so that whatever a
backend calls a hit can be compared with what this engine would have computed.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from faults.protocol import Backend, Identity, Read

__all__ = ["Engine"]

PAGE_TOKENS = 16
HEADS, HEAD_DIM, ITEM_BYTES = 2, 32, 2
LAYER_BYTES = 2 * PAGE_TOKENS * HEADS * HEAD_DIM * ITEM_BYTES
"""Of a page: K and V of one layer."""

DEVICE_PAGES = 192
HOST_RATIO = 1.5

PROBES = 3


def key_of(number: int) -> str:
    """As long as SGLang's hashes."""
    return f"{number:064x}"


class Engine:
    """One rank. Not thread-safe but for what `publish_from_threads` does."""

    def __init__(self, identity: Identity, page_bytes: int, folder: Path) -> None:
        torch.set_num_threads(1)
        load_plugins()
        model = _checkpoint(folder, identity.model)
        set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), page_size=PAGE_TOKENS))
        self._identity = identity
        self._seed = zlib.crc32(repr(identity).encode())
        self._host_pool = _host_pool(identity, page_bytes)
        n_pages = int(DEVICE_PAGES * HOST_RATIO)
        addresses, sizes = self._host_pool.get_page_buffer_meta(_indices(0, n_pages))
        runs = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        n_runs = len(runs) // n_pages
        self._pages = [runs[page * n_runs : (page + 1) * n_runs] for page in range(n_pages)]
        self._storage: Any = None

    # ---- attaching

    def attach(self, backend: Backend) -> float:
        """A new storage object with the host pool registered; the seconds that took."""
        began_at = time.monotonic()
        storage_class = getattr(importlib.import_module(backend.module), backend.class_name)
        config = HiCacheStorageConfig(
            tp_rank=self._identity.tp_rank,
            tp_size=self._identity.tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=self._identity.cp_rank,
            attn_cp_size=self._identity.cp_size,
            is_mla_model=False,
            enable_storage_metrics=True,
            is_page_first_layout=True,
            model_name=self._identity.model,
            extra_config=dict(backend.extra_config),
        )
        self._storage = storage_class(config, {})
        self._storage.register_mem_pool_host(self._host_pool)
        self._storage.register_mem_host_pool_v2(self._host_pool, PoolName.KV)
        return time.monotonic() - began_at

    def detach(self) -> float:
        """Closes the storage object and forgets it; the seconds that took."""
        began_at = time.monotonic()
        storage, self._storage = self._storage, None
        storage.close()
        return time.monotonic() - began_at

    def of_storage(self, path: str) -> Any:
        """An attribute of the storage object, or the length of it if it has one."""
        found = self._storage
        for name in path.split("."):
            found = getattr(found, name)
        return len(found) if hasattr(found, "__len__") else found

    # ---- pages

    def publish(self, numbers: list[int]) -> int:
        """How many of these pages the backend says it has now."""
        for page, number in enumerate(numbers):
            self._lay(page, self._content(number))
        return self._set(numbers, 0)

    def _set(self, numbers: list[int], first_page: int) -> int:
        return sum(self._storage.batch_set_v1([*map(key_of, numbers)], _indices(first_page, len(numbers))))

    def exist(self, numbers: list[int]) -> tuple[int, float]:
        """How many of these pages are said to be there before the first that is not, and the seconds that took."""
        began_at = time.monotonic()
        n_found = int(self._storage.batch_exists([*map(key_of, numbers)]))
        return n_found, time.monotonic() - began_at

    def read(self, numbers: list[int]) -> Read:
        """Reads pages into the host pool and compares them."""
        for page in range(len(numbers)):
            self._lay(page, np.zeros(self._page_bytes, np.uint8))
        began_at = time.monotonic()
        answers = self._storage.batch_get_v1([*map(key_of, numbers)], _indices(0, len(numbers)))
        seconds = time.monotonic() - began_at
        n_right = n_wrong = 0
        for page, number in enumerate(numbers):
            if answers[page]:
                is_right = np.array_equal(np.concatenate(self._pages[page]), self._content(number))
                n_right, n_wrong = n_right + is_right, n_wrong + (not is_right)
        return Read(n_right, n_wrong, len(numbers) - n_right - n_wrong, seconds)

    def probe(self, numbers: list[int]) -> tuple[int, Read]:
        """Each page by itself: how many are said to be there, and what became of those when they were read. What is
        missed is asked and read anew a few times, so that one late answer does not count."""
        reads = [read for number in numbers if (read := self._probe(number)) is not None]
        return len(reads), sum(reads, Read())

    def _probe(self, number: int) -> Read | None:
        """None for a page that is not said to be there."""
        read = None
        for _ in range(PROBES):
            if not self.exist([number])[0]:
                return None
            read = self.read([number])
            if not read.n_missed:
                break
        return read

    def publish_from_threads(self, first: int, n_threads: int, n_each: int, step: int, seconds: float) -> None:
        """Each thread publishes its share of the pages from `first` on in turn, `step` at a time, again and again."""
        for page in range(n_threads * n_each):
            self._lay(page, self._content(first + page))
        until = time.monotonic() + seconds

        def run(own: range) -> None:
            for page in itertools.cycle(own[::step]):
                if time.monotonic() > until:
                    return
                self._set(list(range(first + page, first + page + step)), page)

        threads = [
            threading.Thread(target=run, args=(range(thread * n_each, (thread + 1) * n_each),))
            for thread in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stats(self) -> tuple[list[int], list[int]]:
        """What `get_stats` says now of transfers: pages read and pages written."""
        stats = self._storage.get_stats()
        return (list(stats.prefetch_pgs), list(stats.backup_pgs)) if stats else ([], [])

    @property
    def _page_bytes(self) -> int:
        return sum(len(run) for run in self._pages[0])

    def _content(self, number: int) -> np.ndarray:
        return np.random.default_rng([number, self._seed]).integers(0, 256, self._page_bytes, dtype=np.uint8)

    def _lay(self, page: int, content: np.ndarray) -> None:
        start = 0
        for run in self._pages[page]:
            run[:] = content[start : start + len(run)]
            start += len(run)


def _indices(first_page: int, n_pages: int) -> torch.Tensor:
    return torch.arange(first_page * PAGE_TOKENS, (first_page + n_pages) * PAGE_TOKENS)


def _memory(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _host_pool(identity: Identity, page_bytes: int) -> Any:
    n_layers = page_bytes // LAYER_BYTES
    device_pool = MHATokenToKVPool(
        size=DEVICE_PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=getattr(torch, identity.dtype),
        head_num=HEADS // identity.tp_size,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        layer_num=n_layers,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device_pool._mha_buffer_info()
    return get_mha_host_pool_cls(info)(
        *(info, HOST_RATIO, 0, PAGE_TOKENS, "page_first"),
        device_capacity_tokens=DEVICE_PAGES * PAGE_TOKENS,
        start_layer=0,
        end_layer=n_layers,
    )


def _checkpoint(folder: Path, model: str) -> Path:
    """A folder as of a checkpoint: one tensor, other bytes for each model."""
    path = folder / model
    if path.is_dir():
        return path
    path.mkdir()
    tensor = np.random.default_rng(zlib.crc32(model.encode())).bytes(4096)
    header = json.dumps({"weight": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + tensor)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return path
