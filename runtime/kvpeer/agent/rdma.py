"""RDMA in the agent: which devices there are, peers that read by them, and what is asked of peers to read from them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import resource
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvpeer.agent.config import TransportSettings
from kvpeer.agent.directory import PeerRequests
from kvpeer.agent.links import PeerRefusedError
from kvpeer.core.topology import Plan
from kvpeer.core.view import ClusterView
from kvpeer.model import AgentId, CapacityError, ConfigError, PeerUnavailableError, RemoteProtocolError
from kvpeer.native import Pool, VerbsDevice, VerbsSettings, monotonic_ns
from kvpeer.transport import NoPathError
from kvpeer.wire.messages import (
    EXTENTS_TOLD_MAX,
    RAILS_MAX,
    AgentInfo,
    Extents,
    OpenQueuePair,
    PeerMessage,
    QueuePairOpened,
    ReadExtents,
)

__all__ = ["ControlChannel", "RdmaAdmissions", "ask_from_thread", "open_rdma"]

IPC_LOCK_BIT = 14
"""CAP_IPC_LOCK: whoever has it may pin memory without a limit."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T", bound=PeerMessage)


def open_rdma(pool: Pool, settings: TransportSettings, plan: Plan) -> tuple[VerbsDevice, ...]:
    """The devices for this pool, one for each rail of the plan, in its order; none where `transport.rdma` is off, or is
    auto and there is none (logged).

    Raises:
        ConfigError: `transport.rdma` is require, and there is none; the message says what is missing.
    """
    if settings.rdma == "off":
        return ()
    try:
        n_max = _rails_max(pool.payload_bytes)
        rails = _open_devices(pool, _wanted(plan, settings.server_connections_max), n_max)
    except ConfigError as error:
        if settings.rdma == "require":
            raise ConfigError(f"transport.rdma is require, but {error}; auto does without") from error
        _log.info("pages move by tcp: %s", error)
        return ()
    names = ", ".join(device.name for device in rails)
    _log.info("pages move by RDMA, rails %s, where peers have it, too", names)
    return rails


def _open_devices(pool: Pool, wanted: list[VerbsSettings], n_max: int) -> tuple[VerbsDevice, ...]:
    """Raises ConfigError when none can be opened."""
    rails: list[VerbsDevice] = []
    last: ConfigError | None = None
    for settings in wanted:
        if len(rails) == n_max:
            _log.warning("rail %s is not used: each pins the pool, and the limit memlock is too low", settings.device)
            continue
        try:
            rails.append(VerbsDevice(pool, settings))
        except ConfigError as error:
            last = error
            if settings.device:
                _log.warning("rail %s is not used: %s", settings.device, error)
    if not rails and last is not None:
        raise last
    return tuple(rails)


def _wanted(plan: Plan, connections_max: int) -> list[VerbsSettings]:
    """The rails of the plan; without any, the library looks for a device itself. Only first ports are used."""
    rails = [rail for rail in plan.rails if rail.port.number == 1][:RAILS_MAX]
    if not rails:
        return [VerbsSettings(connections_max=connections_max)]
    return [VerbsSettings(rail.device.name, rail.gid.index, connections_max) for rail in rails]


def _rails_max(pool_bytes: int) -> int:
    """How many rails may have the pool: each pins it, and counts it anew.

    Raises:
        ConfigError: not even one.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or _may_pin_anything():
        return RAILS_MAX
    if limit < pool_bytes:
        raise ConfigError(
            f"no RDMA: the pool has {pool_bytes} bytes, of which {limit} may be pinned: raise the limit memlock "
            "(LimitMEMLOCK=infinity), or give the agent IPC_LOCK"
        )
    return min(RAILS_MAX, limit // pool_bytes)


def _may_pin_anything() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> IPC_LOCK_BIT & 1)
    return False


class RdmaAdmissions:
    """The producer's side: gives its ends of queue pairs, and where its extents lie, to authenticated members."""

    def __init__(self, rails: Sequence[VerbsDevice], view: ClusterView) -> None:
        self._rails = rails
        self._view = view
        # Making a queue pair or registering an extent takes milliseconds: not on the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpeer-rdma")

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what readers ask."""
        return {OpenQueuePair: self._open, ReadExtents: self._extents}

    def revoke(self, reader: AgentId) -> None:
        """The reader ended: so do its queue pairs, soon."""
        for device in self._rails:
            self._thread.submit(device.revoke, reader)

    def close(self) -> None:
        """Returns when no call uses a device any more. Blocks for some milliseconds."""
        self._thread.shutdown()

    async def _open(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, OpenQueuePair)  # noqa: S101 - what it is registered for
        if self._view.info(AgentId(peer.agent_id)) is None:
            raise PeerUnavailableError(f"{peer.name} is no member here (any more): queue pairs are for members")
        device = self._rail(peer, message.rail)
        try:
            producer_end = await self._call(device.accept, peer.agent_id, message.reader_end)
            return QueuePairOpened(producer_end, len(self._rails))
        except ConfigError as error:  # no way to the reader's address, for one
            raise PeerUnavailableError(str(error)) from error

    async def _extents(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, ReadExtents)  # noqa: S101 - what it is registered for
        device = self._rail(peer, message.rail)
        extents = await self._call(device.extents, message.first, EXTENTS_TOLD_MAX)
        return Extents(extents, device.n_extents)

    def _rail(self, peer: AgentInfo, number: int) -> VerbsDevice:
        if number >= len(self._rails):
            raise CapacityError(f"{peer.name} asked for rail {number}; there are {len(self._rails)}")
        return self._rails[number]

    async def _call(self, function: Callable[..., bytes], *arguments: object) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class ControlChannel:
    """What a fetch thread asks one producer over the control channel; see `transport.ProducerControl`."""

    def __init__(self, producer: AgentId, links: PeerRequests, loop: asyncio.AbstractEventLoop) -> None:
        self._producer = producer
        self._links = links
        self._loop = loop

    def open_queue_pair(self, reader_end: bytes, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        """See `ProducerControl`."""
        try:
            answer = self._ask(OpenQueuePair(reader_end, rail), QueuePairOpened, deadline_ns)
        except PeerRefusedError as error:
            raise NoPathError(f"agent {self._producer.hex()} gives no queue pair: {error}") from error
        return answer.producer_end, answer.n_rails

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        """See `ProducerControl`."""
        answer = self._ask(ReadExtents(first, rail), Extents, deadline_ns)
        return answer.extents, answer.n_extents

    def _ask(self, message: PeerMessage, kind: type[_T], deadline_ns: int) -> _T:
        answer = ask_from_thread(self._links, self._loop, self._producer, message, deadline_ns)
        if not isinstance(answer, kind):
            name = type(message).__name__
            raise RemoteProtocolError(f"agent {self._producer.hex()} answered {name} with {type(answer).__name__}")
        return answer


def ask_from_thread(
    links: PeerRequests, loop: asyncio.AbstractEventLoop, producer: AgentId, message: PeerMessage, deadline_ns: int
) -> PeerMessage:
    """The producer's answer, asked for from another thread than the loop's. Blocks until the deadline at most.

    Raises:
        KvPeerError: there is none in time; nothing else comes out.
    """
    timeout_s = max(0.0, (deadline_ns - monotonic_ns()) / 1e9)
    asked = asyncio.run_coroutine_threadsafe(links.request(producer, message, timeout_s), loop)
    try:
        return asked.result(timeout_s)
    except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
        name = type(message).__name__
        raise PeerUnavailableError(f"agent {producer.hex()} did not answer {name} in time") from error
