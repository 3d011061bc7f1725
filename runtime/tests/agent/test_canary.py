"""Two doctors on loopback: what they measure, and what they say when it does not work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvpeer.agent.config import load
from kvpeer.agent.doctor import canary
from kvpeer.agent.doctor.canary import Doctor
from kvpeer.agent.facts import read_facts
from kvpeer.model import PeerUnavailableError
from link_nodes import DEADLINE_S, HOST, SECRET
from whole_agents import WholeAgent, with_agents


@contextlib.asynccontextmanager
async def doctors(*secrets: str) -> AsyncIterator[list[Doctor]]:
    made = []
    for idx, secret in enumerate(secrets):
        env = {"KVPEER_AGENT_HOST": HOST, "KVPEER_AGENT_NAME": f"doctor-{idx}", "KVPEER_SECURITY_SECRET": secret}
        made.append(Doctor(load(None, env), 0))
        made[-1].start()
    try:
        yield made
    finally:
        for one in made:
            await one.close()


def run(scenario: object) -> None:
    asyncio.run(asyncio.wait_for(scenario, 3 * DEADLINE_S))  # type: ignore[arg-type]


def test_a_canary_comes_through_both_ways_and_is_measured() -> None:
    async def scenario() -> None:
        async with doctors(SECRET, SECRET) as (one, other):
            info, from_there, from_here = await one.examine(HOST, other.info.control_port)
        assert info.name == "doctor-1"
        for result in (from_there, from_here):
            assert (result.error, result.transport) == ("", "tcp")
            assert 0 < result.latency_s < canary.READ_DEADLINE_S
            assert result.rate_bytes_per_s > 1e6

    run(scenario())


def test_a_damaged_page_is_an_error_of_that_way_alone() -> None:
    async def scenario() -> None:
        async with doctors(SECRET, SECRET) as (one, other):
            other._pool.payload_view()[canary.LARGE_BYTES] ^= 1
            _, from_there, from_here = await one.examine(HOST, other.info.control_port)
        assert "corrupt" in from_there.error
        assert from_here.error == ""

    run(scenario())


def test_a_doctor_of_another_cluster_is_refused() -> None:
    async def scenario() -> None:
        async with doctors(SECRET, "cd" * 32) as (one, other):
            with pytest.raises(PeerUnavailableError, match="no agent to join"):
                await one.examine(HOST, other.info.control_port)

    run(scenario())


def test_an_agent_refuses_a_doctor_and_does_not_take_it_for_a_member(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        secret = (tmp_path / "run/secret").read_text()
        async with doctors(secret.strip()) as (one,):
            with pytest.raises(PeerUnavailableError, match="is of cluster 'default/doctor', not of 'default'"):
                await one.examine(HOST, agent.agent.info.control_port)
        assert agent.n_members == 1

    with_agents(tmp_path, "agent", scenario)


def test_the_facts_of_this_host_can_be_had() -> None:
    facts = read_facts()
    assert facts.is_memfd_sealable
    assert facts.memory_left_bytes
    assert facts.seccomp in ("off", "strict", "filter")
