"""`PeerLinks`: the control channel of one agent, seen from the rest of the agent."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import socket
from collections.abc import Collection, Iterable
from typing import Protocol

from kvpeer.agent.links.dispatch import Dispatcher, Handlers
from kvpeer.agent.links.handshake import Handshakes
from kvpeer.agent.links.link import Link, LinkCallbacks
from kvpeer.agent.links.listener import Listener
from kvpeer.agent.links.peer import Peer
from kvpeer.agent.links.refusals import Refusals
from kvpeer.agent.links.settings import (
    LINKS_PER_PEER_MAX,
    LinkClosingError,
    LinkEnd,
    LinkSettings,
    PeerRefusedError,
)
from kvpeer.agent.security import Security
from kvpeer.agent.tasks import BackgroundTasks
from kvpeer.metrics import Metrics
from kvpeer.model import AgentId, PeerUnavailableError
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import AgentInfo, Message, PeerMessage, PeerWelcome, Refusal, RefusalCode

__all__ = ["LinkEvents", "PeerLinks"]

JOIN_ADDRESSES_MAX = 16
"""Addresses of one seed's name that are tried: one agent that answers is enough."""

_SWEEPS_PER_IDLE = 4

_log = logging.getLogger(__name__)


class LinkEvents(Protocol):
    """What the agent wants to know, and is asked. Called on the event loop; must not block."""

    def members(self) -> Collection[AgentInfo]:
        """All members believed alive, for the welcome of a peer that joins by us."""

    def link_up(self, info: AgentInfo) -> None:
        """The first link to this agent is open: it is alive, authenticated, and at this address."""

    def link_down(self, agent_id: AgentId, end: LinkEnd) -> None:
        """The last link to this agent ended; RESET is evidence of its death."""

    def unreachable(self, agent_id: AgentId, reason: str) -> None:
        """A dial to this agent failed; whatever waited for it was dropped."""


class PeerLinks:
    """Links to other agents, opened when first needed, each carrying many requests both ways. Belongs to one event
    loop.

    Life: construct (listens, so that the port is known), `start`, use, `close`. Times are seconds from now.
    """

    def __init__(
        self,
        host: str,
        control_port: int,
        security: Security,
        metrics: Metrics,
        settings: LinkSettings,
        rng: random.Random,
    ) -> None:
        """Raises:
        ConfigError: the address or port cannot be had.
        """
        self._host = host
        self._listener = Listener(host, control_port)
        self._security = security
        self._metrics = metrics
        self._settings = settings
        self._rng = rng
        self._refusals = Refusals(metrics)
        self._tasks = BackgroundTasks(metrics)
        self._peers: dict[bytes, Peer] = {}
        self._connections: set[Link] = set()  # all that exist, introduced or not
        self._links: dict[Link, str] = {}  # introduced links and their direction
        self._n_inbound = 0  # introduced or not
        self._is_closing = False
        self._late = metrics.counter("kvpeer_links_late_replies_total")
        self._dropped = metrics.counter("kvpeer_links_dropped_notices_total")
        self._requests = metrics.counter("kvpeer_links_requests_total")
        self._request_seconds = metrics.histogram("kvpeer_links_request_seconds")
        self._dial_failures = metrics.counter("kvpeer_links_dial_failures_total")
        self._links_up = metrics.gauge("kvpeer_links_up")

    @property
    def control_port(self) -> int:
        """The port in use."""
        return self._listener.port

    def start(self, info: AgentInfo, handlers: Handlers, events: LinkEvents) -> None:
        """Begins to accept and to dial. `info` is what peers learn of this agent."""
        dispatcher = Dispatcher(handlers, self._metrics)
        self._info = info
        self._events = events
        callbacks = LinkCallbacks(
            connected=self._connections.add,
            lost=self._on_lost,
            writable=self._on_writable,
            late_reply=self._late.inc,
            notice_dropped=self._dropped.labels(reason="busy").inc,
        )
        new_link = functools.partial(Link, dispatcher, self._settings, callbacks)
        self._handshakes = Handshakes(
            info, self._security, self._settings, self._refusals, new_link, events.members, self._may_link
        )
        self._tasks.spawn("accept links", self._listener.run(self._accept, self._tasks), is_vital=True)
        self._tasks.spawn("close idle links", self._close_idle(), is_vital=True)

    # ---- for the rest of the agent

    def know(self, infos: Iterable[AgentInfo]) -> None:
        """These agents exist, at these addresses: requests to them may be made, until `forget`."""
        for info in infos:
            self.meet(info)
            if info.agent_id != self._info.agent_id:
                self._peers[info.agent_id].is_known = True

    def meet(self, info: AgentInfo) -> None:
        """Requests to this agent may be made now, at this address. One that is not known is forgotten when its last
        link ended or none could be opened."""
        if info.agent_id != self._info.agent_id:
            peer = self._peers.setdefault(info.agent_id, Peer(info, self._settings))
            peer.info = info

    def forget(self, agent_id: AgentId) -> None:
        """This agent ended: its links are closed, and what waits for it is dropped."""
        peer = self._peers.pop(agent_id, None)
        if peer is None:
            return
        self._drop_notices(peer)
        if peer.dialling is not None:
            peer.dialling.cancel()
        for link in peer.links:
            link.close(LinkEnd.FORGOTTEN, Refusal(RefusalCode.CLOSING, "not a member any more"))

    async def request(self, agent_id: AgentId, message: Message, deadline_s: float) -> PeerMessage:
        """The agent's answer, within `deadline_s`. At most once: a request that failed may have been served.

        Raises:
            PeerRefusedError: the agent refused.
            PeerUnavailableError: it is unknown, cannot be reached, or did not answer in time.
            LocalProtocolError: the message is too large for a frame.
        """
        loop = asyncio.get_running_loop()
        name = type(message).__name__
        started_at = loop.time()
        outcome = "failed"
        try:
            answer = await self._request(agent_id, message, started_at + deadline_s)
            outcome = "answered"
        except PeerRefusedError:
            outcome = "refused"
            raise
        finally:
            self._requests.labels(message=name, outcome=outcome).inc()
        self._request_seconds.labels(message=name).observe(loop.time() - started_at)
        return answer

    def notify(self, agent_id: AgentId, message: Message) -> None:
        """Sends a message that is not answered, as soon as there is a link. Never waits; a full queue or an unreachable
        agent loses it (counted)."""
        peer = self._peers.get(agent_id)
        if peer is None or self._is_closing:
            self._dropped.labels(reason="unreachable").inc()
            return
        if not peer.enqueue(pack_frame(FrameKind.NOTICE, 0, encode(message))):
            self._dropped.labels(reason="queue_full").inc()
        elif peer.link is not None:
            peer.flush()
        elif peer.dialling is None:
            self._dial(peer)

    async def join(self, host: str, port: int, deadline_s: float) -> PeerWelcome:
        """The welcome of an agent at this address or name, whoever it is; one link to it stays. All addresses of a name
        are tried in random order, the own one is passed over.

        Raises:
            PeerUnavailableError: nobody (else) answered.
        """
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + deadline_s
        failures: list[str] = []
        for address in await self._resolve(host, port, deadline_s):
            left_s = expires_at - loop.time()
            if left_s <= 0:
                break
            try:
                link, welcome = await self._handshakes.dial(address, port, left_s)
            except PeerUnavailableError as error:
                failures.append(str(error))
                continue
            known = self._peers.get(welcome.info.agent_id)
            if known is not None and known.link is not None:
                link.close(LinkEnd.IDLE, Refusal(RefusalCode.CLOSING, "there is a link already"))
                return welcome
            if self._admit(link, welcome.info, "out"):
                return welcome
            failures.append(f"{address} closed the link at once")
        raise PeerUnavailableError(f"no agent to join at {host}:{port}: {'; '.join(failures) or 'only this agent'}")

    async def close(self, deadline_s: float) -> None:
        """Says goodbye on all links and waits for them to end, at most `deadline_s`."""
        self._is_closing = True
        await self._tasks.cancel(deadline_s)
        self._listener.close()
        for peer in self._peers.values():
            self._drop_notices(peer)
            if peer.dialling is not None:
                peer.dialling.cancel()
        links = list(self._connections)
        for link in links:
            link.close(LinkEnd.SHUTDOWN, Refusal(RefusalCode.CLOSING, "the agent is ending"))
        if links:
            await asyncio.wait([link.lost for link in links], timeout=deadline_s)
        for link in links:
            link.abort()
            await link.cancel_serving()

    # ---- requests and dials

    async def _request(self, agent_id: AgentId, message: Message, expires_at: float) -> PeerMessage:
        link = await self._link_to(agent_id, expires_at)
        try:
            return await link.request(message, _left(expires_at))
        except LinkClosingError:  # it idled out at the moment we asked; nothing was served
            link = await self._link_to(agent_id, expires_at)
            return await link.request(message, _left(expires_at))

    async def _link_to(self, agent_id: AgentId, expires_at: float) -> Link:
        peer = self._peers.get(agent_id)
        if peer is None or self._is_closing:
            raise PeerUnavailableError(f"agent {agent_id.hex()} is not a member")
        if peer.link is not None:
            return peer.link
        dialling = peer.dialling or self._dial(peer)
        try:
            return await asyncio.wait_for(asyncio.shield(dialling), _left(expires_at))
        except asyncio.TimeoutError:
            raise PeerUnavailableError(f"{peer.info.name}: no link in time") from None
        except asyncio.CancelledError:
            if not dialling.cancelled():
                raise
            raise PeerUnavailableError(f"{peer.info.name} is not a member any more") from None

    def _dial(self, peer: Peer) -> asyncio.Task[Link]:
        """One dial for all who wait."""
        task = asyncio.get_running_loop().create_task(self._open(peer))
        peer.dialling = task

        def done(task: asyncio.Task[Link]) -> None:
            peer.dialling = None
            if task.cancelled():
                return
            error = task.exception()
            if isinstance(error, PeerUnavailableError):
                self._drop_notices(peer)
                self._leave_if_unknown(peer)
                self._events.unreachable(AgentId(peer.info.agent_id), str(error))
            elif error is not None:
                _log.error("dialling %s failed unexpectedly", peer.info.name, exc_info=error)
                self._metrics.counter("kvpeer_agent_task_failures_total").labels(task="dial").inc()

        task.add_done_callback(done)
        return task

    async def _open(self, peer: Peer) -> Link:
        now = asyncio.get_running_loop().time()
        info = peer.info
        wait_s = peer.wait_s(now)
        if wait_s:
            raise PeerUnavailableError(f"{info.name} is dialled again in {wait_s:.2g} s: {peer.last_error}")
        try:
            link, welcome = await self._handshakes.dial(info.host, info.control_port, self._settings.dial_timeout_s)
        except PeerUnavailableError as error:
            self._dial_failures.inc()
            peer.dial_failed(str(error), asyncio.get_running_loop().time(), self._rng)
            raise
        if not self._admit(link, welcome.info, "out"):
            raise PeerUnavailableError(f"{info.name} closed the link at once")
        if welcome.info.agent_id != info.agent_id:
            peer.dial_failed("another agent is at its address", now, self._rng)
            raise PeerUnavailableError(f"{info.name} is gone: agent {welcome.info.agent_id.hex()} is at its address")
        return link

    async def _resolve(self, host: str, port: int, deadline_s: float) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), deadline_s)
        except asyncio.TimeoutError:
            raise PeerUnavailableError(f"the name {host} was not resolved within {deadline_s:.3g} s") from None
        except OSError as error:
            raise PeerUnavailableError(f"the name {host} cannot be resolved: {error.strerror or error}") from error
        except ValueError as error:
            raise PeerUnavailableError(f"{host} is no name of a host: {error}") from error
        own = {(self._host, self.control_port), (self._info.host, self._info.control_port)}
        addresses = sorted(address for address in {str(entry[4][0]) for entry in found} if (address, port) not in own)
        self._rng.shuffle(addresses)
        return addresses[:JOIN_ADDRESSES_MAX]

    # ---- links coming and going

    async def _accept(self, connection: socket.socket, remote: str) -> None:
        if self._n_inbound >= self._settings.inbound_max:
            self._refusals.add("limit", remote, f"{self._n_inbound} agents have links to this one")
            connection.close()
            return
        self._n_inbound += 1
        is_admitted = False
        try:
            accepted = await self._handshakes.accept(connection, remote)
            is_admitted = accepted is not None and self._admit(*accepted, "in")
        finally:
            if not is_admitted:
                self._n_inbound -= 1

    def _admit(self, link: Link, info: AgentInfo, direction: str) -> bool:
        """Whether the link could be taken into use: it may have ended since its welcome."""
        if not link.is_open:
            return False
        self._links[link] = direction
        self._links_up.labels(direction=direction).inc()
        peer = self._peers.setdefault(info.agent_id, Peer(info, self._settings))
        is_first = peer.link is None
        peer.info = info
        peer.links.append(link)
        peer.dial_succeeded()
        if is_first:
            self._events.link_up(info)
        link.introduce(info)
        peer.flush()
        return True

    def _may_link(self, agent_id: bytes) -> bool:
        peer = self._peers.get(agent_id)
        return peer is None or len(peer.links) < LINKS_PER_PEER_MAX

    def _on_writable(self, link: Link) -> None:
        peer = self._peers.get(link.peer.agent_id) if link.peer else None
        if peer is not None:
            peer.flush()

    def _on_lost(self, link: Link) -> None:
        self._connections.discard(link)
        direction = self._links.pop(link, None)
        if direction is None or link.peer is None:
            return
        self._links_up.labels(direction=direction).dec()
        self._n_inbound -= direction == "in"
        if link.fault is not None:
            self._refusals.add("protocol", link.peer.host, link.fault)
        agent_id = AgentId(link.peer.agent_id)
        peer = self._peers.get(agent_id)
        if peer is None or link not in peer.links:  # forgotten in the meantime
            return
        peer.links.remove(link)
        if peer.links:
            return
        self._leave_if_unknown(peer)
        self._events.link_down(agent_id, link.end or LinkEnd.RESET)

    def _leave_if_unknown(self, peer: Peer) -> None:
        """Keeps nothing of an agent that is no member and has no link."""
        agent_id = peer.info.agent_id
        if not peer.is_known and not peer.links and self._peers.get(agent_id) is peer:
            self._drop_notices(peer)
            del self._peers[agent_id]

    def _drop_notices(self, peer: Peer) -> None:
        n = peer.drop_notices()
        if n:
            self._dropped.labels(reason="unreachable").inc(n)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(self._settings.idle_s / _SWEEPS_PER_IDLE)
            for link in list(self._links):
                if link.is_idle(self._settings.idle_s):
                    link.close(LinkEnd.IDLE, Refusal(RefusalCode.CLOSING, "idle"))


def _left(expires_at: float) -> float:
    """Seconds until then; a little more than none, so that an expired deadline fails by its own error."""
    return max(expires_at - asyncio.get_running_loop().time(), 0.001)
