"""Answers to people: what this agent knows, and with it what the other members know.

A peer that asks gets this agent's own part. Whoever asks at the engines' socket, or at the status page, gets the whole:
the other members are asked side by side, under one deadline, and what does not come is named. Belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from kvpeer.agent.directory import PeerRequests
from kvpeer.agent.membership import MembershipService
from kvpeer.agent.status import OwnStatus
from kvpeer.core.chain import page_key
from kvpeer.core.cohort_comparison import EngineGroup, compare
from kvpeer.core.explanation import explanation
from kvpeer.core.membership import MemberState
from kvpeer.core.traces import KEY_HASH_BYTES, Trace
from kvpeer.model import KEY_BYTES, AgentId, CapacityError, KvPeerError
from kvpeer.wire.messages import PAGE_HASH_BYTES, AgentInfo, Inspect, Inspected, PeerMessage

__all__ = ["SCHEMA", "Inspector"]

SCHEMA = 1
"""Of the reports. Fields may be added; whoever reads them skips what it does not know."""

ASK_TIMEOUT_S = 1.5
"""For a member to answer. Who does not is named as silent."""

ASK_ALL_TIMEOUT_S = 3.0
"""For all of them, however many are silent: people wait no longer than that."""

ASKED_AT_ONCE_MAX = 32
"""Members that are asked side by side: 200 of them in seven round trips."""

INSPECTIONS_MAX = 4
"""Questions of people under way at once; further ones are refused."""

REPORT_BYTES_MAX = 1 << 20
"""Of what a peer says of itself; it says a few kilobytes."""

FRESH_S = 2.0
"""A status of the cluster is made anew after so long: however many look at it, members are asked no more often."""

TRACES_MAX = 5
"""Traces in one answer about a key: the youngest."""

RECENT_OF_PEER_MAX = 10
PEERS_OF_PEER_MAX = 16
"""Decisions, and producers, that a peer tells of itself in a status: some 10 KiB, so that 300 members fit into a frame.
Those that fail come first."""

ANSWER_BYTES_MAX = 3 << 20
"""Of a status, for a frame of 4 MiB: beyond it, members are shown with their tiers and cohorts alone."""

COHORT_FIELDS = frozenset({"namespace", "description", "page_bytes", "n_parts", "engines", "pages"})

_STATES = {
    MemberState.ALIVE: "alive", MemberState.SUSPECT: "suspect", MemberState.DRAINING: "draining",
    MemberState.DEAD: "dead", MemberState.LEFT: "left",
}  # fmt: skip


class Inspector:
    """See the module docstring."""

    def __init__(self, own: OwnStatus, membership: MembershipService, links: PeerRequests) -> None:
        self._own = own
        self._membership = membership
        self._links = links
        self._n_under_way = 0
        self._status: asyncio.Future[dict[str, Any]] | None = None
        self._status_at = 0.0
        self._loop = asyncio.get_running_loop()

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what peers ask."""
        return {Inspect: self._answer_peer}

    async def answer(self, question: Inspect) -> Inspected:
        """The answer to somebody at this agent, with what the other members say.

        Raises:
            CapacityError: as many questions as may be are under way.
        """
        if self._n_under_way >= INSPECTIONS_MAX:
            raise CapacityError(f"{INSPECTIONS_MAX} questions are being answered; ask again in a second")
        self._n_under_way += 1
        try:
            report = await (self.status() if question.topic == "status" else self._explain(self._in_keys(question)))
        finally:
            self._n_under_way -= 1
        encoded = msgspec.json.encode(report)
        if len(encoded) > ANSWER_BYTES_MAX:
            encoded = msgspec.json.encode(_shortened(report))
        return Inspected(encoded)

    async def status(self) -> dict[str, Any]:
        """The cluster as this agent and its members see it, at most FRESH_S old."""
        now = self._own.clock()
        if self._status is None or (self._status.done() and now - self._status_at > FRESH_S):
            self._status = asyncio.ensure_future(self._make_status())
            self._status_at = now
        return await asyncio.shield(self._status)

    def status_from_thread(self) -> Future[dict[str, Any]]:
        """The same, for another thread to wait for. Raises RuntimeError when the loop is closed."""
        asking = self.status()
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:
            asking.close()
            raise

    # ---- status

    async def _make_status(self) -> dict[str, Any]:
        own = self._own.report()
        told = await self._ask_all(Inspect("status"), self._others())
        self._status_at = self._own.clock()
        members = [
            {
                "id": update.info.agent_id.hex(), "name": update.info.name, "host": update.info.host,
                "state": _STATES.get(MemberState(update.state), "unknown"),
                "status": own if update.info.agent_id == self._own.view.own_id
                else told.get(AgentId(update.info.agent_id)),
            }
            for update in self._membership.machine.view()
        ]  # fmt: skip
        if not any(member["status"] is own for member in members):
            who = {"id": own["id"], "name": own["name"], "host": own["host"]}
            members.insert(0, {**who, "state": "alive", "status": own})
        return {
            "schema": SCHEMA,
            "at": time.time(),
            "cluster": self._own.config.agent.cluster,
            "asked": {"id": own["id"], "name": own["name"]},
            "members": members,
            "cohorts": compare(_groups(members)),
            "problems": _problems(members),
        }

    # ---- explain

    async def _explain(self, question: Inspect) -> dict[str, Any]:
        own = self._explain_here(question)
        told = await self._ask_all(question, self._to_ask(question, own))
        asked = [self._of(own), *[self._of(report, agent_id) for agent_id, report in told.items()]]
        return {
            "schema": SCHEMA,
            "subject": question.subject,
            "keys": len(question.keys) // KEY_BYTES,
            "agents": [report for report in asked if report["traces"] or report["holds"] or report["id"] == own["id"]],
            "silent": [agent_id.hex() for agent_id, report in told.items() if report is None],
            "names": {info.agent_id.hex(): info.name for info in self._membership.alive_infos()}
            | {own["id"]: own["name"]},
        }

    def _in_keys(self, question: Inspect) -> Inspect:
        """A question about a prompt, as one about keys. Nothing is known of a namespace without a digest like that."""
        if question.topic != "prompt":
            return question
        namespaces = [cohort.namespace for cohort in self._own.pool.cohorts() if cohort.n_clients or cohort.n_pages]
        chosen = [namespace for namespace in namespaces if namespace.hex().startswith(question.subject)][:1]
        starts = range(0, len(question.keys) // PAGE_HASH_BYTES * PAGE_HASH_BYTES, PAGE_HASH_BYTES)
        hashes = [question.keys[start : start + PAGE_HASH_BYTES] for start in starts]
        keys = b"".join(page_key(namespace, page) for namespace in chosen for page in hashes)
        return Inspect("explain", keys=keys)

    def _to_ask(self, question: Inspect, own: dict[str, Any]) -> list[AgentId]:
        """The agents that the traces name; all, if there is none or it is about pages."""
        others = self._others()
        if question.keys or not own["traces"] or len(question.subject) == 2 * KEY_BYTES:
            return others
        named = {who["agent"] for trace in own["traces"] for who in (*trace["holders"], *trace["moved"])}
        return [agent_id for agent_id in others if agent_id.hex() in named]

    def _explain_here(self, question: Inspect) -> dict[str, Any]:
        own, now = self._own, self._own.clock()
        traces = self._traces_of(question.subject or question.keys[:KEY_HASH_BYTES].hex())
        return {
            "id": own.info.agent_id.hex(),
            "name": own.info.name,
            "traces": [explanation(trace, own.config.transport.verify, now) for trace in traces],
            "holds": self._holds(question.keys or _key_of(question.subject)),
        }

    def _traces_of(self, subject: str) -> list[Trace]:
        """By the request's id or a beginning of it, else by the short hash of a key."""
        ring = self._own.traces
        found = ring.get(subject)
        if not subject:
            return []
        if found is not None:
            return [found]
        begun = [trace for trace in ring if trace.request.startswith(subject)][:TRACES_MAX]
        key_hash = _hex(subject[: 2 * KEY_HASH_BYTES]) if len(subject) in (2 * KEY_HASH_BYTES, 2 * KEY_BYTES) else b""
        return begun or (ring.of_key(key_hash)[:TRACES_MAX] if key_hash else [])

    def _holds(self, keys: bytes) -> dict[str, Any] | None:
        """How many of these pages are here, and how many of the first ones in a row; None if there is none."""
        n = len(keys) // KEY_BYTES
        split = [keys[at : at + KEY_BYTES] for at in range(0, n * KEY_BYTES, KEY_BYTES)]
        store = self._own.disk.store if self._own.disk is not None else None
        tiers = ["pool" if self._own.pool.has(key) else "disk" if store and store.find(key) else "" for key in split]
        if not any(tiers):
            return None
        leading = next((place for place, tier in enumerate(tiers) if not tier), n)
        return {"pages": n, "pool": tiers.count("pool"), "disk": tiers.count("disk"), "leading": leading}

    # ---- asking others

    def _others(self) -> list[AgentId]:
        return sorted(self._own.view.alive - {self._own.view.own_id})

    async def _answer_peer(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, Inspect)  # noqa: S101 - what it is registered for
        report = (
            self._own.report(RECENT_OF_PEER_MAX, PEERS_OF_PEER_MAX)
            if message.topic == "status"
            else self._explain_here(message)
        )
        return Inspected(msgspec.json.encode(report))

    async def _ask_all(self, question: Inspect, agents: list[AgentId]) -> dict[AgentId, dict[str, Any] | None]:
        """What each of them says; None of those that did not answer in time."""
        places, deadline = asyncio.Semaphore(ASKED_AT_ONCE_MAX), self._own.clock() + ASK_ALL_TIMEOUT_S

        async def ask(agent_id: AgentId) -> dict[str, Any] | None:
            async with places:
                left_s = deadline - self._own.clock()
                return await self._ask(agent_id, question, min(ASK_TIMEOUT_S, left_s)) if left_s > 0 else None

        answers = await asyncio.gather(*[ask(agent_id) for agent_id in agents])
        return dict(zip(agents, answers, strict=True))

    async def _ask(self, agent_id: AgentId, question: Inspect, timeout_s: float) -> dict[str, Any] | None:
        try:
            answer = await self._links.request(agent_id, question, timeout_s)
            if not isinstance(answer, Inspected) or len(answer.report) > REPORT_BYTES_MAX:
                return None
            report = msgspec.json.decode(answer.report)
        except (KvPeerError, msgspec.DecodeError):
            return None
        return report if isinstance(report, dict) else None

    @staticmethod
    def _of(report: dict[str, Any] | None, agent_id: AgentId | None = None) -> dict[str, Any]:
        """A peer's report with the fields that are read here, whatever its release."""
        known = report or {}
        return {
            "id": known.get("id") or (agent_id.hex() if agent_id is not None else ""),
            "name": known.get("name") or "",
            "traces": known.get("traces") or [],
            "holds": known.get("holds"),
        }


def _shortened(report: dict[str, Any]) -> dict[str, Any]:
    """The status of a cluster that is too large to be told whole."""
    details: dict[str, Any] = {"recent": [], "prefixes": [], "peers": []}
    members = [
        {**member, "status": {**member["status"], **details}} if member["status"] else member
        for member in report.get("members", ())
    ]
    return {**report, "members": members}


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _key_of(subject: str) -> bytes:
    return _hex(subject) if len(subject) == 2 * KEY_BYTES else b""


def _groups(members: list[dict[str, Any]]) -> list[EngineGroup]:
    return [
        EngineGroup(
            member["name"], cohort["namespace"], cohort["description"], cohort["page_bytes"], cohort["n_parts"],
            cohort["engines"], cohort["pages"],
        )
        for member in members if member["status"]
        for cohort in member["status"].get("cohorts", ())
        if cohort.keys() >= COHORT_FIELDS
    ]  # fmt: skip


def _problems(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What members say, and what only the whole shows."""
    problems = [
        {"agent": member["name"], **problem}
        for member in members if member["status"]
        for problem in member["status"].get("problems", ())
    ]  # fmt: skip
    for member in members:
        if member["status"] is None and member["state"] in ("alive", "suspect", "draining"):
            problems.append(
                {
                    "agent": member["name"], "name": "member_silent", "severity": "problem", "subject": member["id"],
                    "meaning": "It is a member and did not answer in time, or runs another release.",
                    "fix": "See its log and /healthz, and the control port between the two agents.",
                }
            )  # fmt: skip
    versions = sorted({member["status"].get("version", "") for member in members if member["status"]})
    if len(versions) > 1:
        problems.append(
            {
                "agent": "", "name": "versions_differ", "severity": "note", "subject": ", ".join(versions),
                "meaning": "Agents of several releases run.", "fix": "Finish the roll-out.",
            }
        )  # fmt: skip
    return problems
