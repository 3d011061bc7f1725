"""What tests open: caches in two processes with one store, and waiting for what becomes visible a little later."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpeer.engines.sglang.contract.kinds import Attachment, Stored
from kvpeer.engines.sglang.contract.processes import CacheProcess, RemoteCache

__all__ = ["Caches", "until", "until_found"]

VISIBLE_DEADLINE_S = 20.0
"""What a process stored, others find at once or soon; a backend that connects in the background may take a moment."""

POLL_S = 0.05


class Caches:
    """Makes caches in process `a` or `b`; all that one test makes have one store."""

    def __init__(self, processes: dict[str, CacheProcess], backend: str, extra_config: str, store: Path) -> None:
        self._processes = processes
        self._backend = backend
        self._extra_config = extra_config
        self._words = {"{store}": str(store), "{test}": uuid.uuid4().hex}
        self._opened: list[RemoteCache] = []

    @property
    def is_file(self) -> bool:
        return self._backend == "file"

    def open(self, process: str, kind: str = "full", *, is_usable: bool = True, **changes: Any) -> RemoteCache:
        """A cache, which can store and find pages when this returns; not so with `is_usable` False."""
        text = self._extra_config.replace("{process}", process)
        for word, meaning in self._words.items():
            text = text.replace(word, meaning)
        cache = self._processes[process].open(kind, Attachment(self._backend, json.loads(text), **changes))
        self._opened.append(cache)
        if is_usable:
            until(lambda: cache.put_pages("kv", [f"{'0' * 48}{uuid.uuid4().hex[:16]}"]) == [True], "a page is stored")
        return cache

    def close(self) -> None:
        for cache in self._opened:
            cache.close()


def until(is_so: Callable[[], bool], what: str) -> None:
    """Returns when it is so; fails naming `what` if it is not by the deadline."""
    end = time.monotonic() + VISIBLE_DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, f"not within {VISIBLE_DEADLINE_S} s: {what}"
        time.sleep(POLL_S)


def until_found(cache: RemoteCache, stored: Stored) -> None:
    """Returns when the cache's backend finds all pages of a prompt that was stored."""
    until(lambda: cache.n_existing(stored.hashes) == len(stored.hashes), "the stored prompt is found")
