"""Answers to the messages of clients, one method a message. No sockets and no frames here.

Whatever peers do, an answer is given by the request's deadline; pages that could not be had are misses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort
from kvpeer.agent.pool import Locator, PoolService, Puller
from kvpeer.agent.tasks import escalate
from kvpeer.core.chain import ChainSlice
from kvpeer.core.slot_effects import ReserveStatus
from kvpeer.core.sources import offers_within
from kvpeer.core.traces import TraceRing
from kvpeer.metrics import Metrics
from kvpeer.model import AGENT_ID_BYTES, KEY_BYTES, AgentId, CapacityError, Outcome, RemoteProtocolError
from kvpeer.wire.messages import (
    Abandon,
    ClientMessage,
    Commit,
    Committed,
    Fetch,
    Fetched,
    Locate,
    Located,
    Ok,
    Release,
    Reserve,
    Reserved,
    Reset,
    Traced,
)
from kvpeer.wire.packing import U1, U4, U8, count, n_chain_keys, pack, unpack

__all__ = ["Client", "ClientRequests"]

ANSWER_MARGIN_S = 0.005
"""The answer is begun this long before the deadline: what it takes to pack and send the largest one."""

TEXT_CHARS_MAX = 256
"""What is kept and logged of a client's request ids and reasons. Ids may come from the engine's users, in any length;
two with one beginning only share a hint of where pages are."""

LOCATED_OWN = 1

LOCATE_OUTCOMES = ("miss", "local", "peer")
"""The metric's label for each status of `Located`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """A connected engine process. `number` names it as a writer and pin holder; part is -1 for a scheduler."""

    number: int
    name: str
    cohort: Cohort
    part: int


class ClientRequests:
    """Belongs to one event loop. Cancelling an answer gives up nothing that `PoolService.leave` does not clear."""

    def __init__(
        self,
        pool: PoolService,
        locator: Locator,
        puller: Puller,
        clock: Callable[[], float],
        batch_pages_max: int,
        metrics: Metrics,
        traces: TraceRing,
    ) -> None:
        self._traces = traces
        self._pool = pool
        self._locator = locator
        self._puller = puller
        self._clock = clock
        self._batch_pages_max = batch_pages_max
        self._published = metrics.counter("kvpeer_publish_pages_total")
        self._located = metrics.counter("kvpeer_locate_pages_total")
        self._locate_seconds = metrics.histogram("kvpeer_locate_seconds")
        self._fetched = metrics.counter("kvpeer_fetch_pages_total")
        self._fetch_seconds = metrics.histogram("kvpeer_fetch_seconds")
        self._failures = metrics.counter("kvpeer_agent_task_failures_total")
        self._pulls: set[asyncio.Task[NDArray[np.uint8]]] = set()

    async def answer(self, client: Client, message: ClientMessage, deadline: float) -> ClientMessage:
        """The answer to a request.

        Raises:
            RemoteProtocolError: the message is malformed or is no request of a client: drop it.
            CapacityError: the batch is too large, or the client has too many pins.
        """
        if isinstance(message, Locate):
            return await self._locate(client, message, deadline - ANSWER_MARGIN_S)
        if isinstance(message, Fetch):
            return await self._fetch(client, message, deadline - ANSWER_MARGIN_S)
        if isinstance(message, Reserve):
            return await self._reserve(client, message, deadline - ANSWER_MARGIN_S)
        if isinstance(message, Commit):
            return self._commit(client, message)
        if isinstance(message, Reset):
            await self._pool.reset(client.cohort, message.reason[:TEXT_CHARS_MAX], deadline - ANSWER_MARGIN_S)
            return Ok()
        raise RemoteProtocolError(f"{type(message).__name__} is not a request of a client")

    def notice(self, client: Client, message: ClientMessage) -> None:
        """Takes in a message that is not answered.

        Raises:
            RemoteProtocolError: as `answer`.
        """
        if isinstance(message, Release):
            bad_slots = unpack(message.bad_slots, U4, count(message.bad_slots, 4, "bad_slots"), "bad_slots")
            outcomes = unpack(message.bad_outcomes, U1, len(bad_slots), "bad_outcomes")
            corrupt = frozenset(bad_slots[outcomes == Outcome.CORRUPT].tolist())
            if corrupt:
                _log.error("client %s found %d corrupt pages in the own pool", client.name, len(corrupt))
            self._pool.release(client.number, message.pin, corrupt)
        elif isinstance(message, Abandon):
            n = count(message.slots, 4, "slots")
            slots = unpack(message.slots, U4, n, "slots")
            self._pool.abandon(client.number, slots, unpack(message.generations, U4, n, "generations"))
        elif isinstance(message, Traced):
            self._traces.told(client.cohort.namespace, message.traces, message.n_dropped, self._clock())
        else:
            raise RemoteProtocolError(f"{type(message).__name__} is not a notice of a client")

    # ---- one message each

    async def _locate(self, client: Client, message: Locate, deadline: float) -> Located:
        chain = self._chain(message)
        request = message.request[:TEXT_CHARS_MAX]
        began_at = self._clock()
        found = self._pool.find(chain.keys)
        statuses = found.resident.astype(np.uint8) * LOCATED_OWN
        missing = np.flatnonzero(~found.resident)
        reason, offered = "", []
        if len(missing):
            found_at_peers = await self._locator.locate(chain, missing, request, deadline)
            statuses[missing], reason = found_at_peers.statuses, found_at_peers.reason
            offered = offers_within(found_at_peers.offers, missing, len(chain))
        counts, now = np.bincount(statuses, minlength=len(LOCATE_OUTCOMES)).tolist(), self._clock()
        for outcome, n in zip(LOCATE_OUTCOMES, counts, strict=False):
            self._located.labels(outcome=outcome).inc(n)
        self._locate_seconds.observe(now - began_at)
        self._traces.located(request, client.cohort.namespace, chain.keys, counts, reason, offered, began_at, now)
        return Located(
            pack(statuses, U1),
            reason,
            b"".join(offer.producer for offer in offered),
            pack(np.array([offer.n_pages for offer in offered], dtype=np.uint32), U4),
            pack(np.array([offer.n_in_flight for offer in offered], dtype=np.uint32), U4),
        )

    async def _fetch(self, client: Client, message: Fetch, deadline: float) -> Fetched:
        chain, request = self._chain(message), message.request[:TEXT_CHARS_MAX]
        began_at = self._clock()
        found = self._pool.pin(client.number, chain.keys)
        outcomes = np.where(found.resident, Outcome.HIT, Outcome.MISS).astype(np.uint8)
        missing = np.flatnonzero(~found.resident)
        if len(missing):
            outcomes[missing] = await self._pull(client, chain, missing, request, deadline, _source_of(message))
            first_pin = found.pin
            try:
                # Pinned again as one: what was pulled may be evicted by now, and what was here may be withdrawn.
                found = self._pool.pin(client.number, chain.keys)
            finally:
                self._pool.release(client.number, first_pin)
            outcomes[(outcomes == Outcome.HIT) & ~found.resident] = Outcome.MISS
            outcomes[found.resident] = Outcome.HIT
        n_own, pulled, now = len(chain) - len(missing), self._count_fetched(outcomes, missing), self._clock()
        self._fetch_seconds.observe(now - began_at)
        self._traces.fetched(request, client.cohort.namespace, chain.keys, n_own, pulled, began_at, now)
        return Fetched(
            pack(outcomes, U1),
            pack(found.slots, U4),
            pack(found.generations, U4),
            pack(found.offsets, U8),
            found.pin,
            int(self._pool.pin_ttl_s * 1000),
        )

    def _count_fetched(self, outcomes: NDArray[np.uint8], pulled: NDArray[np.int64]) -> list[int]:
        """Counts each page once, by what the engine got; `pulled`: which were not in the own pool. Returns these by
        outcome."""
        self._fetched.labels(outcome="hit", transport="shm").inc(len(outcomes) - len(pulled))
        counts: list[int] = np.bincount(outcomes[pulled], minlength=len(Outcome)).tolist()
        for outcome, n in zip(Outcome, counts, strict=True):
            self._fetched.labels(outcome=outcome.name.lower(), transport="tcp").inc(n)
        return counts

    async def _pull(
        self,
        client: Client,
        chain: ChainSlice,
        missing: NDArray[np.int64],
        request: str,
        deadline: float,
        source: AgentId | None,
    ) -> NDArray[np.uint8]:
        """Pulls the missing pages. The pull itself goes on when the client goes away or the deadline passes: it is
        not ours alone."""
        pull = asyncio.ensure_future(self._puller.pull(client.cohort, chain, missing, request, deadline, source))
        self._pulls.add(pull)
        pull.add_done_callback(self._pulled)
        await asyncio.wait([pull], timeout=max(0.0, deadline - self._clock()))
        if pull.done() and not pull.cancelled() and pull.exception() is None:
            return pull.result()
        return np.full(len(missing), Outcome.TIMEOUT, dtype=np.uint8)

    def _pulled(self, pull: asyncio.Future[NDArray[np.uint8]]) -> None:
        self._pulls.discard(pull)
        error = None if pull.cancelled() else pull.exception()
        if isinstance(error, Exception):
            self._failures.labels(task="pull").inc()
            _log.error("a pull failed", exc_info=error)
            escalate(error)

    async def _reserve(self, client: Client, message: Reserve, deadline: float) -> Reserved:
        self._check_rank(client, message)
        chain = self._chain(message)
        reservation = await self._pool.reserve(client.number, client.cohort, client.part, chain, deadline)
        statuses = reservation.statuses
        statuses[statuses == ReserveStatus.BUSY] = ReserveStatus.PRESENT
        self._published.labels(outcome="present").inc(int((statuses == ReserveStatus.PRESENT).sum()))
        self._published.labels(outcome="refused").inc(int((statuses == ReserveStatus.NO_ROOM).sum()))
        return Reserved(
            pack(statuses, U1),
            pack(reservation.slots, U4),
            pack(reservation.generations, U4),
            pack(reservation.offsets, U8),
        )

    def _commit(self, client: Client, message: Commit) -> Committed:
        self._check_rank(client, message)
        n = count(message.slots, 4, "slots")
        accepted = self._pool.commit(
            client.number,
            client.cohort,
            client.part,
            unpack(message.slots, U4, n, "slots"),
            unpack(message.generations, U4, n, "generations"),
            unpack(message.checksums, U8, n, "checksums"),
        )
        self._published.labels(outcome="written").inc(int(accepted.sum()))
        return Committed(pack((~accepted).astype(np.uint8), U1))

    # ---- checks

    def _chain(self, message: Locate | Fetch | Reserve) -> ChainSlice:
        n = n_chain_keys(message.first, message.keys, message.anchors)
        if n > self._batch_pages_max:
            raise CapacityError(
                f"{n} pages in one request, but at most {self._batch_pages_max} (limits.batch_pages_max)"
            )
        _check_distinct(message.keys)
        return ChainSlice(message.first, message.keys, message.anchors)

    @staticmethod
    def _check_rank(client: Client, message: ClientMessage) -> None:
        if client.part < 0:
            raise RemoteProtocolError(f"a scheduler holds no part of a page and cannot send {type(message).__name__}")


def _source_of(message: Fetch) -> AgentId | None:
    if message.source and len(message.source) != AGENT_ID_BYTES:
        raise RemoteProtocolError(f"source: {len(message.source)} bytes, but an agent id has {AGENT_ID_BYTES}")
    return AgentId(message.source) if message.source else None


def _check_distinct(keys: bytes) -> None:
    """A page's key covers all pages before it, so that no chain has one twice; what follows here relies on that."""
    split = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
    if len(set(split)) != len(split):
        ((twice, _),) = Counter(split).most_common(1)
        raise RemoteProtocolError(f"keys: {twice.hex()} comes twice in one request")
