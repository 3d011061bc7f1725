"""What one agent says of itself to people and to its peers: plain values, cheap enough to be asked for every second.

Everything here may be shown to whoever reaches the metrics: no page keys, no prompt, no secrets of a namespace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpeer import __version__
from kvpeer.agent.config import AgentConfig
from kvpeer.agent.disk import DiskTier
from kvpeer.agent.placement import Placement
from kvpeer.agent.pool import CohortStatus, PoolService
from kvpeer.core.breaker import Breakers, BreakerState
from kvpeer.core.cohort_comparison import shown
from kvpeer.core.disk import Condition
from kvpeer.core.explanation import summary
from kvpeer.core.pairs import Pair, PairLedger
from kvpeer.core.topology import Severity
from kvpeer.core.traces import KEY_HASH_BYTES, Trace, TraceRing
from kvpeer.core.view import ClusterView
from kvpeer.model import AgentId, Outcome
from kvpeer.native import Pool
from kvpeer.wire.messages import AgentInfo

__all__ = ["OwnStatus"]

RECENT_MAX = 50
"""Decisions that an agent shows of itself; a screen has room for fewer."""

PEERS_MAX = 1024
"""Producers that an agent shows of itself: all that it may know."""

PREFIXES_MAX = 10
"""Prefixes, the most wanted ones."""

COUNT_PAGES_S = 10.0
"""Between two countings of the pages of each namespace, which takes some 10 ms for 100,000 of them."""

RECENT_S = 600.0
"""Decisions that count in the sums: of the last ten minutes, as far as the ring reaches."""

REQUEST_CHARS_MAX = 64
"""Of a request's id: enough to ask `kvpeer explain` about it, which takes a beginning."""

CORRUPT_FIX = "See the agent's log: memory that rots is replaced; an engine that scribbles is restarted."
DISK_FIX = "See docs/disk.md and the agent's log; the pool and peers go on without it."
PEER_FIX = "See that agent's log and the network between: ports of the control and data channels, certificates, CPU."


@dataclass(slots=True, eq=False)
class OwnStatus:
    """The parts of an agent that have something to say. Belongs to one event loop."""

    info: AgentInfo
    config: AgentConfig
    native_pool: Pool
    pool: PoolService
    disk: DiskTier | None
    placement: Placement
    view: ClusterView
    breakers: Mapping[str, Breakers]
    pairs: PairLedger
    traces: TraceRing
    transport: Callable[[], str]
    health: Callable[[], str]
    clock: Callable[[], float]
    started_at: float
    _counted: list[CohortStatus] = field(default_factory=list)
    _counted_at: float = -math.inf

    def report(self, recent_max: int = RECENT_MAX, peers_max: int = PEERS_MAX) -> dict[str, Any]:
        """This agent's part of a status; docs/status.md has the fields. A millisecond or two."""
        now, config = self.clock(), self.config
        recent = [trace for trace in self.traces if now - trace.began_at < RECENT_S]
        return {
            "id": self.info.agent_id.hex(),
            "name": self.info.name,
            "host": self.info.host,
            "version": __version__,
            "uptime_s": round(now - self.started_at, 1),
            "verify": config.transport.verify,
            "security": config.security.mode,
            "transport": self.transport(),
            "health": self.health(),
            "tiers": {"pool": self._pool(), "disk": self._disk()},
            "cohorts": self._cohorts(now),
            "peers": self._peers(now)[:peers_max],
            "decisions": dict(Counter(_reason(trace) for trace in recent)),
            "prefixes": _prefixes(recent),
            "recent": [_line(trace, now) for trace in recent[:recent_max]],
            "problems": self._problems(now),
            "traces": {
                "kept": len(self.traces), "bytes": self.traces.n_bytes, "dropped": self.traces.n_dropped_by_engines,
            },
        }  # fmt: skip

    # ---- parts

    def _pool(self) -> dict[str, Any]:
        stats = self.pool.stats()
        return {
            "capacity_bytes": self.native_pool.payload_bytes,
            "used_bytes": stats.used_bytes,
            "unopened_bytes": stats.unopened_bytes,
            "pages": stats.n_committed,
            "pins": stats.n_pins,
            "evicted_pages": stats.n_evicted,
        }

    def _disk(self) -> dict[str, Any] | None:
        if self.disk is None:
            return None
        store = self.disk.store
        return {
            "capacity_bytes": self.config.disk.size_bytes,
            "used_bytes": store.used_bytes,
            "pages": store.n_pages,
            "condition": store.condition.value,
        }

    def _cohorts(self, now: float) -> list[dict[str, Any]]:
        if now - self._counted_at > COUNT_PAGES_S or self.pool.n_cohorts != len(self._counted):
            self._counted, self._counted_at = self.pool.cohorts(), now
        return [
            {
                "namespace": cohort.namespace.hex()[:16], "description": shown(cohort.description),
                "page_bytes": cohort.page_bytes, "n_parts": cohort.n_parts, "engines": cohort.n_clients,
                "pages": cohort.n_pages,
            }
            for cohort in self._counted
        ]  # fmt: skip

    def _peers(self, now: float) -> list[dict[str, Any]]:
        """Those that something is known of: pages were asked for, or a breaker is not closed. First those that fail,
        then those that most was read from."""
        peers = []
        for agent_id in self.view.alive - {self.view.own_id}:
            states = {plane: breakers.state(agent_id, now).value for plane, breakers in self.breakers.items()}
            pair = self.pairs.get(agent_id)
            peer = {"id": agent_id.hex(), "breakers": states, **_pair(pair or Pair(), now)}
            if pair is not None or _is_avoided(peer):
                peers.append(peer)
        return sorted(peers, key=lambda peer: (not (peer["error"] or _is_avoided(peer)), -peer["bytes"]))

    def _problems(self, now: float) -> list[dict[str, str]]:
        problems = [
            _problem(found.name.value, ", ".join(found.subjects), found.meaning, found.fix, found.severity.value)
            for found in self.placement.problems
        ]
        if reason := self.health():
            problems.append(_problem("unhealthy", "", f"The agent is not healthy: {reason}.", "See the agent's log."))
        if self.disk is not None and self.disk.store.condition not in (Condition.OK, Condition.OPENING):
            condition = self.disk.store.condition.value
            problems.append(_problem(f"disk_{condition}", "", "The disk tier is not in use as it should be.", DISK_FIX))
        if n_corrupt := self.pool.stats().n_corrupt:
            problems.append(
                _problem("corrupt_pages", str(n_corrupt), "Pages had other bytes than written.", CORRUPT_FIX)
            )
        for agent_id in sorted(self.view.alive - {self.view.own_id}):
            if failing := self._failing(agent_id, now):
                info = self.view.info(agent_id)
                name = info.name if info is not None else agent_id.hex()
                meaning = f"It fails repeatedly when asked for {failing}, and is left alone for a while."
                problems.append(_problem("peer_failing", name, meaning, PEER_FIX))
        return problems

    def _failing(self, agent_id: AgentId, now: float) -> str:
        asked = {"lookup": "locations", "data": "pages"}
        failing = [
            asked.get(plane, plane) for plane, breakers in self.breakers.items()
            if breakers.state(agent_id, now) is not BreakerState.CLOSED
        ]  # fmt: skip
        return " and ".join(failing)


def _problem(name: str, subject: str, meaning: str, fix: str, severity: str = Severity.PROBLEM.value) -> dict[str, str]:
    return {"name": name, "severity": severity, "subject": subject, "meaning": meaning, "fix": fix}


def _is_avoided(peer: Mapping[str, Any]) -> bool:
    return any(state != BreakerState.CLOSED.value for state in peer["breakers"].values())


def _pair(pair: Pair, now: float) -> dict[str, Any]:
    return {
        "transport": pair.transport,
        "pages": pair.outcomes[Outcome.HIT],
        "failed_pages": sum(pair.outcomes) - pair.outcomes[Outcome.HIT],
        "bytes": pair.n_bytes,
        "rate_bytes_per_s": round(pair.rate_bytes_per_s or (pair.n_bytes / pair.seconds if pair.seconds else 0)),
        "latency_s": round(pair.latency_s, 6),
        "last_s": round(now - pair.last_at, 1) if pair.n_fetches else None,
        "error": pair.last_error,
    }


def _reason(trace: Trace) -> str:
    return trace.verdict.reason if trace.verdict is not None else "unknown"


def _line(trace: Trace, now: float) -> dict[str, Any]:
    verdict = trace.verdict
    return {
        "request": trace.request[:REQUEST_CHARS_MAX],
        "age_s": round(now - trace.began_at, 1),
        "reason": _reason(trace),
        "outcome": verdict.outcome if verdict is not None else "",
        "prompt_tokens": verdict.prompt_tokens if verdict is not None else 0,
        "loaded_tokens": verdict.loaded_tokens if verdict is not None else 0,
        "load_s": verdict.load_us / 1e6 if verdict is not None else 0.0,
        "sources": [producer.hex() for producer, _ in trace.moves],
        "summary": summary(trace),
    }


def _prefixes(traces: list[Trace]) -> list[dict[str, Any]]:
    """The first pages that most requests had in common, by the short hash of their keys."""
    wanted: Counter[bytes] = Counter()
    hits: Counter[bytes] = Counter()
    for trace in traces:
        first = trace.key_hashes[:KEY_HASH_BYTES]
        if first:
            wanted[first] += 1
            hits[first] += trace.outcomes[Outcome.HIT]
    return [
        {"key": first.hex(), "requests": n, "fetched_pages": hits[first]}
        for first, n in wanted.most_common(PREFIXES_MAX)
        if n > 1
    ]
