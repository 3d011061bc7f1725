"""Data connections to and from peers: who may read from this agent's pool, and this agent's reading from others.

Both sides of one handshake: a reader asks over the control channel (`OpenData`) and gets capabilities; it shows
one of them to the producer's data server when it connects. Where both have an RDMA device, they exchange the ends of a
queue pair instead (`agent/rdma.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvpeer.agent.config import TransportSettings
from kvpeer.agent.directory import PeerRequests
from kvpeer.agent.rdma import ControlChannel, RdmaAdmissions, ask_from_thread
from kvpeer.core.reasons import UnaskedReason
from kvpeer.core.view import ClusterView
from kvpeer.model import AgentId, CapacityError, Outcome, PeerUnavailableError, RemoteProtocolError, Verify
from kvpeer.native import CAPABILITY_BYTES, DataServer, VerbsDevice, monotonic_ns
from kvpeer.transport import (
    FallbackPeer,
    FetchBatch,
    FetchResult,
    Lanes,
    NotAskedError,
    Producer,
    TcpPeer,
    Transport,
    VerbsPeer,
)
from kvpeer.wire.messages import AgentInfo, DataAdmission, OpenData, PeerMessage

__all__ = ["DataAdmissions", "DataPeers"]

CAPABILITY_TTL_S = 5.0
"""A capability is used within a round trip; a thief has no longer than this."""

CAPABILITIES_MAX = 16
"""In one answer: as many connections as a reader may have to one producer."""

_log = logging.getLogger(__name__)


class DataAdmissions:
    """The producer's side: hands out capabilities to authenticated members."""

    def __init__(
        self, server: DataServer, view: ClusterView, rails: Sequence[VerbsDevice] = (), *, only_rdma: bool = False
    ) -> None:
        """`only_rdma`: nobody is admitted to the data server."""
        self._server = server
        self._view = view
        self._rails = rails
        self._only_rdma = only_rdma
        self._rdma = RdmaAdmissions(rails, view) if rails else None

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what readers ask."""
        rdma = self._rdma.handlers() if self._rdma is not None else {}
        return {**rdma} if self._only_rdma else {OpenData: self._open, **rdma}

    def revoke(self, reader: AgentId) -> None:
        """The reader ended, and with it what it may read by."""
        self._server.revoke(reader)
        if self._rdma is not None:
            self._rdma.revoke(reader)

    def close(self) -> None:
        """Ends all serving of peers. Blocks, at most for the io timeout. `DataPeers` was closed before."""
        if self._rdma is not None:
            self._rdma.close()
        for device in self._rails:
            device.close()
        self._server.close()

    async def _open(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, OpenData)  # noqa: S101 - what it is registered for
        if not 1 <= message.n <= CAPABILITIES_MAX:
            raise CapacityError(
                f"{message.n} data connections were asked for; 1 to {CAPABILITIES_MAX} can be had at once"
            )
        if self._view.info(AgentId(peer.agent_id)) is None:
            raise PeerUnavailableError(f"{peer.name} is no member here (any more): data connections are for members")
        capabilities = [os.urandom(CAPABILITY_BYTES) for _ in range(message.n)]
        expires_ns = monotonic_ns() + round(CAPABILITY_TTL_S * 1e9)
        for capability in capabilities:
            self._server.admit(capability, peer.agent_id, expires_ns)
        return DataAdmission(b"".join(capabilities), round(CAPABILITY_TTL_S * 1000))


class DataPeers:
    """The reader's side: connections to each producer. `fetch` runs on threads; the rest on the event loop.

    rails: the devices to read by from producers that have some, too; they stay the caller's. With `transport.rdma:
    require`, nothing is read by tcp.
    """

    transport = "tcp"

    def __init__(
        self,
        own_id: AgentId,
        view: ClusterView,
        links: PeerRequests,
        verify: Verify,
        settings: TransportSettings,
        rails: Sequence[VerbsDevice] = (),
    ) -> None:
        self._own_id = own_id
        self._view = view
        self._links = links
        self._verify = verify
        self._settings = settings
        self.rails = rails
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # protects what follows; only the view is looked at while it is held
        self._peers: dict[AgentId, Transport] = {}
        self._lanes: dict[AgentId, Lanes] = {}

    def in_use(self) -> Counter[str]:
        """How many producers are read from by each transport."""
        with self._lock:
            return Counter(peer.name for peer in self._peers.values())

    def preferred(self) -> str:
        """The transport that producers are read by where both sides can."""
        return "verbs" if self.rails else "tcp"

    def lanes(self) -> tuple[int, int]:
        """How many lanes to producers there are, and how many of these are out."""
        with self._lock:
            known = [*self._lanes.values()]
        return sum(map(len, known)), sum(lanes.n_out for lanes in known)

    def fetch(self, producer: AgentId, batch: FetchBatch, deadline: float) -> FetchResult:
        """Fetches from a living member, verified. Blocks until `deadline` (monotonic seconds) at most; after the return
        nothing writes to the destinations. Thread-safe; raises nothing but programming errors."""
        deadline_ns = round(deadline * 1e9)
        peer = self._peer(producer)
        if peer is None:
            result = FetchResult.unavailable(len(batch))
            result.end(0, Outcome.MISS, PeerUnavailableError(f"agent {producer.hex()} is not a member any more"))
            return result
        return peer.fetch(batch, deadline_ns)

    def forget(self, producer: AgentId) -> None:
        """The producer ended: its connections are closed, fetches under way end."""
        with self._lock:
            peer = self._peers.pop(producer, None)
            self._lanes.pop(producer, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """Ends all fetches and closes all connections."""
        with self._lock:
            peers, self._peers, self._lanes = self._peers, {}, {}
        for peer in peers.values():
            peer.close()

    def _peer(self, producer: AgentId) -> Transport | None:
        with self._lock:
            # The view first forgets an agent, then `forget` is called: nothing is kept of it after that.
            info = self._view.info(producer)
            if info is None:
                return None
            peer = self._peers.get(producer)
            if peer is None:
                peer = self._peers[producer] = self._connect_to(producer, info)
        return peer

    def _connect_to(self, producer: AgentId, info: AgentInfo) -> Transport:
        connections_max = self._settings.connections_per_peer
        tcp = TcpPeer(
            Producer(info.host, info.data_port, producer, self._own_id),
            functools.partial(self._capability, producer),
            verify=self._verify,
            connections_max=connections_max,
        )
        if not self.rails:
            return tcp
        verbs = VerbsPeer(
            self.rails,
            producer,
            ControlChannel(producer, self._links, self._loop),
            verify=self._verify,
            connections_max=connections_max,
            on_lane_change=functools.partial(_log_lane, producer),
        )
        self._lanes[producer] = verbs.lanes
        if self._settings.rdma == "require":
            return verbs
        return FallbackPeer(verbs, tcp, functools.partial(_log_transport, producer))

    def _capability(self, producer: AgentId, deadline_ns: int) -> bytes:
        """Asks the producer for a capability, from a fetch thread."""
        if deadline_ns <= monotonic_ns():
            raise NotAskedError(UnaskedReason.LATE, "no time left to open a data connection")
        answer = ask_from_thread(self._links, self._loop, producer, OpenData(1), deadline_ns)
        if not isinstance(answer, DataAdmission) or len(answer.capabilities) != CAPABILITY_BYTES:
            raise RemoteProtocolError(f"agent {producer.hex()} answered OpenData with {type(answer).__name__}")
        return answer.capabilities


def _log_lane(producer: AgentId, number: int, reason: str) -> None:
    state = f"out: {reason}" if reason else "in again"
    _log.info("lane %d to agent %s is %s", number, producer.hex(), state)


def _log_transport(producer: AgentId, name: str, reason: str) -> None:
    because = f": {reason}" if reason else ""
    _log.info("pages of agent %s come by %s%s", producer.hex(), name, because)
