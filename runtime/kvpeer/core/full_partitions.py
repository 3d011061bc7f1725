"""Which partitions of a shard are short of room, and whose entries they keep out.

The digests of a producer that has entries kept out differ from the shard's for good. They are not repaired at every
comparison, because a repair sends all that the producer has in the partition, and would be in vain. A producer is worth
another try when the partition has room again, or when it withdrew half of what it had there and so is below its share.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpeer.core.directory_table import U2, DirectoryTable
from kvpeer.model import N_PARTITIONS

__all__ = ["ROOM_DIVISOR", "FullPartitions"]

ROOM_DIVISOR = 8
"""A partition has room again when an eighth of its places is free. If one were enough, every page that is evicted would
bring a repair of the whole partition by every producer that has something kept out."""

_NOTHING = -1


class FullPartitions:
    """Producers by their indices in the table. Not thread-safe. 16 kB for each producer that has something kept out."""

    def __init__(self, table: DirectoryTable) -> None:
        self._table = table
        self._records_max_with_room = table.partition_records_max - max(1, table.partition_records_max // ROOM_DIVISOR)
        self._is_short = np.zeros(N_PARTITIONS, dtype=np.bool_)
        # By producer and partition: its entries there when some were last kept out, or _NOTHING.
        self._n_left: dict[int, npt.NDArray[np.int32]] = {}

    def keeps_out(self, producer: int, partitions: U2) -> npt.NDArray[np.bool_]:
        """In which of these partitions a limit keeps some of the producer's entries out."""
        n_left = self._n_left.get(producer)
        return np.zeros(len(partitions), dtype=np.bool_) if n_left is None else n_left[partitions] != _NOTHING

    def keep_out(self, producer: int, partitions: U2) -> None:
        """Some of the producer's entries are not, or no longer, in these partitions."""
        if len(partitions):
            if producer not in self._n_left:
                self._n_left[producer] = np.full(N_PARTITIONS, _NOTHING, dtype=np.int32)
            self._n_left[producer][partitions] = self._table.digests(producer, partitions)[1]
            self._is_short[partitions] = True

    def note_dropped(self) -> None:
        """Keeps out what the table's latest change dropped to make room."""
        producers, partitions = self._table.dropped()
        for producer in np.unique(producers).tolist():
            self.keep_out(producer, np.unique(partitions[producers == producer]))

    def admit(self, producer: int, partitions: U2 | slice) -> None:
        """Nothing of the producer is kept out of these partitions, or it is worth another try."""
        if producer in self._n_left:
            self._n_left[producer][partitions] = _NOTHING

    def withdrawn(self, producer: int, partitions: U2) -> None:
        """The producer took entries out of these partitions."""
        self.freed(partitions)
        if producer in self._n_left:
            n_left = self._n_left[producer]
            partitions = np.unique(partitions[n_left[partitions] != _NOTHING])
            self.admit(producer, partitions[2 * self._table.digests(producer, partitions)[1] <= n_left[partitions]])

    def freed(self, partitions: U2) -> None:
        """Entries went from these partitions: where there is room now, everybody may try again."""
        short = np.unique(partitions[self._is_short[partitions]])
        roomy = short[self._table.n_records(short) <= self._records_max_with_room]
        if len(roomy):
            self._is_short[roomy] = False
            for n_left in self._n_left.values():
                n_left[roomy] = _NOTHING

    def forget(self, producer: int) -> None:
        """The index belongs to nobody, or to another producer from now on."""
        self._n_left.pop(producer, None)
