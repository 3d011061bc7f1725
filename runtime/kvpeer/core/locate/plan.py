"""One batch's questions to the directory: who holds these pages?

Each key has a short list of owners to ask: those of the ring in order (this agent's own shard first, where it is one of
them), then those of the previous ring, which matter for a while after an epoch change. The first of every list is asked
at once, one message per distinct owner, all in parallel. A key moves on to its next owner only when the one before is
late, failed, or unsure; so a late or dead owner costs its own keys and no others. The first decisive answer counts:
holders, or a miss by an owner that is in sync.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from kvpeer.core.directory_stream import LOOKUP_KEYS_MAX
from kvpeer.core.locate.answers import Answers, checked
from kvpeer.core.locate.owners import Candidates, LocateRings
from kvpeer.core.reasons import MissReason
from kvpeer.model import KEY_BYTES, AgentId, LocalProtocolError, LookupStatus, RemoteProtocolError
from kvpeer.wire.messages import Holders, Lookup
from kvpeer.wire.packing import U2, pack

__all__ = ["Ask", "LocatePlan", "LocateQuestion", "LocateResult"]

_MISS, _RESIDENT, _AT_PEERS = 0, 1, 2
_REASONS = tuple(MissReason)
_CODES = {reason: code for code, reason in enumerate(_REASONS)}

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class LocateQuestion:
    """Pages to be found: packed keys, their partitions (u16 [n]) and which of them lie in the own pool (`resident`,
    bool [n]) or are not worth asking for (`negative`, bool [n], from the negative cache).

    Raises:
        LocalProtocolError: the lengths or types do not fit together.
    """

    keys: bytes
    partitions: npt.NDArray[np.uint16]
    resident: Mask
    negative: Mask

    def __post_init__(self) -> None:
        n = len(self.partitions)
        if self.partitions.dtype != U2 or self.resident.dtype != np.bool_ or self.negative.dtype != np.bool_:
            raise LocalProtocolError("partitions must be u2, resident and negative bool arrays")
        if len(self.keys) != n * KEY_BYTES or self.resident.shape != (n,) or self.negative.shape != (n,):
            raise LocalProtocolError(
                f"{n} partitions need {n * KEY_BYTES} bytes of keys and two masks of {n}, not {len(self.keys)}, "
                f"{self.resident.shape} and {self.negative.shape}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Send `message` to `owner` (or to the own shard, when the owner is this agent) and report what came of it.
    `indices`: which keys of the batch it asks for, in the order of the message."""

    number: int
    owner: AgentId
    indices: Indices
    message: Lookup


@dataclass(frozen=True, slots=True, eq=False)
class LocateResult:
    """statuses u8 [n]: 0 miss, 1 resident, 2 at peers. counts u8 [n]: holders of each key; holders HOLDER_DTYPE [sum of
    counts], key after key, whose `agent` indexes `agents`. `reasons`: how many keys are missing and why. `first_miss`:
    why the first one is."""

    statuses: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.uint8]
    holders: npt.NDArray[np.void]
    agents: tuple[AgentId, ...]
    reasons: dict[MissReason, int]
    first_miss: MissReason | None


@dataclass(slots=True)
class _Outstanding:
    ask: Ask
    hedge_at: float


class LocatePlan:
    """Asks for one batch. Call `start`, send the asks, report each with `answered` or `failed`, call `tick` at
    `next_wakeup`; each call returns more asks. Done at the latest with the first `tick` at or after the deadline. Not
    thread-safe; single use."""

    def __init__(self, question: LocateQuestion, rings: LocateRings, deadline: float, hedge_delay_s: float) -> None:
        n = len(question.partitions)
        self._question = question
        self._self_id = rings.self_id
        self._deadline = deadline
        self._hedge_delay_s = hedge_delay_s
        self._keys = np.frombuffer(question.keys, dtype=f"V{KEY_BYTES}")
        self._candidates = Candidates(question.partitions, rings)
        self._statuses = np.where(question.resident, _RESIDENT, _MISS).astype(np.uint8)
        self._is_open = ~question.resident
        # What keys are missing for when nobody can be asked at all.
        unaskable = MissReason.BREAKER_OPEN if rings.current.members else MissReason.NO_OWNER
        self._reasons = np.full(n, _CODES[unaskable], dtype=np.uint8)
        self._n_tried = np.zeros(n, dtype=np.intp)
        self._n_outstanding = np.zeros(n, dtype=np.intp)
        self._asks: dict[int, _Outstanding] = {}
        self._answers = Answers(n)
        self._close_unaskable(rings)
        self.n_asks = 0
        self.n_hedged = 0
        """Asks that were late, so that their keys moved on."""
        self.n_ignored = 0
        """Answers to no ask of this plan that is still open: duplicates, or later than everything."""
        self.n_garbled = 0
        """Answers that did not fit their ask."""

    @property
    def done(self) -> bool:
        return not np.count_nonzero(self._is_open)  # several times as fast as any() on so few bytes

    @property
    def next_wakeup(self) -> float:
        """When `tick` is due; infinite when done."""
        if self.done:
            return math.inf
        return min((outstanding.hedge_at for outstanding in self._asks.values()), default=self._deadline)

    @property
    def result(self) -> LocateResult:
        """What was found, once done.

        Raises:
            LocalProtocolError: not done yet.
        """
        if not self.done:
            raise LocalProtocolError("a locate has no result before it is done")
        missing = self._statuses == _MISS
        counts = np.bincount(self._reasons[missing], minlength=len(_REASONS)).tolist()
        reasons = {reason: n for reason, n in zip(_REASONS, counts, strict=True) if n}
        first_miss = _REASONS[self._reasons[missing.argmax()]] if reasons else None
        holder_counts, holders = self._answers.in_key_order()
        return LocateResult(self._statuses, holder_counts, holders, tuple(self._answers.agents), reasons, first_miss)

    def start(self, now: float) -> list[Ask]:
        """The first asks: one per distinct owner, at most one for each group of pages that share an anchor."""
        if self._expire(now):
            return []
        return self._ask_next(np.flatnonzero(self._is_open), now)

    def answered(self, ask: Ask, message: Holders, now: float) -> list[Ask]:
        """Takes an owner's answer; one that does not fit the ask counts as a failure of the owner."""
        if not self._end(ask):
            return []
        try:
            statuses, counts, holders = checked(message, len(ask.indices))
        except RemoteProtocolError:
            self.n_garbled += 1
            return self._move_on(ask, MissReason.GARBLED, now)
        indices = ask.indices
        awaited = self._is_open[indices]
        n_found = self._answers.add(indices, counts, holders, message.agents, awaited, self._self_id)
        is_found = awaited & (n_found > 0)
        self._statuses[indices[is_found]] = _AT_PEERS
        self._is_open[indices[is_found]] = False
        if is_found.all():
            return self._after(indices[:0], MissReason.UNSURE, now)
        is_unsure = awaited & (statuses == LookupStatus.UNSURE)
        self._close(indices[awaited & ~is_found & ~is_unsure], MissReason.MISS)
        return self._after(indices[is_unsure], MissReason.UNSURE, now)

    def failed(self, ask: Ask, now: float) -> list[Ask]:
        """The owner could not be asked, or did not answer."""
        if not self._end(ask):
            return []
        return self._move_on(ask, MissReason.FAILED, now)

    def tick(self, now: float) -> list[Ask]:
        """Moves keys of late owners on; at the deadline closes all that is open."""
        if self._expire(now):
            return []
        late: list[Indices] = []
        for outstanding in self._asks.values():
            if outstanding.hedge_at <= now:
                outstanding.hedge_at = self._deadline
                indices = outstanding.ask.indices
                waiting = indices[self._is_open[indices]]
                if len(waiting):
                    late.append(waiting)
        self.n_hedged += len(late)
        if not late:
            return []
        indices = np.concatenate(late)
        self._reasons[indices] = _CODES[MissReason.LATE]
        return self._ask_next(np.sort(indices).astype(np.intp), now)

    # ---- keys move on -------------------------------------------------------------------------------------------

    def _end(self, ask: Ask) -> bool:
        """Takes the ask off the list; False when it is not on it (any more)."""
        if self._asks.pop(ask.number, None) is None:
            self.n_ignored += 1
            return False
        self._n_outstanding[ask.indices] -= 1
        return True

    def _move_on(self, ask: Ask, reason: MissReason, now: float) -> list[Ask]:
        return self._after(ask.indices[self._is_open[ask.indices]], reason, now)

    def _after(self, indices: Indices, reason: MissReason, now: float) -> list[Ask]:
        """Asks the next owner of these open keys, unless another answer is still awaited for them."""
        if self._expire(now) or not len(indices):
            return []
        self._reasons[indices] = _CODES[reason]
        return self._ask_next(indices[self._n_outstanding[indices] == 0].astype(np.intp), now)

    def _ask_next(self, indices: npt.NDArray[np.intp], now: float) -> list[Ask]:
        """One ask per distinct next owner; keys that have no further owner and await no answer are missing."""
        if not len(indices):
            return []
        owners = self._candidates.next_of(indices, self._n_tried[indices])
        is_without = owners < 0
        if np.count_nonzero(is_without):
            without = indices[is_without]
            self._is_open[without[self._n_outstanding[without] == 0]] = False
            indices, owners = indices[~is_without], owners[~is_without]
        bounds = [0, len(owners)]
        sorted_indices: Indices = indices.astype(np.uint32)
        if np.count_nonzero(owners != owners[:1]):  # else one owner has them all, as with most short prompts
            by_owner = owners.argsort(kind="stable")
            sorted_indices, owners = sorted_indices[by_owner], owners[by_owner]
            bounds[1:1] = (np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()
        asks: list[Ask] = []
        for first, stop in pairwise(bounds):
            for start in range(first, stop, LOOKUP_KEYS_MAX):
                theirs = sorted_indices[start : min(start + LOOKUP_KEYS_MAX, stop)]
                asks.append(self._ask(self._candidates.agent(int(owners[first])), theirs, now))
        return asks

    def _ask(self, owner: AgentId, indices: Indices, now: float) -> Ask:
        message = Lookup(self._keys[indices].tobytes(), pack(self._question.partitions[indices], U2))
        ask = Ask(self.n_asks, owner, indices, message)
        self.n_asks += 1
        self._asks[ask.number] = _Outstanding(ask, min(now + self._hedge_delay_s, self._deadline))
        self._n_tried[indices] += 1
        self._n_outstanding[indices] += 1
        return ask

    # ---- keys are closed ----------------------------------------------------------------------------------------

    def _close(self, indices: Indices | Mask, reason: MissReason) -> None:
        self._reasons[indices] = _CODES[reason]
        self._is_open[indices] = False

    def _close_unaskable(self, rings: LocateRings) -> None:
        """Closes keys that are not to be asked for, or all when there is nobody to ask."""
        if self._question.negative.any():
            self._close(self._is_open & self._question.negative, MissReason.NEGATIVE)
        previous = rings.previous.members if rings.previous else ()
        if all(agent_id == rings.self_id for agent_id in chain(rings.current.members, previous)):
            self._close(self._is_open.copy(), MissReason.NO_MEMBERS)

    def _expire(self, now: float) -> bool:
        """At the deadline closes every key; True when this happened, or nothing was open any more."""
        if now >= self._deadline:
            self._close(self._is_open.copy(), MissReason.LATE)
        if self.done:
            self._asks.clear()
        return self.done
