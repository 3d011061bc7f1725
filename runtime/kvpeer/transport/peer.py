"""Pages of another agent's pool, by connections that are opened when a fetch needs them, of whatever kind."""

from __future__ import annotations

from threading import Event

from kvpeer.model import AdmissionRefusedError, KvPeerError, Outcome, PeerUnavailableError, Verify
from kvpeer.native import FetchedPages, monotonic_ns
from kvpeer.transport.base import FetchBatch, FetchResult
from kvpeer.transport.connections import ConnectionPool, Lease, OpenConnection

__all__ = ["IDLE_CLOSE_S", "PooledPeer"]

IDLE_CLOSE_S = 30.0
"""A connection that was not used for this long is closed: before the producer does so (60 s by default), which would
cost the next fetch a round trip."""


class PooledPeer:
    """One producer. At most connections_max connections; a fetch uses one at a time. Thread-safe.

    name: of the transport, see `Transport.name`. open_connection: see `OpenConnection`; called on the fetching thread.
    """

    def __init__(
        self,
        name: str,
        open_connection: OpenConnection,
        *,
        verify: Verify,
        connections_max: int,
        idle_close_s: float = IDLE_CLOSE_S,
    ) -> None:
        self.name = name
        self._verify = verify
        self._idle_close_ns = round(idle_close_s * 1e9)
        self._connections = ConnectionPool(open_connection, connections_max)

    def fetch(self, batch: FetchBatch, deadline_ns: int, abort: Event | None = None) -> FetchResult:
        """See `Transport.fetch`. Pages without an answer are TIMEOUT at the deadline, REFUSED where the producer did
        not admit this reader, else MISS; `error` says why. What failed is not asked again, except that a connection
        which broke while it was idle is replaced.
        """
        self.close_idle()
        result = FetchResult.unavailable(len(batch))
        result.transport = self.name
        start = 0
        while start < len(batch) and not (abort is not None and abort.is_set()):
            try:
                lease = self._connections.take(deadline_ns)
            except KvPeerError as error:
                result.end(start, _outcome_without_answer(error, deadline_ns), error)
                break
            stop = batch.chunk_stop(start, lease.connection.pages_max, lease.connection.bytes_max)
            fetched = self._fetch_chunk(lease, batch.part(start, stop), deadline_ns)
            if lease.is_reused and _broke_unanswered(fetched):
                continue
            result.put(start, fetched)
            if fetched.error is not None:
                result.end(stop, _outcome_without_answer(fetched.error, deadline_ns), fetched.error)
                break
            start = stop
        return result

    def close_idle(self) -> None:
        """Closes connections that were not used for idle_close_s. Every fetch does so, too."""
        self._connections.close_idle(monotonic_ns() - self._idle_close_ns)

    def close(self) -> None:
        """See `Transport.close`. Does not wait for the fetches that it ends."""
        self._connections.close()

    def _fetch_chunk(self, lease: Lease, chunk: FetchBatch, deadline_ns: int) -> FetchedPages:
        is_usable = False
        try:
            fetched = lease.connection.fetch(chunk, self._verify, deadline_ns)
            is_usable = fetched.error is None
        finally:
            self._connections.give_back(lease, is_usable=is_usable)
        return fetched


def _outcome_without_answer(error: KvPeerError, deadline_ns: int) -> Outcome:
    if isinstance(error, AdmissionRefusedError):
        return Outcome.REFUSED
    return Outcome.TIMEOUT if monotonic_ns() >= deadline_ns else Outcome.MISS


def _broke_unanswered(fetched: FetchedPages) -> bool:
    """The other side was gone before it answered a page. (No producer answers MISS: it stands for no answer.)"""
    is_gone = isinstance(fetched.error, PeerUnavailableError)
    return is_gone and bool((fetched.outcomes == Outcome.MISS).all())
