"""Two ways to one producer: the better one where it works, the other where it does not, and never without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import Event

from kvpeer.model import Outcome
from kvpeer.native import monotonic_ns
from kvpeer.transport.base import FetchBatch, FetchResult, NoPathError, NotAskedError, Transport

__all__ = ["FallbackPeer"]

RETRY_S = 30.0
"""The first way is tried again so long after it was given up: a link that came back is used soon, and a fetch in two
minutes at most pays for the attempt."""

FAILURES_MAX = 2
"""Fetches in a row that brought nothing and an error: one is an accident, the second a way that does not work."""


class FallbackPeer:
    """One producer, by `first` or, for RETRY_S after that failed, by `second`. Thread-safe.

    A fetch that finds no way by `first` goes by `second` at once; one that broke is not repeated.
    on_change: told the name of the transport in use and why, at each change; called on the fetching thread.
    """

    def __init__(
        self,
        first: Transport,
        second: Transport,
        on_change: Callable[[str, str], None],
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._first = first
        self._second = second
        self._on_change = on_change
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # protects everything below
        self._in_use = ""
        self._n_failures = 0
        self._retry_at_ns = 0

    @property
    def name(self) -> str:
        """The transport that was used last; the first one before that."""
        return self._in_use or self._first.name

    def fetch(self, batch: FetchBatch, deadline_ns: int, abort: Event | None = None) -> FetchResult:
        """See `Transport.fetch`."""
        with self._lock:
            is_first = self._clock_ns() >= self._retry_at_ns
        if is_first:
            result = self._first.fetch(batch, deadline_ns, abort)
            if not self._judge(result):
                return result
        self._use(self._second.name, "")
        return self._second.fetch(batch, deadline_ns, abort)

    def close(self) -> None:
        """See `Transport.close`."""
        self._first.close()
        self._second.close()

    def _judge(self, result: FetchResult) -> bool:
        """True if the fetch is to go by the second way."""
        if result.error is None or (result.outcomes == Outcome.HIT).any():
            with self._lock:
                self._n_failures = 0
            self._use(self._first.name, "")
            return False
        if isinstance(result.error, NotAskedError):
            return False
        has_no_path = isinstance(result.error, NoPathError)
        with self._lock:
            self._n_failures += 1
            is_given_up = has_no_path or self._n_failures >= FAILURES_MAX
            if is_given_up:
                self._n_failures = 0
                self._retry_at_ns = self._clock_ns() + round(RETRY_S * 1e9)
        if is_given_up:
            self._use(self._second.name, str(result.error))
        return has_no_path

    def _use(self, name: str, reason: str) -> None:
        with self._lock:
            is_change, self._in_use = name != self._in_use, name
        if is_change:
            self._on_change(name, reason)
