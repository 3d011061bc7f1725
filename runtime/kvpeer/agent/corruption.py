"""Corrupt pages of a producer: its readers tell it, and it looks for itself.

A reader that found a page corrupt avoids the location and sends the producer a notice. The producer believes nobody: it
computes the checksums of its own page again. If they are wrong, its memory has rotted, and the page is withdrawn at
once, so that the directory sends no further reader there. If they are right, the report was false: the way, the
reader's memory or the reader itself is at fault, and nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.pool import PoolService
from kvpeer.agent.touches import Notifier
from kvpeer.core.rechecks import Recheck, Rechecks, SlotPage
from kvpeer.metrics import Metrics
from kvpeer.model import KEY_BYTES, AgentId, Outcome, RemoteProtocolError
from kvpeer.wire.messages import AgentInfo, CorruptReport, PeerMessage
from kvpeer.wire.packing import U4, count, pack, unpack

__all__ = ["REPORT_PAGES_MAX", "CorruptPages"]

REPORT_PAGES_MAX = 256
"""Pages of one CorruptReport: 6 kB."""

_log = logging.getLogger(__name__)


class CorruptPages:
    """Both sides: what this agent tells producers, and what readers tell it. Belongs to one event loop; the checksums
    are computed in a thread of their own. `clock` is monotonic seconds."""

    def __init__(self, pool: PoolService, links: Notifier, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._links = links
        self._reported = metrics.counter("kvpeer_pool_reported_pages_total")
        self._clock = clock
        self._rechecks = Rechecks()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpeer-recheck")

    # ---- as a reader

    def report(
        self, producer: AgentId, keys: bytes, slots: NDArray[np.uint32], generations: NDArray[np.uint32]
    ) -> None:
        """Tells the producer that these pages (n packed keys) of its came corrupt."""
        for first in range(0, len(slots), REPORT_PAGES_MAX):
            some = slice(first, first + REPORT_PAGES_MAX)
            some_keys = keys[some.start * KEY_BYTES : some.stop * KEY_BYTES]
            self._links.notify(producer, CorruptReport(some_keys, pack(slots[some], U4), pack(generations[some], U4)))

    # ---- as a producer

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what readers send."""
        return {CorruptReport: self._take_report}

    def forget(self, reader: AgentId) -> None:
        """The reader ended."""
        self._rechecks.forget(reader)

    async def run(self) -> None:
        """Checks what was reported, until cancelled."""
        while True:
            recheck = self._rechecks.take()
            if recheck is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                await asyncio.sleep(await self._check(recheck))

    def close(self) -> None:
        """Waits for a check that runs: one page. Blocks."""
        self._thread.shutdown()

    async def _take_report(self, peer: AgentInfo, message: PeerMessage) -> None:
        assert isinstance(message, CorruptReport)  # noqa: S101 - what it is registered for
        pages = unpack_report(message)
        held = [page for page in pages if self._pool.holds(page.key, page.slot, page.generation)]
        n_dropped = self._rechecks.report(AgentId(peer.agent_id), held, self._clock())
        self._reported.labels(outcome="gone").inc(len(pages) - len(held))
        self._reported.labels(outcome="dropped").inc(n_dropped)
        self._wake.set()

    async def _check(self, recheck: Recheck) -> float:
        """Looks at the page and does what follows; returns for how many seconds to pause before the next."""
        loop = asyncio.get_running_loop()
        outcome, took_s = await loop.run_in_executor(self._thread, self._compute, recheck.page)
        pause_s = self._rechecks.checked(recheck, is_right=outcome is Outcome.HIT, took_s=took_s, now=self._clock())
        if outcome is Outcome.CORRUPT:
            self._withdraw(recheck)
        elif outcome is Outcome.HIT:
            self._count_false(recheck)
        else:
            self._reported.labels(outcome="gone").inc()
        return pause_s

    def _compute(self, page: SlotPage) -> tuple[Outcome, float]:
        """On the thread."""
        started = time.thread_time()
        outcome = self._pool.native.check(page.slot, page.generation, page.key)
        return outcome, time.thread_time() - started

    def _withdraw(self, recheck: Recheck) -> None:
        page = recheck.page
        self._reported.labels(outcome="confirmed").inc()
        _log.error(
            "page %s in slot %d has other bytes than were written: its memory was damaged. Withdrawn, and the slot is "
            "out of use for a while (reported by agent %s)",
            page.key.hex(), page.slot, recheck.reader.hex(),
        )  # fmt: skip
        self._pool.quarantine(np.array([page.slot], dtype=np.uint32), np.array([page.generation], dtype=np.uint32))

    def _count_false(self, recheck: Recheck) -> None:
        self._reported.labels(outcome="false").inc()
        n_false = self._rechecks.n_false[recheck.reader]
        if n_false > 0 and n_false & (n_false - 1) == 0:  # the first, and at each doubling
            _log.warning(
                "agent %s reported %d pages corrupt that are right here: the way, its memory or the agent is at fault",
                recheck.reader.hex(), n_false,
            )  # fmt: skip


def unpack_report(message: CorruptReport) -> list[SlotPage]:
    """Returns the pages of a report.

    Raises:
        RemoteProtocolError: there are more than REPORT_PAGES_MAX, or lengths differ.
    """
    n = count(message.keys, KEY_BYTES, "keys")
    if n > REPORT_PAGES_MAX:
        raise RemoteProtocolError(f"keys: {n} in one CorruptReport, {REPORT_PAGES_MAX} are allowed")
    slots = unpack(message.slots, U4, n, "slots").tolist()
    generations = unpack(message.generations, U4, n, "generations").tolist()
    keys = [message.keys[at : at + KEY_BYTES] for at in range(0, len(message.keys), KEY_BYTES)]
    return [SlotPage(*row) for row in zip(keys, slots, generations, strict=True)]
