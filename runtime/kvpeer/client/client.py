"""`Client`: locate, fetch and publish pages through the agent of this pod or user.

Nothing that a peer, the agent or a deadline does raises out of these calls: what could not be had is a miss, and a
counter says why. Page bytes are moved by the engine's own process, between its memory and the mapped pool.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpeer.client.device import Copier, EngineLayout, NativeCopier, SlotPages
from kvpeer.client.embedded import ensure_agent
from kvpeer.client.link import AgentSilentError, Link
from kvpeer.client.session import CLOSE_WAIT_S, Session
from kvpeer.client.settings import ClientSettings, Registration
from kvpeer.core.chain import ChainSlice
from kvpeer.core.sources import Offer
from kvpeer.model import (
    AGENT_ID_BYTES,
    AgentId,
    CapacityError,
    KvPeerError,
    LocalProtocolError,
    Outcome,
    PeerUnavailableError,
    RemoteProtocolError,
)
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
    PolicyTold,
    Release,
    Reserve,
    Reserved,
    Reset,
    Traced,
)
from kvpeer.wire.packing import U1, U4, U8, count, pack, unpack

__all__ = ["Client", "LocateResult", "PublishResult"]

BATCH_PAGES_MAX = 256
"""Pages that one fetch or publish moves between two messages. An agent may allow fewer. Large enough that messages do
not count, small enough that pins are short and a deadline takes effect between two batches."""

COMMIT_TIMEOUT_S = 0.5
"""The commit of a copy that is done waits this long even if the deadline has passed: the work would be lost."""

RESET_TIMEOUT_S = 2.0
"""For the agent's word that everything is withdrawn."""

_WRITE, _PRESENT = 0, 1  # Reserved.statuses
_OWN_POOL = 1  # Located.statuses

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class LocateResult:
    """statuses, u8 [n]: 0 nowhere, 1 in the own pool, 2 at a peer. reason: why the rest is missing, from a closed
    list. offers: with one producer's pages and the own pool alone, how many of the first pages can be had."""

    statuses: npt.NDArray[np.uint8]
    reason: str
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True)
class PublishResult:
    """Pages whose part is in the pool now, pages that were there, and pages that found no room or came too late.

    is_there: bool [n], which pages are one of the first two.
    """

    n_written: int
    n_present: int
    n_refused: int
    is_there: npt.NDArray[np.bool_]


class Client:
    """One engine process's way to its agent; made by `connect`.

    Thread-safe: requests of several threads share one connection and do not wait for each other; each thread copies
    its own pages. `_counts_lock` protects the counters alone.
    """

    def __init__(self, session: Session, registration: Registration) -> None:
        self._session = session
        self._registration = registration
        self._copier: Copier | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counts_lock = threading.Lock()

    @classmethod
    def connect(cls, settings: ClientSettings, registration: Registration, wait_s: float | None = None) -> Client:
        """A client, connected or still connecting: blocks for `wait_s` at most (`settings.start_timeout_s` if that is
        None), and an agent that is not there yet is waited for in the background.

        Raises:
            ConfigError: there can be no agent as things are (packages are missing, the agent refuses this client);
            the message
                names the fix.
        """

        def find_socket(deadline: float) -> str:
            return settings.socket or ensure_agent(settings, deadline)

        session = Session(find_socket, registration, settings.start_timeout_s)
        try:
            session.wait_connected(settings.start_timeout_s if wait_s is None else wait_s)
        except KvPeerError:
            session.close()
            raise
        return cls(session, registration)

    def register_layout(self, layout: EngineLayout, copier: Copier | None = None) -> None:
        """Says where the engine's blocks are, once, before fetch and publish. A copier for a device may be given
        instead of copying by the CPU.

        Raises:
            LocalProtocolError: the layout's blocks are not as long as the registered part.
        """
        if layout.part_bytes != self._registration.part_bytes:
            raise LocalProtocolError(
                f"a block has {layout.part_bytes} bytes, but this part was registered with "
                f"{self._registration.part_bytes}"
            )
        self._copier = copier or NativeCopier(layout)

    @property
    def healthy(self) -> bool:
        """Whether there is an agent that answers. Never blocks."""
        return self._session.is_connected

    @property
    def policy(self) -> PolicyTold | None:
        """What the agent told last of the engine's policy; None: nothing yet. Never blocks."""
        return self._session.policy

    def counters(self) -> dict[tuple[str, str], int]:
        """Counts so far by (what, how it ended): pages located, fetched and published, and failures by reason."""
        with self._counts_lock:
            return dict(self._counts)

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Ends the connection. Blocks until running copies have ended, for `wait_s` at most; what has not ended by
        then does so by itself."""
        self._session.close(wait_s)

    # ---- what engines ask

    def locate(self, chain: ChainSlice, request: str, deadline_s: float) -> LocateResult:
        """Where these pages are. Blocks for `deadline_s` at most; what is not known by then is nowhere."""
        deadline = time.monotonic() + deadline_s
        statuses, reason, offers = np.zeros(len(chain), dtype=np.uint8), "", list[Offer]()
        try:
            with self._session.link() as link:
                for start, stop in _batches(len(chain), link.welcome.batch_pages_max):
                    part = chain.part(start, stop)
                    located = _ask(link, Locate(request, part.first, part.keys, part.anchors), Located, deadline)
                    statuses[start:stop] = unpack(located.statuses, U1, len(part), "statuses")
                    reason = reason or located.reason
                    is_resident = bool((statuses[:start] == _OWN_POOL).all())
                    offers = _extended(offers, _offers(located, len(part)), start, is_resident=is_resident)
        except KvPeerError as error:
            reason = self._failed("locate", error)
        self._count_values("located_pages", statuses, ("nowhere", "own_pool", "peer"))
        return LocateResult(statuses, reason, tuple(offers))

    def fetch(
        self,
        chain: ChainSlice,
        blocks: npt.NDArray[np.int64],
        request: str,
        deadline_s: float,
        copier: Copier | None = None,
        source: bytes = b"",
    ) -> npt.NDArray[np.uint8]:
        """The outcome of each page, u8 [n]; the block of a HIT holds this rank's part, the others hold anything.

        blocks: i8 [n]. copier: knows blocks other than those of the registered layout. source: the producer to ask
        first for what has to be pulled, or nothing. Blocks until everything is there or given up; when it returns
        nothing writes into the blocks any more. Waiting ends at the deadline; a copy that is running then is finished.
        """
        deadline = time.monotonic() + deadline_s
        outcomes = np.full(len(chain), Outcome.MISS, dtype=np.uint8)
        try:
            with self._session.link() as link:
                for start, stop in _batches(len(chain), min(BATCH_PAGES_MAX, link.welcome.batch_pages_max)):
                    outcomes[start:] = Outcome.TIMEOUT  # unless the batches say better
                    outcomes[start:stop] = self._fetch_batch(
                        link,
                        chain.part(start, stop),
                        blocks[start:stop],
                        request,
                        deadline,
                        copier or self._ready_copier(),
                        source,
                    )
        except AgentSilentError as error:
            self._failed("fetch", error)
        except KvPeerError as error:
            self._failed("fetch", error)
            outcomes[outcomes == Outcome.TIMEOUT] = Outcome.MISS
        self._count_values("fetched_pages", outcomes, tuple(outcome.name.lower() for outcome in Outcome))
        return outcomes

    def publish(
        self,
        chain: ChainSlice,
        blocks: npt.NDArray[np.int64],
        deadline_s: float,
        is_current: Callable[[], bool] = lambda: True,
        copier: Copier | None = None,
    ) -> PublishResult:
        """Copies this rank's part of these pages into the pool. Blocks; the blocks are not read any more when it
        returns.

        blocks: i8 [n]. is_current: asked after a copy; False means that the blocks were taken back meanwhile, and the
        copy is dropped. copier: as for `fetch`.
        """
        deadline = time.monotonic() + deadline_s
        written, present = np.zeros(len(chain), np.bool_), np.zeros(len(chain), np.bool_)
        try:
            with self._session.link() as link:
                for start, stop in _batches(len(chain), min(BATCH_PAGES_MAX, link.welcome.batch_pages_max)):
                    part = chain.part(start, stop)
                    written[start:stop], present[start:stop] = self._publish_batch(
                        link, part, blocks[start:stop], deadline, is_current, copier or self._ready_copier()
                    )
        except KvPeerError as error:
            self._failed("publish", error)
        n_written, n_present = int(written.sum()), int(present.sum())
        result = PublishResult(n_written, n_present, len(chain) - n_written - n_present, written | present)
        with self._counts_lock:
            self._counts["published_pages", "written"] += result.n_written
            self._counts["published_pages", "present"] += result.n_present
            self._counts["published_pages", "refused"] += result.n_refused
        return result

    def reset(self, reason: str) -> bool:
        """Withdraws every page of this client's namespace from the agent's pool; True when that is done."""
        try:
            with self._session.link() as link:
                _ask(link, Reset(reason), Ok, time.monotonic() + RESET_TIMEOUT_S)
        except KvPeerError as error:
            self._failed("reset", error)
            return False
        return True

    def tell(self, traces: Traced) -> bool:
        """Gives the agent what people may want to know of requests later; whether it was taken. Blocks for a second at
        most."""
        try:
            with self._session.link() as link:
                return link.tell(traces)
        except KvPeerError:
            return False

    # ---- one batch

    def _fetch_batch(
        self,
        link: Link,
        chain: ChainSlice,
        blocks: npt.NDArray[np.int64],
        request: str,
        deadline: float,
        copier: Copier,
        source: bytes,
    ) -> npt.NDArray[np.uint8]:
        n = len(chain)
        fetched = _ask(link, Fetch(request, chain.first, chain.keys, chain.anchors, source), Fetched, deadline)
        bad_slots, bad_outcomes = np.zeros(0, dtype=U4), np.zeros(0, dtype=U1)
        try:
            outcomes: npt.NDArray[np.uint8] = unpack(fetched.outcomes, U1, n, "outcomes").copy()
            hits = np.flatnonzero(outcomes == Outcome.HIT)
            if len(hits):
                pages = SlotPages(
                    np.frombuffer(chain.keys, dtype=np.uint8).reshape(n, -1)[hits].tobytes(),
                    unpack(fetched.slots, U4, n, "slots")[hits],
                    unpack(fetched.generations, U4, n, "generations")[hits],
                    unpack(fetched.offsets, U8, n, "offsets")[hits],
                )
                registration = self._registration
                copied = copier.scatter(
                    link.pool, pages, registration.part, registration.part_offset, blocks[hits], link.verify
                )
                outcomes[hits] = copied
                bad_slots, bad_outcomes = pages.slots[copied != Outcome.HIT], copied[copied != Outcome.HIT]
        finally:
            if fetched.pin:
                link.give_back(Release(fetched.pin, pack(bad_slots, U4), pack(bad_outcomes, U1)))
        return outcomes

    def _publish_batch(
        self,
        link: Link,
        chain: ChainSlice,
        blocks: npt.NDArray[np.int64],
        deadline: float,
        is_current: Callable[[], bool],
        copier: Copier,
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Returns which pages were written and which were there, bool [n] each."""
        n = len(chain)
        reserved = _ask(link, Reserve(chain.first, chain.keys, chain.anchors), Reserved, deadline)
        statuses = unpack(reserved.statuses, U1, n, "statuses")
        granted, present = statuses == _WRITE, statuses == _PRESENT
        written = np.zeros(n, np.bool_)
        if not granted.any():
            return written, present
        slots = unpack(reserved.slots, U4, n, "slots")[granted]
        generations = unpack(reserved.generations, U4, n, "generations")[granted]
        offsets = unpack(reserved.offsets, U8, n, "offsets")[granted]
        is_settled = False
        try:
            checksums = copier.gather(link.pool, offsets, self._registration.part_offset, blocks[granted])
            if not is_current():
                return written, present
            commit = Commit(pack(slots, U4), pack(generations, U4), pack(checksums, U8))
            committed = _ask(link, commit, Committed, max(deadline, time.monotonic() + COMMIT_TIMEOUT_S))
            is_settled = True
        finally:
            if not is_settled:  # harmless if the commit did arrive: it stands before this on the stream
                link.give_back(Abandon(pack(slots, U4), pack(generations, U4)))
        written[granted] = unpack(committed.statuses, U1, len(slots), "statuses") == 0
        return written, present

    def _ready_copier(self) -> Copier:
        if self._copier is None:
            raise LocalProtocolError("register_layout comes before fetch and publish")
        return self._copier

    # ---- counting

    def _failed(self, operation: str, error: KvPeerError) -> str:
        """Counts a failure; returns its reason."""
        reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "internal")
        with self._counts_lock:
            self._counts[f"failed_{operation}", reason] += 1
        return reason

    def _count_values(self, what: str, values: npt.NDArray[np.uint8], names: tuple[str, ...]) -> None:
        counts = np.bincount(values, minlength=len(names)).tolist()
        with self._counts_lock:
            for name, n in zip(names, counts, strict=False):
                if n:
                    self._counts[what, name] += n


_REASONS: tuple[tuple[type[KvPeerError], str], ...] = (
    (AgentSilentError, "agent_silent"),
    (PeerUnavailableError, "no_agent"),
    (CapacityError, "agent_busy"),
    (RemoteProtocolError, "protocol"),
)


def _offers(located: Located, n_pages: int) -> list[Offer]:
    n = count(located.producers, AGENT_ID_BYTES, "producers")
    reaches = np.minimum(unpack(located.reaches, U4, n, "reaches"), n_pages).tolist()
    in_flight = unpack(located.in_flight, U4, n, "in_flight").tolist()
    producers = [located.producers[at : at + AGENT_ID_BYTES] for at in range(0, n * AGENT_ID_BYTES, AGENT_ID_BYTES)]
    return [Offer(AgentId(who), *rest) for who, *rest in zip(producers, reaches, in_flight, strict=True)]


def _extended(offers: list[Offer], more: list[Offer], start: int, *, is_resident: bool) -> list[Offer]:
    """What is offered of a chain, once it is known what is offered of its pages from `start` on. is_resident: the own
    pool has all before; nobody was asked about them then, and every producer reaches as far."""
    if is_resident:
        return [replace(offer, n_pages=start + offer.n_pages) for offer in more]
    reaches = {offer.producer: offer.n_pages for offer in more}
    return [
        replace(offer, n_pages=start + reaches.get(offer.producer, 0)) if offer.n_pages == start else offer
        for offer in offers
    ]


def _batches(n: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, size):
        yield start, min(start + size, n)


def _ask(link: Link, message: ClientMessage, kind: type[_Answer], deadline: float) -> _Answer:
    answer = link.request(message, deadline)
    if not isinstance(answer, kind):
        raise RemoteProtocolError(f"the agent answered a {type(message).__name__} with a {type(answer).__name__}")
    return answer
