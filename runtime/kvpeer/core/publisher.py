"""The producer's side of the directory: tells the owners what this agent's pool holds, and keeps them right.

The publisher has a table of all that it published (its registry) and a stream to each owner. A change goes to the
owners of its partition; an owner that is new somewhere gets those partitions whole; what was lost on the way is found
by comparing digests, when an owner asks for it and at intervals anyway. The agent itself is an owner like any other:
what is to be sent to it, the caller hands to its own shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.core.directory_stream import REPAIR_ENTRIES_MAX, OpColumns
from kvpeer.core.directory_table import ApplyResult, DirectoryTable, Op
from kvpeer.core.owner_stream import OWN_IDX, OwnerStream, StreamMessage
from kvpeer.core.ring import Ring
from kvpeer.model import KEY_BYTES, AgentId, LocalProtocolError, RemoteProtocolError, Tier
from kvpeer.wire.messages import Applied, DigestsChecked

__all__ = ["ANTI_ENTROPY_INTERVAL_S", "REGISTRY_PARTITION_RECORDS_MAX", "Publisher", "SendToOwner"]

ANTI_ENTROPY_INTERVAL_S = 30.0
"""Between two comparisons of everything with an owner. It bounds how long a difference that nobody noticed can last;
the cost is 14 bytes a partition."""

REGISTRY_PARTITION_RECORDS_MAX = REPAIR_ENTRIES_MAX
"""The limit with which the registry's table must be made: every partition fits one Repair. It must not make room: what
it dropped would stay with the owners."""


@dataclass(frozen=True, slots=True)
class SendToOwner:
    """Send this request to this agent (or to the own shard) and feed the outcome to `acknowledged` or `failed`."""

    owner: AgentId
    message: StreamMessage


class Publisher:
    """What one agent published, and the streams to the owners of it. Not thread-safe; no call blocks.

    Every method returns what is to be sent. For each `SendToOwner` the caller reports exactly one outcome.
    """

    def __init__(
        self,
        own_id: AgentId,
        registry: DirectoryTable,
        anti_entropy_interval_s: float = ANTI_ENTROPY_INTERVAL_S,
    ) -> None:
        """The registry is empty, made with REGISTRY_PARTITION_RECORDS_MAX, and from now on the publisher's own."""
        self.own_id = own_id
        self.n_not_published = 0
        self._registry = registry
        self._interval_s = anti_entropy_interval_s
        self._ring = Ring.build([])
        self._streams: dict[AgentId, OwnerStream] = {}
        self._compare_at: dict[AgentId, float] = {}
        self._sequence_floor = 0

    @property
    def streams(self) -> Mapping[AgentId, OwnerStream]:
        """The streams by owner, to look at: counters and whether they are idle."""
        return self._streams

    # ---- the pool --------------------------------------------------------------------------------------------------

    def published(
        self,
        keys: bytes,
        partitions: npt.NDArray[np.uint16],
        slots: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
        tier: Tier = Tier.HOST,
    ) -> list[SendToOwner]:
        """These pages (n packed keys) can be had from these slots. A page that was elsewhere has moved.

        Raises:
            LocalProtocolError: the columns have different lengths.
        """
        return self._changed(Op.PUT, keys, partitions, slots, generations, lengths, tier)

    def withdrawn(
        self,
        keys: bytes,
        partitions: npt.NDArray[np.uint16],
        slots: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
    ) -> list[SendToOwner]:
        """These pages are no longer in these slots. A page that was published again elsewhere stays published.

        Raises:
            LocalProtocolError: the columns have different lengths.
        """
        return self._changed(Op.REMOVE, keys, partitions, slots, generations, np.zeros_like(slots), Tier.HOST)

    # ---- the cluster -----------------------------------------------------------------------------------------------

    def ring_changed(self, ring: Ring, now: float) -> list[SendToOwner]:
        """From now on these are the owners; each gets what it gained."""
        self._ring = ring
        for owner in [owner for owner in self._streams if owner not in ring.members]:
            self._sequence_floor = max(self._sequence_floor, self._streams.pop(owner).sequence)
            del self._compare_at[owner]
        for owner in ring.members:
            if owner not in self._streams:
                # Above every number that was ever used: an owner that knew this producer before takes it as newer.
                self._streams[owner] = OwnerStream(self._sequence_floor)
                self._compare_at[owner] = now + self._interval_s * self._phase(owner)
            self._streams[owner].own(ring.owned_by(owner))
        return self._send_due()

    def acknowledged(
        self, owner: AgentId, sent: StreamMessage, answer: Applied | DigestsChecked, now: float
    ) -> list[SendToOwner]:
        """The owner answered this message. Answers to messages of a stream that is gone are ignored.

        Raises:
            RemoteProtocolError: it is not an answer to that message; the message will be sent again later.
        """
        stream = self._streams.get(owner)
        if stream is None or stream.outstanding is not sent:
            return []
        try:
            stream.answered(answer)
        except RemoteProtocolError:
            stream.failed(now)
            raise
        return self._next_of(owner)

    def failed(self, owner: AgentId, sent: StreamMessage, now: float) -> None:
        """There was no answer: `tick` sends the message again after a pause."""
        stream = self._streams.get(owner)
        if stream is not None and stream.outstanding is sent:
            stream.failed(now)

    def tick(self, now: float) -> list[SendToOwner]:
        """Sends again what failed, and starts comparisons that are due. To be called by `next_wakeup`."""
        effects = []
        for owner, stream in self._streams.items():
            if stream.outstanding is not None and stream.retry_at is not None and stream.retry_at <= now:
                stream.retry_at = None
                effects.append(SendToOwner(owner, stream.outstanding))
            if self._compare_at[owner] <= now:
                self._compare_at[owner] = now + self._interval_s
                stream.compare(stream.owned)
        return effects + self._send_due()

    def next_wakeup(self, now: float) -> float:
        """Returns when `tick` has something to do; `now` + the anti-entropy interval at the latest."""
        retries = [stream.retry_at for stream in self._streams.values() if stream.retry_at is not None]
        return min([*retries, *self._compare_at.values()], default=now + self._interval_s)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _changed(
        self,
        op: Op,
        keys: bytes,
        partitions: npt.NDArray[np.uint16],
        slots: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
        tier: Tier,
    ) -> list[SendToOwner]:
        n = len(partitions)
        if len(keys) != n * KEY_BYTES or not len(slots) == len(generations) == len(lengths) == n:
            raise LocalProtocolError(f"{n} partitions came with columns of other lengths")
        ops = OpColumns(
            ops=np.full(n, op, dtype=np.uint8),
            keys=np.frombuffer(keys, dtype=np.uint8).reshape(n, KEY_BYTES),
            partitions=partitions,
            slots=slots,
            generations=generations,
            lengths=lengths,
            tiers=np.full(n, tier, dtype=np.uint8),
        )
        results = self._registry.apply(OWN_IDX, *ops.columns())
        self.n_not_published += int((results >= ApplyResult.FULL).sum())
        ops = ops.select(results == ApplyResult.APPLIED)
        owners = self._ring.owners(ops.partitions)
        for idx in np.unique(owners[owners >= 0]).tolist():
            self._streams[self._ring.members[idx]].enqueue(ops.select((owners == idx).any(axis=1)))
        return self._send_due()

    def _send_due(self) -> list[SendToOwner]:
        return [effect for owner in self._streams for effect in self._next_of(owner)]

    def _next_of(self, owner: AgentId) -> list[SendToOwner]:
        message = self._streams[owner].next_message(self._registry)
        return [] if message is None else [SendToOwner(owner, message)]

    def _phase(self, owner: AgentId) -> float:
        """A fraction that differs between pairs of agents, so that comparisons spread over the interval."""
        return ((int.from_bytes(self.own_id[:4], "big") ^ int.from_bytes(owner[:4], "big")) + 1) / 2**32
