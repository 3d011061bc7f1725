"""The pages that a device or a host pool holds, prefix by prefix: the least recently used go first, from their ends."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["PrefixCache"]


@dataclass(slots=True)
class _Entry:
    """`room_tokens` are allocated, the first `filled_tokens` of them computed or loaded."""

    room_tokens: int = 0
    filled_tokens: int = 0
    n_pins: int = 0


class PrefixCache:
    """Tokens by prefix, at most `capacity_tokens` together. A request pins what it uses; the rest may be evicted.

    Engines free the pages of a request from its end, so that a prefix which lost pages is still a prefix.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self.pinned_tokens = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def tokens(self, prefix: str) -> int:
        """How many leading tokens of the prefix can be read."""
        entry = self._entries.get(prefix)
        return entry.filled_tokens if entry is not None else 0

    def touch(self, prefix: str) -> None:
        """Somebody uses it."""
        if prefix in self._entries:
            self._entries.move_to_end(prefix)

    def reserve(self, prefix: str, n_tokens: int) -> bool:
        """Allocates and pins the first tokens of a prefix; False, and nothing is changed, where pinned pages leave no
        room. `release` undoes the pin."""
        entry = self._entries.get(prefix) or _Entry()
        extra_tokens = max(0, n_tokens - entry.room_tokens)
        own_pinned_tokens = entry.room_tokens if entry.n_pins else 0
        if self.pinned_tokens - own_pinned_tokens + entry.room_tokens + extra_tokens > self.capacity_tokens:
            return False
        self._entries[prefix] = entry
        self._entries.move_to_end(prefix)
        entry.n_pins += 1
        self._evict(self.used_tokens + extra_tokens - self.capacity_tokens)
        entry.room_tokens += extra_tokens
        self.used_tokens += extra_tokens
        self.pinned_tokens += entry.room_tokens - own_pinned_tokens
        return True

    def fill(self, prefix: str, n_tokens: int) -> None:
        """The first tokens of a reserved prefix are there now."""
        entry = self._entries[prefix]
        entry.filled_tokens = max(entry.filled_tokens, min(n_tokens, entry.room_tokens))

    def release(self, prefix: str) -> None:
        """Takes a pin back; with the last one, what was not filled is given back too."""
        entry = self._entries[prefix]
        entry.n_pins -= 1
        if entry.n_pins == 0:
            self.pinned_tokens -= entry.room_tokens
            self._shrink(prefix, entry, entry.filled_tokens)
            self.touch(prefix)

    def put(self, prefix: str, n_tokens: int) -> None:
        """The first tokens of the prefix are there from now on, as long as nothing newer needs the room."""
        n_tokens = min(n_tokens, self.capacity_tokens)
        if n_tokens and self.reserve(prefix, n_tokens):
            self.fill(prefix, n_tokens)
            self.release(prefix)

    def _evict(self, n_tokens: int) -> None:
        while n_tokens > 0:
            prefix, entry = next(item for item in self._entries.items() if not item[1].n_pins)
            kept_tokens = max(0, entry.room_tokens - n_tokens)
            n_tokens -= entry.room_tokens - kept_tokens
            self._shrink(prefix, entry, kept_tokens)

    def _shrink(self, prefix: str, entry: _Entry, room_tokens: int) -> None:
        self.used_tokens -= entry.room_tokens - room_tokens
        entry.room_tokens = room_tokens
        entry.filled_tokens = min(entry.filled_tokens, room_tokens)
        if not room_tokens:
            del self._entries[prefix]
