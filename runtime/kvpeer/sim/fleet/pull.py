"""A pull: pages of a prefix from a peer's host pool into the own one, over lines that carry one pull at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvpeer.sim.fleet.cache import PrefixCache
from kvpeer.sim.fleet.profile import EngineProfile, LinkProfile
from kvpeer.sim.kernel import Kernel

__all__ = ["End", "Line", "Pull"]


@dataclass(slots=True)
class Line:
    """What a host sends and receives goes one pull after the other, each at the speed that one alone was measured to
    have: nothing published says that several together are faster. `slowness`: so many times as long as usual."""

    sends_until: float = 0.0
    receives_until: float = 0.0
    slowness: float = 1.0


class End(Protocol):
    """An engine, as a pull sees it."""

    profile: EngineProfile
    host: PrefixCache
    line: Line

    def between_steps(self, action: Callable[[], None]) -> None: ...


@dataclass(slots=True, eq=False)
class Pull:
    """From `first_tokens` on to `goal_tokens` of the prefix. `on_ended` is called once, between two steps of the
    reader, with the tokens that came in time."""

    kernel: Kernel
    link: LinkProfile
    reader: End
    source: End
    prefix: str
    first_tokens: int
    goal_tokens: int
    on_ended: Callable[[int], None]
    _is_over: bool = field(default=False)

    def begin(self, wait_s: float) -> None:
        """Asks the source; what has not come after `wait_s` is given up."""
        self.kernel.at(self.kernel.now + wait_s, lambda: self._end(0))
        if self.link.by_engines:
            # The lookup, its answer, and the order to send are each handled between two steps.
            self.source.between_steps(lambda: self.reader.between_steps(lambda: self.source.between_steps(self._send)))
        else:
            self._send()

    def _send(self) -> None:
        """The source reads what it still has, and sends it when its line is free."""
        self.source.host.touch(self.prefix)
        n_tokens = max(0, min(self.goal_tokens, self.source.host.tokens(self.prefix)) - self.first_tokens)
        usual_s = n_tokens * self.reader.profile.kv_bytes_per_token * self.link.s_per_byte
        line = self.source.line
        line.sends_until = max(self.kernel.now, line.sends_until) + usual_s * line.slowness
        self.kernel.at(line.sends_until, lambda: self._receive(n_tokens, usual_s))

    def _receive(self, n_tokens: int, usual_s: float) -> None:
        """All is sent. It is received by now too, unless the reader's line is slower or had other pulls to receive."""
        line = self.reader.line
        line.receives_until = max(self.kernel.now - usual_s, line.receives_until) + usual_s * line.slowness
        over_at = max(self.kernel.now, line.receives_until)
        self.kernel.at(over_at + self.link.floor_s, lambda: self._sent(n_tokens))

    def _sent(self, n_tokens: int) -> None:
        if n_tokens:
            self.reader.host.put(self.prefix, self.first_tokens + n_tokens)
        if self.link.by_engines:
            self.source.between_steps(lambda: self._end(n_tokens))
        else:
            self._end(n_tokens)

    def _end(self, n_tokens: int) -> None:
        if not self._is_over:
            self._is_over = True
            self.reader.between_steps(lambda: self.on_ended(n_tokens))
