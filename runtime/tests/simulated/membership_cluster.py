"""A cluster of membership machines: virtual time, a network that delays, loses and partitions, all from a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvpeer.core.membership import Effect, JoinSeed, MembersChanged, Membership, MembershipSettings, Send
from kvpeer.model import AgentId
from kvpeer.wire.messages import AgentInfo, Gossip, Ping, PingAck, PingRequest

DELAY_S_MAX = 0.02


@dataclass
class Node:
    info: AgentInfo
    machine: Membership
    is_running: bool = True
    is_frozen: bool = False
    side: int = 0
    wake_at: float = float("inf")
    waiting: list[Callable[[], None]] = field(default_factory=list)
    alive: frozenset[bytes] = frozenset()
    draining: tuple[AgentId, ...] = ()
    ended: list[tuple[float, AgentId]] = field(default_factory=list)


class Cluster:
    """`n` agents that have all joined through the first three. Run it with `run`; everything else acts at `now`."""

    def __init__(self, n: int, seed: int, loss: float = 0.0, settings: MembershipSettings | None = None) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.n_sent = 0
        self._view_changed = False
        self.settings = settings or MembershipSettings()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0
        self.nodes: dict[AgentId, Node] = {}
        self.seeds: list[Node] = []
        self.seeds += [self.start(port) for port in range(min(n, 3))]
        for port in range(3, n):
            self.start(port)

    # ---- what happens to agents -----------------------------------------------------------------------------------

    def start(self, port: int) -> Node:
        agent_id = AgentId(self.rng.randbytes(16))
        info = AgentInfo(agent_id, f"agent-{port}", "10.0.0.1", 7000 + port, 9000 + port)
        machine = Membership(info, self.settings, random.Random(self.rng.random()), self.now)
        node = Node(info, machine, alive=frozenset([agent_id]))
        self.nodes[agent_id] = node
        self._wake(node)
        return node

    def kill(self, node: Node, link_holders: Iterable[Node]) -> None:
        """SIGKILL: its kernel resets the links; those who hold one learn of it."""
        node.is_running = False
        for holder in link_holders:
            self._break_link(holder, node)

    def freeze(self, node: Node) -> None:
        """SIGSTOP: its kernel still takes bytes, it itself does nothing."""
        node.is_frozen = True

    def thaw(self, node: Node) -> None:
        node.is_frozen = False
        waiting, node.waiting = node.waiting, []
        for event in waiting:
            event()

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_running and not node.is_frozen]

    def act(self, node: Node, effects: list[Effect]) -> None:
        """Performs what a machine asked for."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(node, effect)
            elif isinstance(effect, MembersChanged):
                self._view_changed = True
                node.alive = frozenset(info.agent_id for info in effect.alive)
                node.draining = effect.draining
                node.ended += [(self.now, agent_id) for agent_id in effect.ended]
            elif isinstance(effect, JoinSeed):
                self._join(node)
        self._wake(node)

    # ---- time -----------------------------------------------------------------------------------------------------

    def run(self, duration_s: float, until: Callable[[], bool] | None = None) -> float | None:
        """Runs for this long, or until a changed view makes the condition hold; returns how long that took, None if it
        never held."""
        start, end = self.now, self.now + duration_s
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if until is not None and self._view_changed and until():
                return self.now - start
            self._view_changed = False
        self.now = end
        return None

    def agrees(self) -> bool:
        """Whether every running agent sees exactly the running agents."""
        expected = frozenset(AgentId(node.info.agent_id) for node in self.running())
        return all(node.alive == expected for node in self.running())

    def forgot(self, gone: Node) -> bool:
        """Whether no running agent believes this one alive."""
        return all(gone.info.agent_id not in node.alive for node in self.running())

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (time, self._n_events, event))

    # ---- the network ----------------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return self.rng.random() * DELAY_S_MAX

    def _wake(self, node: Node) -> None:
        due = max(self.now, node.machine.next_wakeup(self.now))
        if due >= node.wake_at or due == float("inf"):
            return
        node.wake_at = due

        def tick() -> None:
            if node.wake_at == due:
                node.wake_at = float("inf")
                self._handle(node, lambda: node.machine.tick(self.now))

        self.at(due, tick)

    def _handle(self, node: Node, event: Callable[[], list[Effect]]) -> None:
        if node.is_frozen:
            node.waiting.append(lambda: self._handle(node, event))
        elif node.is_running:
            self.act(node, event())

    def _send(self, sender: Node, effect: Send) -> None:
        self.n_sent += 1
        receiver = self.nodes[effect.agent_id]
        if not receiver.is_running and receiver.side == sender.side:
            self._break_link(sender, receiver)
        elif receiver.side == sender.side and self.rng.random() >= self.loss:
            sender_id = AgentId(sender.info.agent_id)
            self.at(self.now + self._delay(), lambda: self._deliver(receiver, sender_id, effect.message))

    def _deliver(self, receiver: Node, sender_id: AgentId, message: Any) -> None:
        machine = receiver.machine
        handlers: dict[type, Callable[..., list[Effect]]] = {
            Ping: machine.ping,
            PingAck: machine.ack,
            PingRequest: machine.ping_request,
            Gossip: machine.gossip,
        }
        self._handle(receiver, lambda: handlers[type(message)](sender_id, message, self.now))

    def _break_link(self, holder: Node, gone: Node) -> None:
        gone_id = AgentId(gone.info.agent_id)
        self.at(
            self.now + self._delay(),
            lambda: self._handle(holder, lambda: holder.machine.evidence_of_death(gone_id, self.now)),
        )

    def _join(self, node: Node) -> None:
        seed = self.rng.choice(self.seeds)
        if seed is node or not seed.is_running or seed.side != node.side:
            return

        def greet() -> None:
            if not (seed.is_running and node.is_running) or seed.is_frozen or node.is_frozen:
                return
            self.act(seed, seed.machine.hello(node.info, self.now))
            self.act(node, node.machine.hello(seed.info, self.now))
            self.act(node, node.machine.joined(seed.machine.alive(), self.now))

        self.at(self.now + self._delay(), greet)
