"""Pages that readers reported corrupt and that wait for the producer's own check of its memory.

A report is a hint and never believed: it only says which bytes to look at. So its cost has to be bounded, because a
reader may lie: in memory by how many pages wait, in time by the pauses between checks, and readers take turns, so that
one that reports much delays nobody else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from kvpeer.model import AgentId

__all__ = [
    "CHECK_PAUSE_S_MIN",
    "CHECK_SHARE",
    "READER_PAGES_MAX",
    "RIGHT_S",
    "WAITING_PAGES_MAX",
    "Recheck",
    "Rechecks",
    "SlotPage",
]

READER_PAGES_MAX = 256
"""Pages of one reader that wait: a large batch of a reader whose every page came corrupt."""

WAITING_PAGES_MAX = 4096
"""Pages that wait in all: about 1 MB. More are reported when more readers meet them."""

CHECK_SHARE = 0.05
"""Part of one core's time that checks may take, whatever is reported."""

CHECK_PAUSE_S_MIN = 0.002
"""Between two checks, so that small pages do not keep the event loop busy: at most 500 a second."""

RIGHT_S = 10.0
"""A page that was found right is not checked again for this long; nor does an honest reader try it again before. At 500
checks a second that is 5,000 pages to remember."""


@dataclass(frozen=True, slots=True)
class SlotPage:
    """What a reader read: this page, in this use of this slot."""

    key: bytes
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Recheck:
    """Check this page, which this reader was the first to report."""

    reader: AgentId
    page: SlotPage


class Rechecks:
    """What waits. Not thread-safe.

    Attributes:
        n_false: by reader, pages that it was the first to report and that were right. Forgotten with the reader.
    """

    def __init__(self) -> None:
        self.n_false: Counter[AgentId] = Counter()
        self._waiting: OrderedDict[AgentId, deque[SlotPage]] = OrderedDict()
        self._known: set[SlotPage] = set()  # waiting, or being checked
        self._under_way: Recheck | None = None
        self._right: OrderedDict[SlotPage, float] = OrderedDict()  # found right -> until when that counts

    def report(self, reader: AgentId, pages: list[SlotPage], now: float) -> int:
        """Takes in what a reader reports; returns how many pages were dropped for lack of room.

        What waits already, or was found right a moment ago, needs no further check.
        """
        while self._right and next(iter(self._right.values())) <= now:
            self._right.popitem(last=False)
        fresh = [page for page in dict.fromkeys(pages) if page not in self._known and page not in self._right]
        mine = self._waiting.get(reader, deque())
        taken = fresh[: max(0, min(READER_PAGES_MAX - len(mine), WAITING_PAGES_MAX - len(self._known)))]
        if taken:
            mine.extend(taken)
            self._known.update(taken)
            self._waiting[reader] = mine
        return len(fresh) - len(taken)

    def take(self) -> Recheck | None:
        """The next page to check, of the reader whose turn it is; None when nothing waits. `checked` comes before the
        next call."""
        if not self._waiting:
            return None
        reader, pages = self._waiting.popitem(last=False)
        page = pages.popleft()
        if pages:
            self._waiting[reader] = pages
        self._under_way = Recheck(reader, page)
        return self._under_way

    def checked(self, recheck: Recheck, *, is_right: bool, took_s: float, now: float) -> float:
        """The page was checked, or turned out to be gone; returns for how many seconds to pause before the next."""
        self._known.discard(recheck.page)
        if is_right:
            if self._under_way is recheck:
                self.n_false[recheck.reader] += 1
            self._right[recheck.page] = now + RIGHT_S
        return max(CHECK_PAUSE_S_MIN, took_s * (1 / CHECK_SHARE - 1))

    def forget(self, reader: AgentId) -> None:
        """The reader ended: what it reported is not checked any more."""
        self._known.difference_update(self._waiting.pop(reader, ()))
        del self.n_false[reader]
        if self._under_way is not None and self._under_way.reader == reader:
            self._under_way = None
