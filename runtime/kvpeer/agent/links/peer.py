"""What is kept of one other agent: its address, its links, notices that wait, and when it may be dialled again."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from kvpeer.agent.links.link import Link
from kvpeer.agent.links.settings import NOTICE_BYTES_MAX, LinkSettings
from kvpeer.wire.messages import AgentInfo

__all__ = ["Peer"]


class Peer:
    """Belongs to one event loop. `is_known`: somebody besides a link (membership) says that this agent exists."""

    def __init__(self, info: AgentInfo, settings: LinkSettings) -> None:
        self.info = info
        self.is_known = False
        self.links: list[Link] = []
        self.dialling: asyncio.Task[Link] | None = None
        self.last_error = ""
        self._settings = settings
        self._n_failures = 0
        self._not_before = 0.0
        self._notices: deque[bytes] = deque()
        self._notice_bytes = 0

    @property
    def link(self) -> Link | None:
        """A link that takes frames. When both sides dialled at once there are two, and either is as good."""
        return next((link for link in self.links if link.is_open), None)

    def wait_s(self, now: float) -> float:
        """How long this peer is not to be dialled; 0 when it may be."""
        return max(0.0, self._not_before - now)

    def dial_failed(self, error: str, now: float, rng: random.Random) -> None:
        """Doubles the wait before the next dial, with jitter so that many agents do not come back at once."""
        self.last_error = error
        backoff_s = min(self._settings.backoff_min_s * 2**self._n_failures, self._settings.backoff_max_s)
        self._n_failures += 1
        self._not_before = now + backoff_s * rng.uniform(0.5, 1.0)

    def dial_succeeded(self) -> None:
        """The next dial may be at once."""
        self._n_failures = 0
        self._not_before = 0.0

    def enqueue(self, frame: bytes) -> bool:
        """Whether there was room for one more notice."""
        has_room = (
            len(self._notices) < self._settings.notices_max and self._notice_bytes + len(frame) <= NOTICE_BYTES_MAX
        )
        if has_room:
            self._notices.append(frame)
            self._notice_bytes += len(frame)
        return has_room

    def flush(self) -> None:
        """Sends waiting notices as long as the link takes them."""
        link = self.link
        while self._notices and link is not None and link.is_writable:
            frame = self._notices.popleft()
            self._notice_bytes -= len(frame)
            link.notify(frame)

    def drop_notices(self) -> int:
        """How many waited."""
        n = len(self._notices)
        self._notices.clear()
        self._notice_bytes = 0
        return n
