"""One simulated agent: the real machines of `core`, wired as `agent/main.py` wires them."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.breaker import Breakers
from kvpeer.core.chain import ChainSlice
from kvpeer.core.membership import MembersChanged, Membership, MembershipSettings
from kvpeer.core.negative import NegativeCache
from kvpeer.core.producers import Producers
from kvpeer.core.pull import Pulls, ReportCorrupt, ReportStale, Touched
from kvpeer.core.slot_effects import Found, Published, Withdrawn
from kvpeer.core.view import ClusterView
from kvpeer.model import AGENT_ID_BYTES, AgentId, Outcome
from kvpeer.sim.directory import Directory
from kvpeer.sim.kernel import Process
from kvpeer.sim.links import Handlers, Links
from kvpeer.sim.membership import MembershipService, Seed
from kvpeer.sim.pool import Cohort, Pool
from kvpeer.sim.reading import Locator, Puller, Services
from kvpeer.sim.transfer import Answer, DataPeers, DataServer
from kvpeer.sim.world import World
from kvpeer.wire.messages import AgentInfo, Holders, PeerMessage, Touch
from kvpeer.wire.packing import U4, count, pack, unpack

__all__ = ["Agent", "Lies", "control_address"]

LEAVE_S = 2.0
"""For the last messages of an agent that leaves."""

TOUCH_INTERVAL_S = 1.0

MEMBERSHIP = MembershipSettings(probe_interval_s=0.5)
"""The defaults, but fewer pings, which are most of a calm run's events. With 16 agents somebody still probes each one
every half second."""

LOCATED_OWN = 1


class Lies(Protocol):
    """What a lying agent says instead; both leave an honest agent's words as they are."""

    def page(self, host: int, answer: Answer, run_id: AgentId) -> Answer: ...
    def holders(self, host: int, answer: Holders) -> Holders: ...


def control_address(host: int) -> Seed:
    """Where the agent of this host listens, whichever run it is."""
    return f"10.0.0.{host}", 7000


class Agent:
    """One run of an agent on a host. `n_runs` counts its runs for names in the trace."""

    def __init__(self, world: World, host: int, n_runs: int, lies: Lies) -> None:
        self.world = world
        self.host = host
        self.rng = random.Random(world.rng.random())  # noqa: S311 - seeded: the run must repeat
        self.agent_id = AgentId(self.rng.randbytes(AGENT_ID_BYTES))
        self.name = f"agent-{host}.{n_runs}"
        self.process = Process(world.kernel, self.name)
        address, port = control_address(host)
        self.info = AgentInfo(self.agent_id, self.name, address, port, port + 1)
        world.names[self.agent_id] = self.name
        self.links = Links(self.info, host, self.process, world.network, world.listeners, self, self.rng)
        self._touched: dict[AgentId, list[tuple[NDArray[np.uint32], NDArray[np.uint32]]]] = {}
        self._build(lies)

    def _build(self, lies: Lies) -> None:
        world, process, links = self.world, self.process, self.links
        self.view = ClusterView(self.info, world.ring_of)
        self.directory = Directory(self.agent_id, process, links, lambda answer: lies.holders(self.host, answer))
        self.pool = Pool(self.agent_id, world.profile.n_extents, process, self, self.rng)
        seeds = [control_address(host) for host in range(min(3, world.profile.n_agents))]
        machine = Membership(self.info, MEMBERSHIP, self.rng, process.clock())
        self.membership = MembershipService(machine, process, links, seeds, self._members_changed)
        self.lookups, self.fetches = Breakers(), Breakers()
        self.server = DataServer(
            self.agent_id, self.host, self.pool.memory, process, self.rng,
            lambda answer, run_id: lies.page(self.host, answer, run_id),
        )  # fmt: skip
        world.servers.listen(self.info, self.server)
        self.peers = DataPeers(self.agent_id, self.host, self.pool.memory, process, links, self.view, world.servers)
        producers = Producers(self.view, self.fetches, NegativeCache(), self.peers.in_flight)
        self.locator = Locator(process, self.directory, self.lookups, producers)
        services = Services(process, self.pool, self.locator, self.peers, self._tell)
        self.puller = Puller(services, Pulls(producers, self.locator.recent))

    def start(self) -> None:
        """Begins to serve."""
        self.links.handlers = {
            **self.directory.handlers(),
            **self.membership.handlers(),
            **self.server.handlers(),
            **self._touch_handlers(),
        }
        self.directory.members_changed(self.view.ring, self.view.alive)
        self.pool.start()
        self.membership.start()
        self.directory.start()
        self.process.spawn(self._send_touches())

    def kill(self) -> None:
        """SIGKILL: its kernel resets every connection that it can tell."""
        self.process.kill()
        for peer in self.links.peers.values():
            for link in peer.links:
                if link.other is not None and self.world.network.passes(self.host, link.other.links.host):
                    self.world.later(self.world.network.delay(self.host, link.other.links.host), link.other.reset)
        for connection in list(self.server.connections):
            self.world.later(self.world.network.delay(self.host, self.host), connection.close)

    def begin_leaving(self) -> None:
        """SIGTERM: tells the others, sends what is queued, ends."""
        self.process.spawn(self._leave())

    async def _leave(self) -> None:
        self.membership.drain()
        await self.process.sleep(LEAVE_S / 2)
        self.membership.leave()
        await self.process.sleep(LEAVE_S / 2)
        self.world.later(0.0, self.kill)

    # ---- what engines ask, as `agent/requests.py`

    async def locate(self, chain: ChainSlice, request: str, deadline: float) -> NDArray[np.uint8]:
        """For each page 0 missing, 1 in the own pool, 2 at peers."""
        found = self.pool.find(chain.keys)
        statuses = found.resident.astype(np.uint8) * LOCATED_OWN
        missing = np.flatnonzero(~found.resident)
        if len(missing):
            statuses[missing] = await self.locator.locate(chain, missing, request, deadline)
        return statuses

    async def fetch(
        self, client: int, cohort: Cohort, chain: ChainSlice, request: str, deadline: float
    ) -> tuple[NDArray[np.uint8], Found]:
        """Outcomes, and where the pages are, pinned."""
        found = self.pool.pin(client, chain.keys)
        outcomes = np.where(found.resident, Outcome.HIT, Outcome.MISS).astype(np.uint8)
        missing = np.flatnonzero(~found.resident)
        if len(missing):
            pull = self.process.spawn(self.puller.pull(cohort, chain, missing, request, deadline))
            await self.process.wait_any([pull], deadline)
            outcomes[missing] = pull.result() if pull.is_done else Outcome.TIMEOUT
            first_pin = found.pin
            found = self.pool.pin(client, chain.keys)
            self.pool.release(client, first_pin)
            outcomes[(outcomes == Outcome.HIT) & ~found.resident] = Outcome.MISS
            outcomes[found.resident] = Outcome.HIT
        return outcomes, found

    # ---- what the pool tells (PoolHooks)

    def published(self, effect: Published) -> None:
        self.world.published(self.agent_id, effect)
        self.directory.published(effect)

    def withdrawn(self, effect: Withdrawn) -> None:
        self.directory.withdrawn(effect)

    # ---- what the links tell

    def members(self) -> Collection[AgentInfo]:
        return self.membership.machine.alive()

    def link_up(self, info: AgentInfo) -> None:
        self.membership.link_up(info)

    def link_down(self, agent_id: AgentId, is_reset: bool) -> None:
        if is_reset:
            self.membership.link_broke(agent_id)

    def unreachable(self, agent_id: AgentId) -> None:
        self.membership.link_broke(agent_id)

    # ---- inside

    def _members_changed(self, change: MembersChanged) -> None:
        for agent_id in change.ended:
            self.links.forget(agent_id)
            self.server.revoke(agent_id)
            self.lookups.forget(agent_id)
            self.fetches.forget(agent_id)
            self.peers.forget(agent_id)
        self.links.know(change.alive)
        self.view.update(change.alive, change.draining, self.process.clock())
        self.world.note("view", self.name, len(change.alive), len(change.ended))
        self.directory.members_changed(self.view.ring, self.view.alive)

    def _tell(self, effect: Touched | ReportStale | ReportCorrupt) -> None:
        if isinstance(effect, Touched):
            self._touched.setdefault(effect.producer, []).append((effect.slots, effect.generations))
        elif isinstance(effect, ReportStale):
            self.directory.report_stale(effect.owner, effect.report)
        else:
            for slot, generation in zip(effect.slots.tolist(), effect.generations.tolist(), strict=True):
                self.world.corrupt_page_found(effect.producer, slot, generation, self.name)

    async def _send_touches(self) -> None:
        while True:
            await self.process.sleep(TOUCH_INTERVAL_S)
            touched, self._touched = self._touched, {}
            for producer, batches in touched.items():
                slots = np.concatenate([slots for slots, _ in batches])
                generations = np.concatenate([generations for _, generations in batches])
                self.links.notify(producer, Touch(pack(slots, U4), pack(generations, U4)))

    def _touch_handlers(self) -> Handlers:
        def touched(_: AgentInfo, message: PeerMessage) -> None:
            assert isinstance(message, Touch)  # noqa: S101 - what it is registered for
            n = count(message.slots, 4, "slots")
            slots = unpack(message.slots, U4, n, "slots")
            self.pool.use(slots, unpack(message.generations, U4, n, "generations"))

        return {Touch: touched}
