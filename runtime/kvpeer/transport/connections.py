"""A bounded pool of connections to one producer, of whatever kind, opened when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvpeer.core.reasons import UnaskedReason
from kvpeer.model import PeerUnavailableError, Verify
from kvpeer.native import FetchedPages, monotonic_ns
from kvpeer.transport.base import FetchBatch, NotAskedError

__all__ = ["Connection", "ConnectionPool", "Lease", "OpenConnection"]


class Connection(Protocol):
    """A way to one producer's pages; one fetch at a time. Owns what it needs of the system until `close`."""

    @property
    def pages_max(self) -> int:
        """Pages that one fetch may ask for."""

    @property
    def bytes_max(self) -> int:
        """Page bytes that one fetch should ask for: whoever aborts waits for them."""

    def fetch(self, batch: FetchBatch, verify: Verify, deadline_ns: int) -> FetchedPages:
        """Fetches pages, verified. With an error in the result, or after it raised, the connection is of no use."""

    def shutdown(self) -> None:
        """Ends a fetch in another thread soon. Thread-safe; never blocks."""

    def close(self) -> None:
        """Frees it. Not while it fetches."""


OpenConnection = Callable[[int], Connection]
"""Opens a connection by a deadline (`monotonic_ns`).

Raises:
    KvPeerError: there is none; nothing else may come out.
"""


@dataclass(slots=True, eq=False)
class Lease:
    """A connection on loan to one fetch. `is_reused`: an earlier one had it; the producer may have closed it since."""

    connection: Connection
    is_reused: bool = False
    idle_since_ns: int = 0


class ConnectionPool:
    """At most connections_max connections at a time, on loan or idle. Thread-safe.

    One lock protects all state; connections are opened and closed outside of it.
    """

    def __init__(self, open_connection: OpenConnection, connections_max: int) -> None:
        self._open_connection = open_connection
        self._connections_max = connections_max
        self._changed = threading.Condition()  # protects everything below
        self._idle: list[Lease] = []
        self._on_loan: set[Lease] = set()
        self._n_opening = 0
        self._is_closed = False

    def take(self, deadline_ns: int) -> Lease:
        """Lends the connection that was used last, or a new one. Blocks until deadline_ns at most.

        Raises:
            NotAskedError: no connection became free by the deadline.
            PeerUnavailableError: none could be opened by the deadline, or the pool is closed.
            KvPeerError: what opening the connection raised.
        """
        with self._changed:
            while not self._idle and self._n_open >= self._connections_max and not self._is_closed:
                left_ns = deadline_ns - monotonic_ns()
                if left_ns <= 0:
                    raise NotAskedError(UnaskedReason.BUSY, f"all {self._connections_max} data connections are busy")
                self._changed.wait(left_ns / 1e9)
            if self._is_closed:
                raise PeerUnavailableError("the data connections are closed")
            if self._idle:
                lease = self._idle.pop()
                lease.is_reused = True
                self._on_loan.add(lease)
                return lease
            self._n_opening += 1
        return self._open(deadline_ns)

    def give_back(self, lease: Lease, *, is_usable: bool) -> None:
        """Ends a loan. A connection that is not usable is closed, never lent again."""
        lease.idle_since_ns = monotonic_ns()
        with self._changed:
            self._on_loan.discard(lease)
            is_kept = is_usable and not self._is_closed
            if is_kept:
                self._idle.append(lease)
            self._changed.notify()
        if not is_kept:
            lease.connection.close()

    def close_idle(self, before_ns: int) -> None:
        """Closes the connections that nobody used since before_ns."""
        with self._changed:
            expired = [lease for lease in self._idle if lease.idle_since_ns < before_ns]
            self._idle = [lease for lease in self._idle if lease.idle_since_ns >= before_ns]
            self._changed.notify(len(expired))
        for lease in expired:
            lease.connection.close()

    def close(self) -> None:
        """Closes idle connections and ends the fetches on the others soon; whoever has them on loan gives them back."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for lease in self._on_loan:
                lease.connection.shutdown()  # never blocks; under the lock, so that it is not being closed
            self._changed.notify_all()
        for lease in idle:
            lease.connection.close()

    @property
    def _n_open(self) -> int:
        return len(self._idle) + len(self._on_loan) + self._n_opening

    def _open(self, deadline_ns: int) -> Lease:
        lease = None
        try:
            lease = Lease(self._open_connection(deadline_ns))
        finally:
            with self._changed:
                self._n_opening -= 1
                if lease is None:
                    self._changed.notify()
                else:
                    self._on_loan.add(lease)
                    if self._is_closed:
                        lease.connection.shutdown()
        return lease
