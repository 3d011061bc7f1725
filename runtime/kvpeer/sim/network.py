"""The network between hosts: loses, delays, overtakes, repeats and garbles frames, and can be cut in any direction.

Harsher than TCP, which keeps the order of one connection and loses nothing without ending it: here a frame may vanish
or come twice on a connection that lives. Whatever the machines stand here, they stand on TCP.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvpeer.sim.kernel import Action, Kernel
from kvpeer.sim.profile import Profile
from kvpeer.wire.framing import HEADER_BYTES

__all__ = ["Network"]

STALLED = 0.3
"""Of the frames that meet a cut, this share comes when the cut ends, as TCP does it; the others are lost, as when the
connection breaks first."""

HOST_DELAY_S = 0.0002
"""Between processes, at least."""


class Network:
    """Hosts are numbers. While not hostile, every frame arrives, soon, once and in order."""

    def __init__(self, kernel: Kernel, profile: Profile, rng: random.Random) -> None:
        self.is_hostile = True
        self.n_lost = 0
        self._kernel = kernel
        self._profile = profile
        self._rng = rng
        self._cut: dict[tuple[int, int], int] = {}  # how many partitions cut this direction
        self._stalled: dict[tuple[int, int], list[Action]] = {}
        self._slow: dict[int, float] = {}

    # ---- faults

    def cut(self, source: int, destination: int) -> None:
        """Nothing passes from source to destination until `mend`; cuts count."""
        self._cut[source, destination] = self._cut.get((source, destination), 0) + 1

    def mend(self, source: int, destination: int) -> None:
        """Ends one cut; with the last one, what was stalled arrives."""
        n = self._cut.get((source, destination), 0) - 1
        if n > 0:
            self._cut[source, destination] = n
            return
        self._cut.pop((source, destination), None)
        for action in self._stalled.pop((source, destination), []):
            self._kernel.at(self._kernel.now + self.delay(source, destination), action)

    def heal(self) -> None:
        """From now on nothing goes wrong."""
        self.is_hostile = False
        for source, destination in list(self._cut):
            self._cut[source, destination] = 1
            self.mend(source, destination)
        self._slow.clear()

    def slow_down(self, host: int, delay_s: float) -> None:
        """Everything that this host sends takes longer; 0 ends it."""
        self._slow.pop(host, None)
        if delay_s:
            self._slow[host] = delay_s

    # ---- what is sent

    def passes(self, source: int, destination: int) -> bool:
        """Whether this direction is not cut."""
        return (source, destination) not in self._cut

    def delay(self, source: int, destination: int) -> float:
        """How long something takes now."""
        if not self.is_hostile:
            return HOST_DELAY_S
        delay_s = HOST_DELAY_S + self._slow.get(source, 0.0) * (0.5 + self._rng.random())
        if self._rng.random() < self._profile.linger:
            return delay_s + self._rng.random() * self._profile.linger_s_max
        return delay_s + self._rng.expovariate(1 / self._profile.delay_s_mean)

    def carry(
        self, source: int, destination: int, frame: bytes, arrive: Callable[[bytes], None], broken: Action | None = None
    ) -> None:
        """Takes a frame from one host to another, as far as the weather allows. `broken` is called after a garbled one
        arrived: TLS ends a connection whose bytes were changed, TCP one that was cut."""
        if not self.is_hostile:
            self._kernel.at(self._kernel.now + HOST_DELAY_S, lambda: arrive(frame))
            return
        draw = self._rng.random()
        profile = self._profile
        if not self.passes(source, destination):
            if draw < STALLED:
                self._stalled.setdefault((source, destination), []).append(lambda: arrive(frame))
            else:
                self.n_lost += 1
            return
        draw -= profile.lose
        if draw < 0:
            self.n_lost += 1
            return
        draw -= profile.garble
        if draw < 0:
            frame = self._garbled(frame)
            if broken is not None:
                self._kernel.at(self._kernel.now + profile.linger_s_max, broken)
        copies = 2 if 0 <= draw < profile.repeat else 1
        for _ in range(copies):
            self._kernel.at(self._kernel.now + self.delay(source, destination), lambda: arrive(frame))

    def _garbled(self, frame: bytes) -> bytes:
        """Cut short, or with another header; TLS lets no other change pass."""
        if self._rng.random() < 0.5:
            return frame[: self._rng.randrange(len(frame))]
        changed = bytearray(frame)
        changed[self._rng.randrange(min(HEADER_BYTES, 8))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)
