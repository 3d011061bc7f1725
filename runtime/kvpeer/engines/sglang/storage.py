"""`KVPeerStorage`: SGLang's L3 interface, over one `PoolPages` for each host pool of this rank.

This is the boundary where errors end. At registration a pool that cannot be shared raises, with a message that names
the fix. Afterwards nothing that goes wrong here may reach the engine: it is logged, counted, and answered with "not
there". SGLang calls from one thread each for questions, reads and writes, and from its scheduler for the rest; none of
them waits for another, and each ends by its own deadline. Written for and run with SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvpeer.engines.sglang.connection import RankConnection
from kvpeer.engines.sglang.gate import PullGate
from kvpeer.engines.sglang.hits import leading, stops_with_all_pages, stops_with_trailing_pages
from kvpeer.engines.sglang.layout import is_logical
from kvpeer.engines.sglang.pages import Mask, PageNumbers, PoolPages
from kvpeer.engines.sglang.settings import ENVIRONMENT_PREFIX, LIVE, load_settings
from kvpeer.engines.sglang.stats import Meter
from kvpeer.engines.told_settings import ToldSettings

__all__ = ["KVPeerStorage"]

CLOSE_WAIT_S = 0.8
"""What `close` waits for all connections together. SGLang has ended its threads by then, so no copy is running."""

_logger = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(answer: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Makes a method answer `answer(first argument)` instead of raising; see the module docstring."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: KVPeerStorage, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                _logger.exception("kvpeer: %s failed; its pages are not there", method.__name__)
                self._meter.failed(method.__name__)
                return answer(*args[:1], *list(kwargs.values())[: not args])

        return guarded  # type: ignore[return-value]

    return decorate


def _none_of(keys: Sequence[str]) -> list[bool]:
    return [False] * len(keys)


def _none_of_any(transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
    return {transfer.name: _none_of(transfer.keys or []) for transfer in transfers}


class KVPeerStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where mypy runs
    """See the module docstring for errors and threads, the package's for how to use it.

    `_lock` protects `_pools` and `_is_closed`: pools may be registered while other threads ask. Nothing blocks under
    it.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Connects to nothing yet.

        Raises:
            ConfigError: a setting is wrong or the weights cannot be named; the message names the fix.
        """
        self._settings = load_settings(storage_config.extra_config or {}, os.environ)
        self._connection = RankConnection(storage_config, self._settings)
        self._meter = Meter(is_published=storage_config.enable_storage_metrics)
        self._gate = PullGate(self._settings.policy(), self._meter.decided)
        self._told = ToldSettings(self._settings, ENVIRONMENT_PREFIX, LIVE, _logger)
        self._lock = threading.Lock()
        self._pools: dict[str, PoolPages] = {}
        self._has_logical_anchor = False
        self._is_closed = False

    # ---- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool that the interfaces without pool names mean.

        Raises:
            ConfigError: its layout is not supported; names it and the fix.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName | str) -> None:
        """A further pool, or the first one once more. Raises as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, pool_name: PoolName | str, host_pool: Any) -> None:
        name = str(pool_name)
        if is_logical(host_pool):
            self._has_logical_anchor |= name == PoolName.KV
            return
        with self._lock:
            known = self._pools.get(name)
            if self._is_closed or (known is not None and known.host_pool is host_pool):
                return
        try:
            pages = self._connection.connect(name, host_pool)
        except Exception:
            self.close()  # SGLang keeps a backend whose registration failed, so that nothing else would
            raise
        superseded = self._take_in(name, pages)
        if superseded is not None:
            superseded.close(time.monotonic() + CLOSE_WAIT_S)

    def _take_in(self, name: str, pages: PoolPages) -> PoolPages | None:
        """Returns the pool's former pages, or these if this backend was closed meanwhile."""
        with self._lock:
            if self._is_closed:
                return pages
            superseded, self._pools[name] = self._pools.get(name), pages
            return superseded

    def _pool(self, name: PoolName | str = PoolName.KV) -> PoolPages | None:
        """None for a pool that is not registered, or closed."""
        with self._lock:
            return self._pools.get(str(name))

    # ---- where pages are

    @_guarded(lambda keys: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Returns how many of these pages can be had before the first that cannot."""
        return self._kv_pages(keys, time.monotonic() + self._settings.exists_timeout_s)

    @_guarded(lambda keys: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Returns how far the prompt with these pages can be restored, given what each pool needs.

        The keys of a transfer are placeholders here: only their number counts, as the length of its window.
        """
        deadline = time.monotonic() + self._settings.exists_timeout_s
        n_kv = self._kv_pages(keys, deadline)
        hits: dict[str, int] = {PoolName.KV: n_kv} if n_kv else {}
        stops = np.ones(n_kv + 1, np.bool_)
        for transfer in pool_transfers or []:
            # A pool with another form of the same pages (BLOCK_GROUPS) never decides; no verdict is given of it.
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue
            if not stops[1:].any():
                break
            present = self._exist(transfer.name, keys[:n_kv], deadline)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                possible = stops_with_all_pages(present)
            else:
                possible = stops_with_trailing_pages(present, len(transfer.keys or ()))
            if possible[1:].any():
                hits[transfer.name] = int(np.flatnonzero(possible)[-1])
            stops &= possible
        restorable = (np.flatnonzero(stops[1:]) + 1).tolist()
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    @_guarded(lambda key: False)
    def exists(self, key: str) -> bool:
        """Whether this page can be had."""
        return self.batch_exists([key]) == 1

    def _kv_pages(self, keys: Sequence[str], deadline: float) -> int:
        """How many of the first KV pages are to be read."""
        pages = self._pool()
        if self._has_logical_anchor or pages is None:
            return leading(self._exist(PoolName.KV, keys, deadline))
        began_at = time.monotonic()
        self._heed_policy(pages)
        statuses = pages.statuses(keys, deadline)
        self._meter.located(PoolName.KV, len(keys), int((statuses != 0).sum()), time.monotonic() - began_at)
        if not keys:
            return 0
        decision = self._gate.decide(statuses, pages.page_tokens, pages.page_bytes)
        pages.tell(keys, statuses, decision, time.monotonic() - began_at)
        return decision.n_tokens // pages.page_tokens

    def _exist(self, name: PoolName | str, keys: Sequence[str], deadline: float) -> Mask:
        if name == PoolName.KV and self._has_logical_anchor:
            return np.ones(len(keys), np.bool_)
        pages = self._pool(name)
        if pages is None:
            return np.zeros(len(keys), np.bool_)
        began_at = time.monotonic()
        self._heed_policy(pages)
        present = self._gate.usable_states(pages.statuses(keys, deadline))
        self._meter.located(str(name), len(keys), int(present.sum()), time.monotonic() - began_at)
        return present

    def _heed_policy(self, pages: PoolPages) -> None:
        """Takes up what the agent was told since it was asked last. On the thread of questions."""
        changed = self._told.changed(pages.policy)
        if changed is not None:
            self._settings = changed
            self._gate = PullGate(changed.policy(), self._meter.decided)

    # ---- straight between host pool and agent

    @_guarded(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Reads pages into the host pool; which of them are there now, each verified."""
        if self._has_logical_anchor:
            return [True] * len(keys)
        return self._get([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    @_guarded(_none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Publishes pages of the host pool; which of them can be had now."""
        if self._has_logical_anchor:
            return [True] * len(keys)
        return self._set([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    @_guarded(_none_of_any)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for pages of several pools."""
        return self._get(transfers)

    @_guarded(_none_of_any)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same for pages of several pools."""
        return self._set(transfers)

    def _get(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        located = [self._places(transfer) for transfer in transfers]
        n_bytes = sum(len(numbers) * pages.page_bytes for pages, numbers in filter(None, located))
        deadline = time.monotonic() + self._settings.get_timeout_s(n_bytes)
        results: dict[str, list[bool]] = {}
        for transfer, place in zip(transfers, located, strict=True):
            keys, arrived = transfer.keys or [], _none_of(transfer.keys or [])
            if place is not None:
                pages, numbers = place
                read = functools.partial(pages.read, keys, numbers, deadline)
                arrived = self._timed_read(transfer.name, pages, read)
            results.setdefault(transfer.name, []).extend(arrived)  # a pool may come in several transfers
        return results

    def _set(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        deadline = time.monotonic() + self._settings.set_timeout_s
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, stored, place = transfer.keys or [], _none_of(transfer.keys or []), self._places(transfer)
            if place is not None:
                pages, numbers = place
                write = functools.partial(pages.write, keys, numbers, deadline)
                stored = self._timed_write(transfer.name, pages, write)
            results.setdefault(transfer.name, []).extend(stored)
        return results

    def _places(self, transfer: PoolTransfer) -> tuple[PoolPages, PageNumbers] | None:
        pages, n_pages = self._pool(transfer.name), len(transfer.keys or ())
        if pages is None or not n_pages:
            return None
        numbers = pages.page_numbers(transfer.host_indices, n_pages)
        if numbers is None:
            _logger.error("kvpeer: SGLang's indices for %d pages of pool %s are not pages", n_pages, transfer.name)
            return None
        return pages, numbers

    def _timed_read(self, name: PoolName | str, pages: PoolPages, read: Callable[[], Mask]) -> list[bool]:
        began_at = time.monotonic()
        arrived = read()
        n_read = int(arrived.sum())
        seconds = time.monotonic() - began_at
        self._meter.read(str(name), len(arrived), n_read, n_read * pages.page_bytes, seconds)
        return [bool(is_there) for is_there in arrived]

    def _timed_write(self, name: PoolName | str, pages: PoolPages, write: Callable[[], Mask]) -> list[bool]:
        began_at = time.monotonic()
        stored = write()
        n_stored = int(stored.sum())
        seconds = time.monotonic() - began_at
        self._meter.written(str(name), len(stored), n_stored, n_stored * pages.page_bytes, seconds)
        return [bool(is_there) for is_there in stored]

    # ---- through flat pages: what SGLang uses without interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Reads one page into this tensor, or into a new one; None if that was not possible."""
        pages = self.batch_get([key], None if target_location is None else [target_location])
        return pages[0] if pages else None

    @_guarded(lambda keys: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into these tensors, or into new ones; None for each that was not possible."""
        pages = self._pool()
        if pages is None or not keys:
            return [None] * len(keys)
        flat = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        deadline = time.monotonic() + self._settings.get_timeout_s(len(keys) * pages.page_bytes)
        arrived = self._timed_read(PoolName.KV, pages, lambda: pages.read_into(keys, flat, deadline))
        return [page if is_there else None for page, is_there in zip(flat, arrived, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Publishes a page; whether it can be had now."""
        return self.batch_set([key], None if value is None else [value])

    @_guarded(lambda keys: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Publishes pages; whether all of them can be had now."""
        pages = self._pool()
        if pages is None or values is None:
            return False
        deadline = time.monotonic() + self._settings.set_timeout_s
        return not keys or all(
            self._timed_write(PoolName.KV, pages, lambda: pages.write_from(keys, list(values), deadline))
        )

    # ---- the rest

    def clear(self) -> bool:
        """Withdraws the pages of this model from the own agent's pool; whether that is done. Pages at peers stay."""
        with self._lock:
            pools = list(self._pools.values())
        answers = [pages.withdraw_all() for pages in pools]
        return all(answers)

    def get_stats(self) -> StorageMetrics | None:
        """Returns the transfers since the last call, None if there were none."""
        transfers = self._meter.drain()
        if not transfers:
            return None
        return StorageMetrics(
            prefetch_pgs=transfers.read_pages,
            backup_pgs=transfers.written_pages,
            prefetch_bandwidth=transfers.read_gb_per_s,
            backup_bandwidth=transfers.written_gb_per_s,
        )

    def close(self) -> None:
        """Ends all connections, within a second; further calls find nothing. May be called again."""
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
            self._is_closed = True
        deadline = time.monotonic() + CLOSE_WAIT_S
        for pages in pools:
            pages.close(deadline)
