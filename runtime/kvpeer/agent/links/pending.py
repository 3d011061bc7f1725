"""Requests of one link that wait for their replies, and how long nothing was answered."""

from __future__ import annotations

import asyncio

from kvpeer.agent.links.settings import UNANSWERED_MIN
from kvpeer.model import KvPeerError, PeerUnavailableError
from kvpeer.wire.messages import PeerMessage

__all__ = ["PendingReplies"]


class PendingReplies:
    """Futures by request id. Belongs to one event loop. An id is never used twice on a link, so a late reply finds
    nothing."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._futures: dict[int, asyncio.Future[PeerMessage]] = {}
        self._last_id = 0
        self._n_unanswered = 0  # asked since the last answer, still awaited or not
        self._unanswered_since = 0.0

    def __len__(self) -> int:
        return len(self._futures)

    def open(self) -> tuple[int, asyncio.Future[PeerMessage]]:
        """A new id and the future of its reply; `close` it in any case.

        Raises:
            PeerUnavailableError: the limit is reached: the peer has stopped answering.
        """
        if len(self._futures) >= self._limit:
            raise PeerUnavailableError(f"{self._limit} requests wait for this peer already")
        self._last_id += 1
        loop = asyncio.get_running_loop()
        if not self._n_unanswered:
            self._unanswered_since = loop.time()
        self._n_unanswered += 1
        future: asyncio.Future[PeerMessage] = loop.create_future()
        self._futures[self._last_id] = future
        return self._last_id, future

    def close(self, request_id: int) -> None:
        """Forgets the request; a reply that still comes is late."""
        future = self._futures.pop(request_id)
        if not future.cancel() and not future.cancelled():
            future.exception()  # nobody may be left to look at it; without this, asyncio would complain

    def is_mute(self, now: float, mute_s: float) -> bool:
        """Whether several requests were made for this long and none was answered. (Each is, on a good link: the peer
        refuses what it could not serve in time.)"""
        return self._n_unanswered >= UNANSWERED_MIN and now - self._unanswered_since >= mute_s

    def heard(self) -> None:
        """An answer came, be it late or a refusal."""
        self._n_unanswered = 0

    def answer(self, request_id: int, message: PeerMessage) -> bool:
        """Whether somebody waited for this reply."""
        future = self._futures.get(request_id)
        if future is None or future.done():
            return False
        future.set_result(message)
        return True

    def fail(self, request_id: int, error: KvPeerError) -> bool:
        """Whether somebody waited for this reply; it gets the error."""
        future = self._futures.get(request_id)
        if future is None or future.done():
            return False
        future.set_exception(error)
        return True

    def fail_all(self, error: KvPeerError) -> None:
        """Everybody who waits gets the error."""
        for request_id in list(self._futures):
            self.fail(request_id, error)
