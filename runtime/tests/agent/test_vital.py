"""An agent that lost a part that it cannot go on without stops, loudly: it does not live on and look healthy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpeer.agent.tasks import BackgroundTasks
from kvpeer.metrics import build
from kvpeer.model import InternalError, LocalProtocolError
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import Message, Reset
from link_nodes import DEADLINE_S
from prometheus_client import CollectorRegistry
from whole_agents import HELLO, WholeAgent, chain_of, with_agents

LONE_OWNERS = {"directory.replicas": "1"}
"""So that half of all lookups go to the other agent."""


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


async def stops(agent: WholeAgent, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """The agent ends by itself, says so, and calls itself unhealthy until then."""
    await asyncio.wait_for(agent.agent.stopped(), DEADLINE_S)
    assert why in agent.agent.failure
    assert why in agent.agent.health()
    assert any(record.levelno == logging.CRITICAL and why in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("part", ["_membership.machine.tick", "_directory.publisher.tick", "_observer.observe"])
def test_a_vital_task_that_dies_stops_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    async def scenario(agent: WholeAgent) -> None:
        *path, name = part.split(".")
        owner: Any = agent.agent
        for step in path:
            owner = getattr(owner, step)
        monkeypatch.setattr(owner, name, raises(RuntimeError("a bug in a task")))
        await stops(agent, caplog, "a bug in a task")

    with_agents(tmp_path, "agent", scenario)


async def send(agent: WholeAgent, message: Message) -> None:
    """Sends one request as a client and waits for the connection's end or an answer."""
    reader, writer = await asyncio.open_unix_connection(agent.agent.config.agent.socket)
    for number, each in enumerate((HELLO, message), start=1):
        writer.write(pack_frame(FrameKind.REQUEST, number, encode(each), 5000))
        await reader.read(1 << 16)
    writer.transport.abort()


def test_a_pool_that_cannot_follow_its_table_stops_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1)
        refusal = LocalProtocolError("an argument breaks the contract")
        monkeypatch.setattr(agent.pool.native, "mark_withdrawn", raises(refusal))
        asking = asyncio.ensure_future(send(agent, Reset("test")))
        await stops(agent, caplog, "disagree")
        await asking
        monkeypatch.undo()

    with_agents(tmp_path, "agent", scenario)


def test_an_error_in_the_pools_timer_stops_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(agent: WholeAgent) -> None:
        monkeypatch.setattr(agent.pool._table, "tick", raises(KeyError("a slot")))
        await agent.publish(1)
        agent.pool.pin(1, chain_of(1).keys)
        await stops(agent, caplog, "a slot")
        monkeypatch.undo()

    with_agents(tmp_path, "agent", scenario, agent={"pool.pin_ttl": "100ms"})


def test_an_internal_error_in_a_request_of_a_peer_stops_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(asker: WholeAgent, agent: WholeAgent) -> None:
        monkeypatch.setattr(agent.agent._directory.shard, "lookup", raises(InternalError("a broken invariant")))
        for number in range(32):
            await asker.locate(number)
        await stops(agent, caplog, "a broken invariant")

    with_agents(tmp_path, "asker agent", scenario, asker=LONE_OWNERS, agent=LONE_OWNERS)


def test_other_errors_of_a_request_cost_the_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(asker: WholeAgent, agent: WholeAgent) -> None:
        monkeypatch.setattr(agent.agent._directory.shard, "lookup", raises(RuntimeError("a bug")))
        for number in range(32):
            await asker.locate(number)
        assert agent.count("kvpeer_agent_task_failures_total", task="serve Lookup") > 0
        assert agent.agent.health() == ""

    with_agents(tmp_path, "asker agent", scenario, asker=LONE_OWNERS, agent=LONE_OWNERS)


@pytest.mark.parametrize(("is_vital", "is_told"), [(True, True), (False, False)])
def test_vital_work_that_just_ends_is_as_bad_as_an_error(is_vital: bool, is_told: bool) -> None:
    async def body() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

        async def ends() -> None:
            return

        await BackgroundTasks(build(CollectorRegistry())).spawn("short", ends(), is_vital=is_vital)
        assert bool(told) == is_told

    asyncio.run(body())
