"""The agent process: builds every part, connects them, runs until it is told to stop.

The only place that builds objects and owns their life. Start: what can be refused (addresses, secrets, memory) comes
first and stops the start with a ConfigError; the engines' socket comes last, so that who can connect finds a whole
agent. Stop (a signal, or an embedded agent whose last client left): tell the cluster, send what is queued, close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvpeer import __version__
from kvpeer.agent.clients import ClientLimits, ClientServer
from kvpeer.agent.config import HUGEPAGE_BYTES, AgentConfig, seeds_of
from kvpeer.agent.config.parts import link_settings, membership_settings, server_limits, slot_settings
from kvpeer.agent.corruption import CorruptPages
from kvpeer.agent.data_peers import DataAdmissions, DataPeers
from kvpeer.agent.directory import DirectoryService
from kvpeer.agent.discovery import OwnAddress
from kvpeer.agent.disk import DiskTier
from kvpeer.agent.disk_first import DiskFirst
from kvpeer.agent.fetch_threads import FetchThreads
from kvpeer.agent.http import HttpEndpoint
from kvpeer.agent.inspector import Inspector
from kvpeer.agent.links import PeerLinks
from kvpeer.agent.locator import PeerLocator
from kvpeer.agent.membership import MembershipService, Seed
from kvpeer.agent.observer import Observer
from kvpeer.agent.placement import Placement
from kvpeer.agent.pool import Locator, PoolService, Puller
from kvpeer.agent.private_files import private_folder
from kvpeer.agent.promotions import Promotions
from kvpeer.agent.puller import PeerPuller, Services
from kvpeer.agent.rdma import open_rdma
from kvpeer.agent.remote_disk import RemoteDisks
from kvpeer.agent.security import open_security
from kvpeer.agent.status import OwnStatus
from kvpeer.agent.status_page import status_pages
from kvpeer.agent.tasks import BackgroundTasks, is_fatal
from kvpeer.agent.told_policy import ToldPolicy
from kvpeer.agent.touches import Touches
from kvpeer.core.breaker import Breakers
from kvpeer.core.directory import DirectoryShard
from kvpeer.core.membership import MembersChanged, Membership
from kvpeer.core.negative import NegativeCache
from kvpeer.core.pairs import PairLedger
from kvpeer.core.producers import Producers
from kvpeer.core.publisher import REGISTRY_PARTITION_RECORDS_MAX, Publisher
from kvpeer.core.pull import Pulls
from kvpeer.core.ring import Ring
from kvpeer.core.slots import SlotTable
from kvpeer.core.traces import TraceRing
from kvpeer.core.view import ClusterView
from kvpeer.metrics import build
from kvpeer.model import AGENT_ID_BYTES, AgentId, ConfigError, Verify
from kvpeer.native import DataServer, DirectoryTable, Pool
from kvpeer.wire.messages import AgentInfo

__all__ = ["Agent", "run"]

STOP_DEADLINE_S = 5.0
"""For everything that is done on the way out; a pod's grace period is usually 30 s and the engine needs most of it."""

EXIT_FAILED = 1

_log = logging.getLogger(__name__)


def run(config: AgentConfig, *, is_embedded: bool = False) -> int:
    """Runs an agent until it is stopped; returns the process's exit status: EXIT_FAILED when it stopped by itself
    because it could not go on. `is_embedded`: ends some time after the last client left.

    Raises:
        ConfigError: it cannot start as configured.
    """
    placement = Placement.of_machine(config)
    placement.pin_threads()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_main(config, is_embedded, placement))
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(_main(config, is_embedded, placement))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _main(config: AgentConfig, is_embedded: bool, placement: Placement | None = None) -> int:
    agent = Agent(config, is_embedded=is_embedded, placement=placement)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, agent.stop, signal.Signals(number).name)
    try:
        await agent.start()
        await agent.stopped()
    finally:
        await agent.close()
    return EXIT_FAILED if agent.failure else 0


class Agent:
    """All parts of one agent. Life: construct (may refuse), `start`, `stopped`, `close`. Belongs to one event loop."""

    def __init__(self, config: AgentConfig, *, is_embedded: bool = False, placement: Placement | None = None) -> None:
        """Raises ConfigError when the runtime folder, an address, a secret or memory cannot be had. `placement`: what
        was planned for the process; by default it is planned here, and threads are where they are."""
        self.config = config
        self.agent_id = AgentId(os.urandom(AGENT_ID_BYTES))
        self._is_embedded = is_embedded
        self._placement = placement or Placement.of_machine(config)
        # Before anything is made in it: whoever came first would give it the mode that suits its own file.
        runtime_dir = private_folder(Path(config.agent.runtime_dir))
        self._registry = CollectorRegistry()
        self._metrics = build(self._registry)
        self._tasks = BackgroundTasks(self._metrics)
        self._stop = asyncio.Event()
        self.failure = ""
        """Why the agent stops by itself; empty while there is no reason to."""
        self._linger: asyncio.TimerHandle | None = None
        self._closing = contextlib.AsyncExitStack()
        security = open_security(config, self.agent_id)
        self._pool = self._build_pool()
        self._server = self._build_server()
        self._rdma = open_rdma(self._pool, config.transport, self._placement.plan)
        rng = random.Random()  # noqa: S311 - schedules probes and backoffs, decides nothing that an attacker gains by
        self._links = self._build_links(security, rng)
        self.info = self._build_info()
        self._address = OwnAddress(runtime_dir, config.agent.cluster, self.info)
        self._build_services(rng)
        self._policy = ToldPolicy(config.agent, security.policy_key, runtime_dir, self._clients.tell)

    # ---- building

    def _build_pool(self) -> Pool:
        settings = self.config.pool
        hugepage_bytes = HUGEPAGE_BYTES[settings.hugepages]
        pool = Pool(settings.size_bytes, settings.extent_bytes, self.agent_id, hugepage_bytes)
        self._placement.bind_pool(pool, hugepage_bytes)
        return pool

    def _build_server(self) -> DataServer:
        agent = self.config.agent
        try:
            return DataServer(self._pool, agent.host, agent.data_port, server_limits(self.config.transport))
        except ConfigError as error:
            raise ConfigError(f"{error}; choose another agent.host or agent.data_port") from error

    def _build_links(self, security: object, rng: random.Random) -> PeerLinks:
        agent, settings = self.config.agent, link_settings(self.config.limits)
        return PeerLinks(agent.host, agent.control_port, security, self._metrics, settings, rng)  # type: ignore[arg-type]

    def _build_info(self) -> AgentInfo:
        """What peers are told: where they reach this agent, which need not be where it listens."""
        agent = self.config.agent
        control_port = agent.advertise_control_port or self._links.control_port
        data_port = agent.advertise_data_port or self._server.port
        return AgentInfo(self.agent_id, agent.name, agent.advertise_host, control_port, data_port)

    def _build_services(self, rng: random.Random) -> None:
        config, clock, directory = self.config, time.monotonic, self.config.directory
        self._view = ClusterView(
            self.info, lambda members: Ring.build(list(members), directory.replicas, directory.virtual_nodes)
        )
        self._directory = DirectoryService(
            self.agent_id,
            DirectoryShard(self.agent_id, DirectoryTable(directory.partition_records_max, makes_room=True)),
            Publisher(
                self.agent_id,
                DirectoryTable(REGISTRY_PARTITION_RECORDS_MAX, makes_room=False),
                directory.anti_entropy_interval_s,
            ),
            self._links,
            clock,
        )
        self._build_pool_service()
        self._membership = MembershipService(
            Membership(self.info, membership_settings(config.membership), rng, clock()),
            self._links,
            self._seeds,
            self._members_changed,
            clock,
        )
        self._verify = Verify[config.transport.verify.upper()]
        # An owner that answers lookups says nothing of its data port, nor the other way round.
        self._lookups, self._fetches = Breakers(), Breakers()
        self._peers = DataPeers(self.agent_id, self._view, self._links, self._verify, config.transport, self._rdma)
        only_rdma = config.transport.rdma == "require"
        self._admissions = DataAdmissions(self._server, self._view, self._rdma, only_rdma=only_rdma)
        self._touches = Touches(self._pool_service, self._links)
        self._corrupt_pages = CorruptPages(self._pool_service, self._links, self._metrics, clock)
        threads = FetchThreads(
            self._peers.fetch, config.transport.fetch_threads, config.transport.connections_per_peer, clock
        )
        producers = Producers(self._view, self._fetches, NegativeCache(), threads.in_flight)
        self._locator = PeerLocator(self._directory, self._lookups, producers, self._metrics, clock)
        self._traces, self._pairs = TraceRing(), PairLedger()
        services = Services(
            self._pool_service, self._locator, self._directory, self._touches, self._corrupt_pages,
            RemoteDisks(self._links), self._metrics, self._peers.transport, self._traces, self._pairs, clock,
        )  # fmt: skip
        self._puller = PeerPuller(services, Pulls(producers, self._locator.recent), threads)
        locator: Locator = self._locator
        puller: Puller = self._puller
        if self._disk is not None:
            locator = puller = DiskFirst(self._disk.store, self._promotions, locator, puller)
        self._clients = ClientServer(
            config.agent.socket, self.agent_id, self._pool_service, self._pool.payload_bytes, config.pool.extent_bytes,
            self._verify, locator, puller, clock, self._metrics,
            ClientLimits(config.limits.clients_max, config.limits.batch_pages_max),
            is_private=self._is_embedded, on_clients_changed=self._clients_changed, traces=self._traces,
            inspect=self._build_inspector(clock).answer,
        )  # fmt: skip

    def _build_inspector(self, clock: Callable[[], float]) -> Inspector:
        own = OwnStatus(
            self.info, self.config, self._pool, self._pool_service, self._disk, self._placement, self._view,
            {"lookup": self._lookups, "data": self._fetches}, self._pairs, self._traces, self._peers.preferred,
            self.health, clock, clock(),
        )  # fmt: skip
        self._inspector = Inspector(own, self._membership, self._links)
        return self._inspector

    def _build_pool_service(self) -> None:
        config, clock, opened = self.config, time.monotonic, self._placement.extent_opened
        table = SlotTable(slot_settings(config.pool, self._pool.n_extents))
        self._disk = DiskTier(config.disk, self._directory, clock) if config.disk.path else None
        if self._disk is None:
            self._pool_service = PoolService(self._pool, table, clock, self._directory, extent_opened=opened)
        else:
            self._pool_service = PoolService(
                self._pool, table, clock, self._disk, lower=self._disk, extent_opened=opened
            )
            store = self._disk.attach(self._pool_service)
            self._promotions = Promotions(store, self._pool_service, self._metrics, clock)

    # ---- life

    async def start(self) -> None:
        """Begins to serve.

        Raises:
            ConfigError: the metrics port or the engines' socket cannot be had.
        """
        config = self.config
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        self._observer = observer = Observer(
            self._metrics, self._pool_service, self._pool, self._server, self._directory, self._membership,
            {"lookup": self._lookups, "data": self._fetches}, self._clients, self._peers, self._disk, self._placement,
            self._traces,
        )  # fmt: skip
        observer.describe(__version__, config)
        self._placement.log()
        if config.metrics.enabled:
            host, port, accept = config.metrics.host, config.metrics.port, self._policy.accept_from_threads()
            pages = status_pages(self._inspector.status_from_thread)
            http = HttpEndpoint(host, port, self._registry, self.health, accept, pages)
            self._closing.callback(http.close)
            _log.info("metrics and health at http://%s:%d/metrics and /healthz, status at /", host, http.port)
        handlers = {
            **self._directory.handlers(),
            **self._membership.handlers(),
            **self._touches.handlers(),
            **self._corrupt_pages.handlers(),
            **self._admissions.handlers(),
            **self._inspector.handlers(),
            **(self._promotions.handlers() if self._disk else {}),
        }
        self._links.start(self.info, handlers, self._membership)
        self._directory.members_changed(self._view.ring, self._view.alive)
        self._pool_service.start()
        await self._clients.start()
        self._address.write()
        for name, work in (
            ("membership", self._membership.run()),
            ("directory", self._directory.run()),
            ("touches", self._touches.run()),
            ("rechecks", self._corrupt_pages.run()),
            ("observer", observer.run()),
            ("address file", self._address.renew()),
        ):
            self._tasks.spawn(name, work, is_vital=True)
        if self._disk is not None:
            self._tasks.spawn("disk", self._disk.store.run(), is_vital=True)
        self._clients_changed(0)
        self._log_addresses()

    async def stopped(self) -> None:
        """Returns when the agent is to end."""
        await self._stop.wait()

    def stop(self, reason: str) -> None:
        """Makes the agent end."""
        if not self._stop.is_set():
            _log.info("stopping: %s", reason)
            self._stop.set()

    def fail(self, reason: str) -> None:
        """Makes the agent end because it cannot go on: what it would do next might be wrong, and a cache that is gone
        costs little."""
        if not self.failure:
            self.failure = reason
            _log.critical("the agent stops: %s", reason)
        self.stop(reason)

    def health(self) -> str:
        """Why the agent is not healthy, or an empty text. Thread-safe."""
        return self.failure or self._observer.health()

    async def close(self) -> None:
        """Leaves the cluster and frees everything, within STOP_DEADLINE_S. Also after a start that failed."""
        self._stop.set()
        self._address.withdraw()
        self._membership.leave()
        await self._clients.close()
        await self._directory.flush(time.monotonic() + STOP_DEADLINE_S / 2)
        if self._disk is not None:
            await self._disk.store.flush(STOP_DEADLINE_S / 5)
        await self._tasks.cancel(STOP_DEADLINE_S)
        self._membership.close()
        self._directory.close()
        await self._links.close(STOP_DEADLINE_S / 2)
        self._peers.close()
        await asyncio.get_running_loop().run_in_executor(None, self._puller.close)
        await asyncio.get_running_loop().run_in_executor(None, self._corrupt_pages.close)
        await self._pool_service.close()
        await self._closing.aclose()
        self._admissions.close()
        if self._disk is None or await self._close_disk(self._disk):
            self._pool.close()

    async def _close_disk(self, disk: DiskTier) -> bool:
        """False if a thread of a disk that hangs may still write into the pool, which the process's end then frees."""
        is_unused = await self._promotions.close(STOP_DEADLINE_S / 2)
        await disk.store.close(STOP_DEADLINE_S / 2)
        return is_unused

    def _log_addresses(self) -> None:
        agent, told = self.config.agent, self.info
        here = (agent.host, self._links.control_port, self._server.port)
        _log.info(
            "agent %s of cluster %s serves engines at %s, agents at %s:%d, pages at port %d",
            self.agent_id.hex(), agent.cluster, agent.socket, *here,
        )  # fmt: skip
        if (told.host, told.control_port, told.data_port) != here:
            _log.info("peers are told %s:%d, pages at port %d", told.host, told.control_port, told.data_port)

    # ---- what the event loop tells

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Errors that no root caught, and those that roots pass on."""
        loop.default_exception_handler(context)
        if is_fatal(context):
            self.fail(f"{context['message']}: {context.get('exception')!r}")
        elif "exception" in context:
            self._metrics.counter("kvpeer_agent_task_failures_total").labels(task="event loop").inc()

    # ---- what membership and clients tell

    def _members_changed(self, change: MembersChanged) -> None:
        self._view.update(change.alive, change.draining, time.monotonic())
        for agent_id in change.ended:
            _log.info("agent %s ended", agent_id.hex())
            self._links.forget(agent_id)
            self._corrupt_pages.forget(agent_id)
            self._admissions.revoke(agent_id)
            self._lookups.forget(agent_id)
            self._fetches.forget(agent_id)
            self._pairs.forget(agent_id)
            self._peers.forget(agent_id)
        self._links.know(change.alive)
        self._directory.members_changed(self._view.ring, self._view.alive)

    def _clients_changed(self, n_clients: int) -> None:
        """An embedded agent waits a while for an engine that restarts, then ends."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._is_embedded and n_clients == 0:
            linger_s = self.config.agent.linger_s
            self._linger = asyncio.get_running_loop().call_later(linger_s, self.stop, f"no engine for {linger_s:g} s")

    async def _seeds(self) -> list[Seed]:
        """Configured seeds and the agents of this user on this host."""
        local = [(address.host, address.control_port) for address in self._address.others()]
        return local + [(seed.host, seed.port) for seed in seeds_of(self.config)]
