"""What all parts of one run share: time, network, randomness, the trace, and the list of broken promises."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from kvpeer.core.ring import Ring
from kvpeer.core.slot_effects import Published
from kvpeer.model import KEY_BYTES, AgentId
from kvpeer.sim.kernel import Action, Kernel
from kvpeer.sim.links import Listeners
from kvpeer.sim.network import Network
from kvpeer.sim.profile import Profile
from kvpeer.sim.trace import Trace
from kvpeer.sim.transfer import Servers

__all__ = ["VIOLATIONS_MAX", "World"]

VIOLATIONS_MAX = 20
"""Of one run; the first ones tell the most."""

PAST_MAX = 400
"""Locations of one run: some times the slots of its pool."""

Location = tuple[bytes, int, int, int]
"""key, partition, slot, generation"""


class World:
    """One run. Nothing in it comes from outside but the seed and the profile."""

    def __init__(self, seed: int, profile: Profile) -> None:
        self.seed = seed
        self.profile = profile
        self.rng = random.Random(seed)  # noqa: S311 - a run must repeat
        self.kernel = Kernel()
        self.network = Network(self.kernel, profile, random.Random(self.rng.random()))  # noqa: S311
        self.listeners = Listeners()
        self.servers = Servers()
        self.trace = Trace()
        self.names: dict[AgentId, str] = {}
        self.violations: list[str] = []
        self.tainted: set[tuple[AgentId, int, int]] = set()
        """(run, slot, generation) whose bytes were changed on purpose."""
        self.liars: set[AgentId] = set()
        """Runs that served wrong bytes on purpose at some time."""
        self.past: dict[AgentId, deque[Location]] = {}
        """Where the pages of each run were, the latest last."""
        self._rings: dict[frozenset[AgentId], Ring] = {}

    @property
    def is_hostile(self) -> bool:
        return self.network.is_hostile

    def later(self, delay_s: float, action: Action) -> None:
        """Runs the action after this time."""
        self.kernel.at(self.kernel.now + delay_s, action)

    def note(self, kind: str, *details: object) -> None:
        """Puts an event into the trace."""
        self.trace.add(self.kernel.now, kind, *details)

    def violate(self, promise: str, *details: object) -> None:
        """A promise was broken."""
        self.note("VIOLATION", promise, *details)
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{self.kernel.now:.3f} s: {promise}: {' '.join(map(str, details))}")

    def buggify(self) -> bool:
        """Whether to do the rare thing here."""
        return self.is_hostile and self.rng.random() < self.profile.buggify

    def ring_of(self, members: Iterable[AgentId]) -> Ring:
        """The ring of these members. It depends on nothing else, so agents share what one of them computed."""
        key = frozenset(members)
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = Ring.build(key)
        return ring

    def published(self, producer: AgentId, effect: Published) -> None:
        """Remembers where the pages are."""
        keys = [effect.keys[at : at + KEY_BYTES] for at in range(0, len(effect.keys), KEY_BYTES)]
        columns = (effect.partitions.tolist(), effect.slots.tolist(), effect.generations.tolist())
        past = self.past.setdefault(producer, deque(maxlen=PAST_MAX))
        past.extend(zip(keys, *columns, strict=True))

    def corrupt_page_found(self, producer: AgentId, slot: int, generation: int, reader: str) -> None:
        """A reader found wrong bytes under a valid header: only what was changed on purpose may be so."""
        self.note("corrupt", reader, self.names.get(producer, "?"), slot, generation)
        is_explained = producer in self.liars or (producer, slot, generation) in self.tainted
        # A device that copies on while its agent's clock leaps is not stopped by the grace after its engine's death.
        if not is_explained and not self.profile.clock_jumps:
            self.violate("corrupt without a cause", reader, self.names.get(producer, "?"), slot, generation)
