"""The control channel of one simulated agent: links that are dialled, introduced, reset and closed, over real frames.

A model of `agent/links`, with its promises and limits and without its sockets: requests with ids and deadlines, at most
once a link; notices that wait for a dial; one dial for all who wait, with a backoff; a link that ends tells who waits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvpeer.model import AgentId, CapacityError, PeerUnavailableError, RemoteProtocolError
from kvpeer.sim.kernel import Future, Process, Task
from kvpeer.sim.network import Network
from kvpeer.wire.codec import decode_peer, encode
from kvpeer.wire.framing import Frame, FrameKind, FrameReader, pack_frame, remaining_ms
from kvpeer.wire.messages import AgentInfo, Ok, PeerHello, PeerMessage, PeerWelcome, Refusal, RefusalCode

__all__ = ["Handlers", "Link", "LinkEvents", "Links", "Listeners"]

REQUESTS_MAX = 256
NOTICES_MAX = 1024
DIAL_TIMEOUT_S = 2.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.05, 2.0
CLUSTER = "simulated"
GOODBYE_ID = 0

Handlers = Mapping[type, Callable[[AgentInfo, PeerMessage], PeerMessage | None]]


class LinkEvents(Protocol):
    """What the agent wants to know, and is asked; as `agent.links.LinkEvents`."""

    def members(self) -> Collection[AgentInfo]: ...
    def link_up(self, info: AgentInfo) -> None: ...
    def link_down(self, agent_id: AgentId, is_reset: bool) -> None: ...
    def unreachable(self, agent_id: AgentId) -> None: ...


@dataclass(slots=True)
class Peer:
    """What is kept of one other agent."""

    info: AgentInfo
    is_known: bool = False
    links: list[Link] = field(default_factory=list)
    dialling: Task[Link] | None = None
    n_failures: int = 0
    not_before: float = 0.0
    notices: deque[bytes] = field(default_factory=deque)

    @property
    def link(self) -> Link | None:
        return next((link for link in self.links if link.is_open), None)


class Link:
    """One end of a connection. `other` is the other end, in another process."""

    def __init__(self, links: Links, peer: AgentInfo) -> None:
        self.links = links
        self.peer = peer
        self.other: Link | None = None
        self.is_open = True
        self.pending: dict[int, Future[PeerMessage]] = {}
        self._reader = FrameReader()
        self._last_id = 0

    def request(self, message: PeerMessage, expires_at: float) -> Future[PeerMessage]:
        """The answer, or PeerUnavailableError when it is not there by then."""
        answer: Future[PeerMessage] = Future()
        if len(self.pending) >= REQUESTS_MAX:
            answer.fail(PeerUnavailableError(f"{REQUESTS_MAX} requests wait for this peer already"))
            return answer
        self._last_id += 1
        request_id = self._last_id
        self.pending[request_id] = answer
        process = self.links.process

        def expire() -> None:
            if self.pending.pop(request_id, None) is not None:
                answer.fail(PeerUnavailableError(f"no answer to {type(message).__name__} in time"))

        process.call_at(expires_at, expire)
        left_ms = remaining_ms(expires_at - process.clock())
        self.send(pack_frame(FrameKind.REQUEST, request_id, encode(message), left_ms))
        return answer

    def send(self, frame: bytes) -> None:
        """Hands a frame to the network. An end that is gone answers with a reset."""
        other = self.other
        if not self.is_open or other is None:
            return
        network, source = self.links.network, self.links.host
        if not other.is_open or other.links.process.is_dead:
            if network.passes(source, other.links.host) and network.passes(other.links.host, source):
                self.links.process.kernel.at(
                    self.links.process.kernel.now + network.delay(source, other.links.host), self.reset
                )
            return
        receiver = other.links.process
        network.carry(
            source,
            other.links.host,
            frame,
            lambda arrived: receiver.post(lambda: other.receive(arrived)),
            self.reset_both,
        )

    def receive(self, chunk: bytes) -> None:
        """Takes what arrived."""
        if not self.is_open:
            return
        try:
            for frame in self._reader.feed(chunk):
                self._take(frame)
        except RemoteProtocolError as fault:
            self.links.n_protocol_faults += 1
            self.close(Refusal(RefusalCode.FAULTY, str(fault)))

    def reset(self) -> None:
        """The connection is gone without a word."""
        self.links.process.post(lambda: self._end(is_reset=True))

    def reset_both(self) -> None:
        """As `reset`, and the other end finds the same."""
        self.reset()
        if self.other is not None:
            self.other.reset()

    def close(self, refusal: Refusal) -> None:
        """Says goodbye and ends."""
        if self.is_open:
            self.send(pack_frame(FrameKind.ERROR, GOODBYE_ID, encode(refusal)))
            self._end(is_reset=False)

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.REPLY:
            message = decode_peer(frame.body)  # first: what cannot be read is no answer
            if (answer := self.pending.pop(frame.id, None)) is not None:
                answer.set(message)
        elif frame.kind is FrameKind.ERROR:
            self._take_refusal(frame)
        else:
            self._serve(frame)

    def _take_refusal(self, frame: Frame) -> None:
        refusal = decode_peer(frame.body)
        if not isinstance(refusal, Refusal):
            raise RemoteProtocolError(f"an error frame holds {type(refusal).__name__}")
        if frame.id == GOODBYE_ID:
            self._end(is_reset=False)
        elif (answer := self.pending.pop(frame.id, None)) is not None:
            answer.fail(PeerUnavailableError(f"refused ({refusal.code}): {refusal.message}"))

    def _serve(self, frame: Frame) -> None:
        answer = self._answer(decode_peer(frame.body))
        if frame.kind is FrameKind.REQUEST:
            kind = FrameKind.ERROR if isinstance(answer, Refusal) else FrameKind.REPLY
            self.send(pack_frame(kind, frame.id, encode(answer)))

    def _answer(self, message: PeerMessage) -> PeerMessage:
        handler = self.links.handlers.get(type(message))
        if handler is None:
            return Refusal(RefusalCode.UNSUPPORTED, f"{type(message).__name__} is not served here")
        try:
            return handler(self.peer, message) or Ok()
        except CapacityError as limit:
            return Refusal(RefusalCode.BUSY, str(limit))
        except PeerUnavailableError as error:
            return Refusal(RefusalCode.REFUSED, str(error))

    def _end(self, is_reset: bool) -> None:
        if not self.is_open:
            return
        self.is_open = False
        pending, self.pending = self.pending, {}
        for answer in pending.values():
            answer.fail(PeerUnavailableError("the link ended"))
        self.links.lost(self, is_reset)


class Listeners:
    """Who listens at which address: (host, port) -> the links of a process that may be dead by now."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[str, int], Links] = {}

    def listen(self, links: Links) -> None:
        self._by_address[links.info.host, links.info.control_port] = links

    def at(self, host: str, port: int) -> Links | None:
        return self._by_address.get((host, port))


class Links:
    """As `agent.links.PeerLinks`. `host` is the number of the machine."""

    def __init__(
        self,
        info: AgentInfo,
        host: int,
        process: Process,
        network: Network,
        listeners: Listeners,
        events: LinkEvents,
        rng: random.Random,
    ) -> None:
        self.info = info
        self.host = host
        self.process = process
        self.network = network
        self.handlers: Handlers = {}
        self.n_protocol_faults = 0
        self.peers: dict[AgentId, Peer] = {}
        self._listeners = listeners
        self._events = events
        self._rng = rng
        listeners.listen(self)

    # ---- for the rest of the agent

    def know(self, infos: Iterable[AgentInfo]) -> None:
        """These agents exist, at these addresses."""
        for info in infos:
            if info.agent_id != self.info.agent_id:
                peer = self.peers.setdefault(AgentId(info.agent_id), Peer(info))
                peer.info, peer.is_known = info, True

    def forget(self, agent_id: AgentId) -> None:
        """This agent ended: its links are closed, what waits for it is dropped."""
        peer = self.peers.pop(agent_id, None)
        if peer is not None:
            for link in list(peer.links):
                link.close(Refusal(RefusalCode.CLOSING, "not a member any more"))

    async def request(self, agent_id: AgentId, message: PeerMessage, deadline_s: float) -> PeerMessage:
        """The agent's answer. Raises PeerUnavailableError when there is none within `deadline_s`."""
        expires_at = self.process.clock() + deadline_s
        peer = self.peers.get(agent_id)
        if peer is None:
            raise PeerUnavailableError(f"agent {agent_id.hex()} is not a member")
        link = peer.link
        if link is None:
            dialling = peer.dialling or self._dial(peer)
            await self.process.wait_any([dialling], expires_at)
            if not dialling.is_done:
                raise PeerUnavailableError("no link in time")
            link = dialling.result()
        return await link.request(message, expires_at)

    def notify(self, agent_id: AgentId, message: PeerMessage) -> None:
        """Sends a message that is not answered, as soon as there is a link; may lose it."""
        peer = self.peers.get(agent_id)
        if peer is None or len(peer.notices) >= NOTICES_MAX:
            return
        peer.notices.append(pack_frame(FrameKind.NOTICE, 0, encode(message)))
        if peer.link is not None:
            self._flush(peer)
        elif peer.dialling is None:
            self._dial(peer)

    async def join(self, host: str, port: int) -> PeerWelcome:
        """The welcome of whoever listens there. Raises PeerUnavailableError when nobody else does."""
        link, welcome = await self._connect(host, port)
        known = self.peers.get(AgentId(welcome.info.agent_id))
        if known is not None and known.link is not None:
            link.close(Refusal(RefusalCode.CLOSING, "there is a link already"))
        else:
            self._admit(link)
        return welcome

    # ---- links coming and going

    def lost(self, link: Link, is_reset: bool) -> None:
        """A link's word that it has ended."""
        agent_id = AgentId(link.peer.agent_id)
        peer = self.peers.get(agent_id)
        if peer is None or link not in peer.links:
            return
        peer.links.remove(link)
        if peer.links:
            return
        if not peer.is_known:
            del self.peers[agent_id]
        self._events.link_down(agent_id, is_reset)

    def _admit(self, link: Link) -> None:
        peer = self.peers.setdefault(AgentId(link.peer.agent_id), Peer(link.peer))
        is_first = peer.link is None
        peer.info = link.peer
        peer.links.append(link)
        peer.n_failures, peer.not_before = 0, 0.0
        if is_first:
            self._events.link_up(link.peer)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        link = peer.link
        while peer.notices and link is not None and link.is_open:
            link.send(peer.notices.popleft())

    # ---- dialling

    def _dial(self, peer: Peer) -> Task[Link]:
        task = self.process.spawn(self._open(peer))
        peer.dialling = task

        def done() -> None:
            peer.dialling = None
            if task.is_failed and not self.process.is_dead:
                peer.notices.clear()
                self._events.unreachable(AgentId(peer.info.agent_id))

        task.then(done)
        return task

    async def _open(self, peer: Peer) -> Link:
        info = peer.info
        if self.process.clock() < peer.not_before:
            raise PeerUnavailableError(f"{info.name} is dialled again later")
        try:
            link, welcome = await self._connect(info.host, info.control_port)
        except PeerUnavailableError:
            self._dial_failed(peer)
            raise
        self._admit(link)
        if welcome.info.agent_id != info.agent_id:
            self._dial_failed(peer)
            raise PeerUnavailableError(f"{info.name} is gone: another agent is at its address")
        return link

    def _dial_failed(self, peer: Peer) -> None:
        backoff_s = min(BACKOFF_MIN_S * 2**peer.n_failures, BACKOFF_MAX_S)
        peer.n_failures += 1
        peer.not_before = self.process.clock() + backoff_s * self._rng.uniform(0.5, 1.0)

    async def _connect(self, host: str, port: int) -> tuple[Link, PeerWelcome]:
        """A connection after hello and welcome; not admitted yet."""
        other = self._listeners.at(host, port)
        if other is None or other is self:
            raise PeerUnavailableError(f"nobody else listens at {host}:{port}")
        expires_at = self.process.clock() + DIAL_TIMEOUT_S
        attempt = _Attempt()
        way = (self.host, other.host)
        if other.process.is_dead and self.network.passes(*way) and self.network.passes(*reversed(way)):
            await self.process.sleep(self.network.delay(*way))
            raise PeerUnavailableError(f"{host}:{port} refused the connection")
        hello = encode(PeerHello(CLUSTER, self.info))
        self.network.carry(*way, hello, lambda body: other.process.post(lambda: other.accept(self, body, attempt)))
        await self.process.wait_any([attempt.welcome], expires_at)
        attempt.is_over = True
        if not attempt.welcome.is_done:
            attempt.give_up()
            raise PeerUnavailableError(f"{host}:{port} did not welcome us in time")
        link, body = attempt.welcome.result()
        try:
            answer = decode_peer(body)
        except RemoteProtocolError as fault:
            link.close(Refusal(RefusalCode.FAULTY, str(fault)))
            raise PeerUnavailableError(f"{host}:{port} breaks the protocol: {fault}") from fault
        if not isinstance(answer, PeerWelcome) or not link.is_open:
            raise PeerUnavailableError(f"{host}:{port} closed the link at once")
        link.peer = answer.info
        return link, answer

    def accept(self, dialler: Links, hello: bytes, attempt: _Attempt) -> None:
        """Answers a hello: this end is open at once, the dialler's when the welcome arrives."""
        try:
            message = decode_peer(hello)
        except RemoteProtocolError:
            return
        if not isinstance(message, PeerHello) or message.info.agent_id == self.info.agent_id or attempt.is_over:
            return
        here, there = Link(self, message.info), Link(dialler, self.info)
        here.other, there.other = there, here
        attempt.ends.append(there)
        body = encode(PeerWelcome(CLUSTER, self.info, list(self._events.members())))
        self._admit(here)
        process = dialler.process
        self.network.carry(
            self.host, dialler.host, body, lambda arrived: process.post(lambda: attempt.welcome.set((there, arrived)))
        )


class _Attempt:
    """One dial, until the welcome arrives or the dialler gives up."""

    def __init__(self) -> None:
        self.welcome: Future[tuple[Link, bytes]] = Future()
        self.ends: list[Link] = []
        self.is_over = False

    def give_up(self) -> None:
        for end in self.ends:
            end.close(Refusal(RefusalCode.CLOSING, "too late"))
