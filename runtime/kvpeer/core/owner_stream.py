"""A producer's stream to one owner: what it still has to say, and in which order.

Three things can be due. *Ops* wait in a bounded queue. Partitions *to send* are those whose content at the owner is
unknown (the owner is new there, or digests differed, or the queue overflowed): all entries are sent, and ops for them
are not queued, because what is sent covers them. Partitions *to compare* are checked by digests first.

At most one message is outstanding, and it is sent again unchanged until it is answered. So numbers are given when a
message is made, and the owner sees them without gaps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpeer.core.directory_stream import APPLY_OPS_MAX, OpColumns, pack_apply, pack_repair
from kvpeer.core.directory_table import DirectoryTable
from kvpeer.model import N_PARTITIONS, RemoteProtocolError
from kvpeer.wire import packing
from kvpeer.wire.messages import Applied, Apply, Digests, DigestsChecked, Repair, Synced

__all__ = ["OWN_IDX", "QUEUE_OPS_MAX", "RETRY_MAX_S", "OwnerStream", "StreamMessage"]

QUEUE_OPS_MAX = 65_536
"""Ops that wait for one owner: 2 MB, eight full messages. An owner that is further behind gets whole partitions
instead."""

DIGESTS_MAX = 1024
"""Partitions of one Digests: 14 kB; one message covers an owner in a cluster of eight and more."""

RETRY_MIN_S = 0.05
RETRY_MAX_S = 5.0
"""Pause before a failed message is sent again: doubles from the first to the second. A link that broke once is back
within milliseconds; an owner that is gone leaves the ring within seconds."""

OWN_IDX = 0
"""The agent index of the producer in its own table."""

StreamMessage = Apply | Repair | Synced | Digests

_Flags = npt.NDArray[np.bool_]


class OwnerStream:
    """The state towards one owner. Not thread-safe.

    Attributes:
        sequence: the number that the next message takes.
        owned: the partitions that the owner has in the producer's ring, bool [N_PARTITIONS].
        outstanding: the message that waits for an answer.
        retry_at: when the outstanding message is to be sent again; None while an answer is awaited.
        n_overflows, n_failures: counters.
    """

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.owned: _Flags = np.zeros(N_PARTITIONS, dtype=np.bool_)
        self.outstanding: StreamMessage | None = None
        self.retry_at: float | None = None
        self.n_overflows = 0
        self.n_failures = 0
        self._n_failures_in_a_row = 0
        self._queue: list[OpColumns] = []
        self._n_queued = 0
        self._to_send: _Flags = np.zeros(N_PARTITIONS, dtype=np.bool_)
        self._to_compare: _Flags = np.zeros(N_PARTITIONS, dtype=np.bool_)
        self._ops_were_last = False
        self._may_be_due = False  # False after a look at all partitions found nothing, until something changes

    # ---- what becomes due ------------------------------------------------------------------------------------------

    def own(self, owned: _Flags) -> None:
        """The owner has these partitions from now on; gained ones are to be sent."""
        gained = owned & ~self.owned
        self.owned = owned
        self._may_be_due = True
        self._to_compare &= owned
        self._to_send = (self._to_send | gained) & owned
        self._keep_queued(owned & ~self._to_send)

    def enqueue(self, ops: OpColumns) -> None:
        """Queues ops for partitions that the owner has; beyond QUEUE_OPS_MAX, their partitions are to be sent."""
        self._may_be_due = True
        ops = ops.select(~self._to_send[ops.partitions])
        self._queue.append(ops)
        self._n_queued += len(ops)
        if self._n_queued > QUEUE_OPS_MAX:
            self.n_overflows += 1
            for part in self._queue:
                self._to_send[part.partitions] = True
            self._keep_queued(~self._to_send)

    def compare(self, partitions: _Flags) -> None:
        """These partitions, as far as the owner has them, are to be compared."""
        self._may_be_due = True
        self._to_compare |= partitions & self.owned

    @property
    def is_idle(self) -> bool:
        """Nothing is outstanding or due: the owner has all of the producer's entries, as far as is known here."""
        return (
            self.outstanding is None and not self._n_queued and not self._to_send.any() and not self._to_compare.any()
        )

    # ---- messages --------------------------------------------------------------------------------------------------

    def next_message(self, registry: DirectoryTable) -> StreamMessage | None:
        """Makes the next message outstanding and returns it; None while one is outstanding, or when nothing is due.

        Ops and the rest take turns, so that neither waits for the end of the other.
        """
        if self.outstanding is not None or not self._may_be_due:
            return None
        ops_first = not self._ops_were_last
        for is_ops in (ops_first, not ops_first):
            message = self._next_ops() if is_ops else self._next_partitions(registry)
            if message is not None:
                self._ops_were_last = is_ops
                self.outstanding = message
                self.retry_at = None
                return message
        self._may_be_due = False
        return None

    def answered(self, answer: Applied | DigestsChecked) -> None:
        """Takes the answer to the outstanding message.

        Raises:
            RemoteProtocolError: it is not an answer to that message. The message is still outstanding.
        """
        if isinstance(self.outstanding, Digests) != isinstance(answer, DigestsChecked):
            raise RemoteProtocolError(f"{type(answer).__name__} is no answer to {type(self.outstanding).__name__}")
        if isinstance(answer, Applied) and answer.next_sequence != self.sequence:
            raise RemoteProtocolError(
                f"the owner expects number {answer.next_sequence} after a message that ends before {self.sequence}"
            )
        if isinstance(answer, Applied):
            self.compare(_flags(answer.repair) & ~self._to_send)
        else:
            self._to_send |= _flags(answer.differing) & self.owned
            self._keep_queued(~self._to_send)
        self.outstanding = None
        self._n_failures_in_a_row = 0

    def failed(self, now: float) -> None:
        """The outstanding message got no answer: it is sent again after a pause."""
        self.n_failures += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(self._n_failures_in_a_row, 16))
        self._n_failures_in_a_row += 1

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _next_ops(self) -> StreamMessage | None:
        if not self._n_queued:
            return None
        queued = OpColumns.join(self._queue)
        ops, rest = queued.select(slice(APPLY_OPS_MAX)), queued.select(slice(APPLY_OPS_MAX, None))
        self._queue, self._n_queued = [rest], len(rest)
        return pack_apply(self._take_numbers(len(ops)), ops)

    def _next_partitions(self, registry: DirectoryTable) -> StreamMessage | None:
        if self._to_send.any():
            return self._send_some(registry)
        comparable = self._to_compare.copy()
        for part in self._queue:
            comparable[part.partitions] = False
        if comparable.any():
            partitions = np.flatnonzero(comparable)[:DIGESTS_MAX].astype(np.uint16)
            self._to_compare[partitions] = False
            digests, counts = registry.digests(OWN_IDX, partitions)
            return Digests(partitions.tobytes(), digests.tobytes(), counts.tobytes())
        return None

    def _send_some(self, registry: DirectoryTable) -> StreamMessage:
        """One partition with entries, or all empty ones together."""
        partitions = np.flatnonzero(self._to_send).astype(np.uint16)
        _, counts = registry.digests(OWN_IDX, partitions)
        if counts.any():
            partition = int(partitions[counts > 0][0])
            self._to_send[partition] = self._to_compare[partition] = False
            return pack_repair(self._take_numbers(1), partition, registry.dump(OWN_IDX, partition))
        self._to_compare[partitions] = False
        self._to_send[:] = False
        return Synced(self._take_numbers(1), partitions.tobytes())

    def _take_numbers(self, n: int) -> int:
        first = self.sequence
        self.sequence += n
        return first

    def _keep_queued(self, partitions: _Flags) -> None:
        self._queue = [part.select(partitions[part.partitions]) for part in self._queue]
        self._n_queued = sum(map(len, self._queue))


def _flags(partitions: bytes) -> _Flags:
    flags = np.zeros(N_PARTITIONS, dtype=np.bool_)
    n = packing.count(partitions, packing.U2.itemsize, "partitions")
    flags[packing.unpack_partitions(partitions, n)] = True
    return flags
