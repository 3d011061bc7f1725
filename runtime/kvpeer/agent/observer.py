"""Copies the state of the agent's parts into its metrics, and says whether the agent is healthy."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from kvpeer.agent.clients import ClientServer
from kvpeer.agent.config import AgentConfig
from kvpeer.agent.data_peers import DataPeers
from kvpeer.agent.directory import DirectoryService
from kvpeer.agent.disk import DiskTier
from kvpeer.agent.membership import MembershipService
from kvpeer.agent.placement import Placement
from kvpeer.agent.pool import PoolService
from kvpeer.core.breaker import Breakers, BreakerState
from kvpeer.core.disk import Condition
from kvpeer.core.membership import MemberState
from kvpeer.core.traces import TraceRing
from kvpeer.metrics import Metrics
from kvpeer.model import AgentId
from kvpeer.native import DataServer, Pool

__all__ = ["Observer"]

INTERVAL_S = 1.0
"""Between two looks: no scrape is faster."""

STALL_S = 5.0
"""An event loop that did not run for this long is not healthy: every deadline of a client has passed by then."""


class Observer:
    """Belongs to the event loop, but for `health`, which other threads call. `breakers`: by what is asked of peers."""

    def __init__(
        self,
        metrics: Metrics,
        pool: PoolService,
        native_pool: Pool,
        server: DataServer,
        directory: DirectoryService,
        membership: MembershipService,
        breakers: Mapping[str, Breakers],
        clients: ClientServer,
        peers: DataPeers,
        disk: DiskTier | None,
        placement: Placement,
        traces: TraceRing,
    ) -> None:
        self._metrics = metrics
        self._pool = pool
        self._native_pool = native_pool
        self._server = server
        self._directory = directory
        self._membership = membership
        self._breakers = breakers
        self._clients = clients
        self._peers = peers
        self._disk = disk
        self._placement = placement
        self._traces = traces
        self._beat_at = time.monotonic()

    def health(self) -> str:
        """Why the agent is not healthy, or an empty text. Thread-safe."""
        stalled_s = time.monotonic() - self._beat_at
        return f"the event loop has not run for {stalled_s:.1f} s" if stalled_s > STALL_S else ""

    def describe(self, version: str, config: AgentConfig) -> None:
        """Sets what does not change."""
        info = self._metrics.gauge("kvpeer_agent_info")
        info.labels(
            version=version,
            cluster=config.agent.cluster,
            verify=config.transport.verify,
            security=config.security.mode,
        ).set(1)
        self._metrics.gauge("kvpeer_transport_active").labels(transport="shm").set(1)
        self._metrics.gauge("kvpeer_pool_capacity_bytes").set(self._native_pool.payload_bytes)
        self._metrics.gauge("kvpeer_disk_condition").labels(condition=Condition.OFF.value).set(self._disk is None)

    async def run(self) -> None:
        """Looks at everything once a second, until cancelled."""
        while True:
            self._beat_at = time.monotonic()
            self.observe()
            await asyncio.sleep(INTERVAL_S)

    def observe(self) -> None:
        """Brings all metrics up to date."""
        self._observe_pool()
        self._observe_server()
        self._observe_transports()
        self._observe_directory()
        self._observe_cluster()
        self._placement.observe(self._metrics)
        if self._disk is not None:
            self._disk.observe(self._metrics)

    def _observe_pool(self) -> None:
        metrics, stats = self._metrics, self._pool.stats()
        by_state = {
            "used": stats.used_bytes,
            "free": stats.free_bytes,
            "quarantined": stats.quarantined_bytes,
            "spare": stats.spare_bytes,
            "unopened": stats.unopened_bytes,
        }
        for state, n_bytes in by_state.items():
            metrics.gauge("kvpeer_pool_bytes").labels(state=state).set(n_bytes)
        metrics.gauge("kvpeer_pool_pages").labels(state="committed").set(stats.n_committed)
        metrics.gauge("kvpeer_pool_pages").labels(state="writing").set(stats.n_writing)
        metrics.gauge("kvpeer_pool_pins").set(stats.n_pins)
        metrics.advance("kvpeer_pool_evicted_pages_total", stats.n_evicted)
        metrics.advance("kvpeer_pool_expired_pages_total", stats.n_expired)
        metrics.advance("kvpeer_pool_corrupt_pages_total", stats.n_corrupt)
        metrics.gauge("kvpeer_traces_kept").set(len(self._traces))
        metrics.gauge("kvpeer_traces_memory_bytes").set(self._traces.n_bytes)
        metrics.advance("kvpeer_traces_dropped_total", self._traces.n_dropped_by_engines)
        metrics.gauge("kvpeer_agent_clients").set(self._clients.n_clients)
        metrics.gauge("kvpeer_agent_namespaces").set(self._pool.n_cohorts)

    def _observe_server(self) -> None:
        metrics, stats, transport = self._metrics, self._server.stats(), self._peers.transport
        metrics.advance("kvpeer_transport_served_bytes_total", stats.bytes_sent, transport=transport)
        for outcome, n_pages in {"sent": stats.pages_sent, "stale": stats.pages_stale}.items():
            metrics.advance("kvpeer_transport_served_pages_total", n_pages, outcome=outcome, transport=transport)
        metrics.gauge("kvpeer_transport_served_connections").labels(transport=transport).set(stats.connections_open)
        refusals = {
            "refused": stats.connections_refused,
            "protocol": stats.protocol_errors,
            "timeout": stats.io_timeouts,
        }
        for reason, n in refusals.items():
            metrics.advance("kvpeer_transport_served_refusals_total", n, reason=reason, transport=transport)

    def _observe_transports(self) -> None:
        """By what pages are read from peers; as long as none is, by what they would be."""
        in_use, rails = self._peers.in_use(), self._peers.rails
        preferred = "verbs" if rails else "tcp"
        for name in ("tcp", "verbs"):
            self._metrics.gauge("kvpeer_transport_peers").labels(transport=name).set(in_use[name])
            is_active = in_use[name] > 0 or (not in_use and name == preferred)
            self._metrics.gauge("kvpeer_transport_active").labels(transport=name).set(is_active)
        n_lanes, n_out = self._peers.lanes()
        for state, n in {"in": n_lanes - n_out, "out": n_out}.items():
            self._metrics.gauge("kvpeer_transport_lanes").labels(state=state).set(n)
        if rails:
            n_open = sum(device.stats().connections_open for device in rails)
            self._metrics.gauge("kvpeer_transport_served_connections").labels(transport="verbs").set(n_open)

    def _observe_directory(self) -> None:
        metrics, stats = self._metrics, self._directory.shard.stats()
        metrics.gauge("kvpeer_directory_records").set(stats.records)
        metrics.gauge("kvpeer_directory_holders").set(stats.holders)
        metrics.gauge("kvpeer_directory_memory_bytes").set(stats.bytes)
        metrics.advance("kvpeer_directory_rejected_records_total", stats.full_rejections)
        metrics.advance("kvpeer_directory_dropped_holders_total", stats.dropped_holders)
        metrics.advance("kvpeer_directory_repairs_total", self._directory.n_repairs)
        metrics.advance("kvpeer_directory_send_failures_total", self._directory.n_send_failures)
        metrics.advance("kvpeer_directory_unpublished_pages_total", self._directory.publisher.n_not_published)

    def _observe_cluster(self) -> None:
        names = {
            MemberState.ALIVE: "alive",
            MemberState.SUSPECT: "suspect",
            MemberState.DEAD: "dead",
            MemberState.DRAINING: "draining",
        }
        machine = self._membership.machine
        self._metrics.advance("kvpeer_membership_join_failures_total", self._membership.n_join_failures)
        self._metrics.advance("kvpeer_membership_refused_members_total", machine.n_members_refused)
        self._metrics.advance("kvpeer_membership_refutations_total", machine.n_refutations)
        members = Counter(names.get(MemberState(update.state)) for update in machine.view())
        for name in names.values():
            self._metrics.gauge("kvpeer_membership_members").labels(state=name).set(members[name])
        peers = [AgentId(member.agent_id) for member in machine.alive()]
        labels = {"closed": BreakerState.CLOSED, "open": BreakerState.OPEN, "probing": BreakerState.HALF_OPEN}
        now = time.monotonic()
        for plane, breakers in self._breakers.items():
            states = Counter(breakers.state(peer, now) for peer in peers)
            for label, state in labels.items():
                self._metrics.gauge("kvpeer_breaker_peers").labels(plane=plane, state=label).set(states[state])
