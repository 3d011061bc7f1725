"""RDMA in the agent: whether there is a device, peers that read by it, and what is asked of peers to read from them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import resource
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvpeer.agent.config import TransportSettings
from kvpeer.agent.directory import PeerRequests
from kvpeer.agent.links import PeerRefusedError
from kvpeer.core.topology import Plan
from kvpeer.core.view import ClusterView
from kvpeer.model import AgentId, ConfigError, PeerUnavailableError, RemoteProtocolError
from kvpeer.native import Pool, VerbsDevice, VerbsSettings, monotonic_ns
from kvpeer.transport import NoPathError
from kvpeer.wire.messages import (
    EXTENTS_TOLD_MAX,
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


def open_rdma(pool: Pool, settings: TransportSettings, plan: Plan) -> VerbsDevice | None:
    """The device for this pool, by the plan; None where `transport.rdma` is off, or is auto and there is none (logged).

    Raises:
        ConfigError: `transport.rdma` is require, and something is missing; the message says what.
    """
    if settings.rdma == "off":
        return None
    try:
        device = VerbsDevice(pool, _wanted(plan, settings.server_connections_max))
        try:
            _check_memlock(pool.payload_bytes)
        except ConfigError:
            device.close()
            raise
    except ConfigError as error:
        if settings.rdma == "require":
            raise ConfigError(f"transport.rdma is require, but {error}; auto does without") from error
        _log.info("pages move by tcp: %s", error)
        return None
    _log.info("pages move by RDMA device %s where peers have one, too", device.name)
    return device


def _wanted(plan: Plan, connections_max: int) -> VerbsSettings:
    """The first rank's NIC, or the first that is fit; without a plan, the library looks for one itself."""
    for rail in (*(rank.rail for rank in plan.ranks), *plan.rails):
        if rail is not None and rail.port.number == 1:
            return VerbsSettings(rail.device.name, rail.gid.index, connections_max)
    return VerbsSettings(connections_max=connections_max)


def _check_memlock(pool_bytes: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < pool_bytes and not _may_pin_anything():
        raise ConfigError(
            f"no RDMA: the pool has {pool_bytes} bytes, of which {limit} may be pinned: raise the limit memlock "
            "(LimitMEMLOCK=infinity), or give the agent IPC_LOCK"
        )


def _may_pin_anything() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> IPC_LOCK_BIT & 1)
    return False


class RdmaAdmissions:
    """The producer's side: gives its ends of queue pairs, and where its extents lie, to authenticated members."""

    def __init__(self, device: VerbsDevice, view: ClusterView) -> None:
        self._device = device
        self._view = view
        # Making a queue pair or registering an extent takes milliseconds: not on the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpeer-rdma")

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what readers ask."""
        return {OpenQueuePair: self._open, ReadExtents: self._extents}

    def revoke(self, reader: AgentId) -> None:
        """The reader ended: so do its queue pairs, soon."""
        self._thread.submit(self._device.revoke, reader)

    def close(self) -> None:
        """Returns when no call uses the device any more. Blocks for some milliseconds."""
        self._thread.shutdown()

    async def _open(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, OpenQueuePair)  # noqa: S101 - what it is registered for
        if self._view.info(AgentId(peer.agent_id)) is None:
            raise PeerUnavailableError(f"{peer.name} is no member here (any more): queue pairs are for members")
        try:
            return QueuePairOpened(await self._call(self._device.accept, peer.agent_id, message.reader_end))
        except ConfigError as error:  # no way to the reader's address, for one
            raise PeerUnavailableError(str(error)) from error

    async def _extents(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, ReadExtents)  # noqa: S101 - what it is registered for
        extents = await self._call(self._device.extents, message.first, EXTENTS_TOLD_MAX)
        return Extents(extents, self._device.n_extents)

    async def _call(self, function: Callable[..., bytes], *arguments: object) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class ControlChannel:
    """What a fetch thread asks one producer over the control channel; see `transport.ProducerControl`."""

    def __init__(self, producer: AgentId, links: PeerRequests, loop: asyncio.AbstractEventLoop) -> None:
        self._producer = producer
        self._links = links
        self._loop = loop

    def open_queue_pair(self, reader_end: bytes, deadline_ns: int) -> bytes:
        """See `ProducerControl`."""
        try:
            return self._ask(OpenQueuePair(reader_end), QueuePairOpened, deadline_ns).producer_end
        except PeerRefusedError as error:
            raise NoPathError(f"agent {self._producer.hex()} gives no queue pair: {error}") from error

    def extents(self, first: int, deadline_ns: int) -> tuple[bytes, int]:
        """See `ProducerControl`."""
        answer = self._ask(ReadExtents(first), Extents, deadline_ns)
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
