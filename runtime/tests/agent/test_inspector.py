"""Agents that are asked about requests, pages and the cluster: by people at their socket, and by each other."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from kvpeer.agent.inspector import INSPECTIONS_MAX
from kvpeer.agent.requests import Client
from kvpeer.wire.codec import decode_client, encode
from kvpeer.wire.framing import FrameKind, FrameReader, pack_frame
from kvpeer.wire.messages import Fetch, Inspect, Inspected, Locate, Refusal, RequestTrace, Traced
from whole_agents import NAMESPACE, PAGE_BYTES, WholeAgent, chain_of, with_agents

NUMBERS = tuple(range(40))


async def ask(agent: WholeAgent, question: Inspect) -> dict[str, Any]:
    """What the agent answers at its socket."""
    message = await asked(agent, question)
    assert isinstance(message, Inspected)
    return dict(json.loads(message.report))


async def asked(agent: WholeAgent, question: Inspect) -> object:
    reader, writer = await asyncio.open_unix_connection(agent.agent.config.agent.socket)
    writer.write(pack_frame(FrameKind.REQUEST, 1, encode(question), 5000))
    frames = FrameReader()
    while not (found := frames.feed(await reader.read(1 << 20))):
        pass
    writer.close()
    return decode_client(found[0].body)


def verdict(request: str, producer: WholeAgent) -> RequestTrace:
    n_tokens = len(NUMBERS) * 16
    return RequestTrace(
        request, n_tokens + 1, 16, PAGE_BYTES, 0, 0, n_tokens, bytes(producer.id), n_tokens.to_bytes(4, "little"), 8,
        "", "decision.pull", n_tokens, 1_000_000, bytes(producer.id), 5000, 100, 90_000, True, "loaded", n_tokens, 6000,
        0,
    )  # fmt: skip


async def pull(reader: WholeAgent, producer: WholeAgent, request: str) -> None:
    await producer.publish(*NUMBERS)
    await reader.finds(*NUMBERS)
    assert await reader.pull(*NUMBERS, request=request) == ["HIT"] * len(NUMBERS)
    reader.agent._traces.told(NAMESPACE, [verdict(request, producer)], 0, reader.agent._inspector._own.clock())


def test_an_agent_explains_a_request_with_what_moved_from_whom(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await pull(reader, producer, "request-1")
        answer = await ask(reader, Inspect("explain", "request-1"))
        (agent,) = answer["agents"]
        (trace,) = agent["traces"]
        assert trace["moved"] == [{**trace["moved"][0], "agent": producer.id.hex(), "transport": "tcp", "hit": 40}]
        assert trace["moved"][0]["bytes"] == 40 * PAGE_BYTES
        assert trace["summary"].startswith("loaded: 640 of 640 wanted tokens")
        assert answer["names"][producer.id.hex()] == "producer"

    with_agents(tmp_path, "reader producer", scenario)


def test_what_an_engine_asks_fetches_and_tells_is_in_one_trace(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(*NUMBERS)
        await reader.finds(*NUMBERS)
        requests, engine, chain = reader.agent._clients._requests, Client(7, "e", reader.cohort, 0), chain_of(*NUMBERS)
        for question in (Locate("r", 0, chain.keys, chain.anchors), Fetch("r", 0, chain.keys, chain.anchors)):
            await requests.answer(engine, question, time.monotonic() + 10)
        requests.notice(engine, Traced([verdict("r", producer)], 2))
        (trace,) = (await ask(reader, Inspect("explain", "r")))["agents"][0]["traces"]
        assert {step["step"] for step in trace["steps"]} == {"locate", "fetch", "pull", "decide"}
        assert (trace["verified"]["hit"], trace["moved"][0]["hit"]) == (40, 40)
        assert trace["outcome"]["result"] == "loaded"
        assert reader.agent._traces.n_dropped_by_engines == 2

    with_agents(tmp_path, "reader producer", scenario)


def test_any_agent_explains_a_request_of_another_one_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await pull(reader, producer, "request-1")
        answer = await ask(producer, Inspect("explain", "request"))
        traces = {agent["name"]: [trace["request"] for trace in agent["traces"]] for agent in answer["agents"]}
        assert traces == {"producer": [], "reader": ["request-1"]}

    with_agents(tmp_path, "reader producer", scenario)


def test_agents_say_who_holds_a_page_and_how_much_of_a_prompt(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(*NUMBERS)
        key = chain_of(NUMBERS[0]).keys
        answer = await ask(reader, Inspect("explain", key.hex()))
        assert {agent["name"]: agent["holds"] for agent in answer["agents"]} == {
            "reader": None,
            "producer": {"pages": 1, "pool": 1, "disk": 0, "leading": 1},
        }
        answer = await ask(reader, Inspect("explain", keys=chain_of(*NUMBERS, 99).keys))
        assert answer["agents"][1]["holds"] == {"pages": 41, "pool": 40, "disk": 0, "leading": 40}

    with_agents(tmp_path, "reader producer", scenario)


def test_a_status_has_all_members_with_their_tiers_peers_and_cohorts(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await pull(reader, producer, "request-1")
        answer = await ask(producer, Inspect("status"))
        members = {member["name"]: member for member in answer["members"]}
        assert {name: member["state"] for name, member in members.items()} == {"reader": "alive", "producer": "alive"}
        (peer,) = members["reader"]["status"]["peers"]
        assert (peer["id"], peer["pages"], peer["failed_pages"]) == (producer.id.hex(), 40, 0)
        assert peer["breakers"] == {"lookup": "closed", "data": "closed"}
        assert members["producer"]["status"]["tiers"]["pool"]["pages"] == 40
        assert members["reader"]["status"]["decisions"] == {"decision.pull": 1}
        (cohort,) = answer["cohorts"]
        assert (cohort["engines"], cohort["agents"]) == (2, ["producer", "reader"])
        assert reader.count("kvpeer_agent_client_refusals_total", reason="refused") == 0

    with_agents(tmp_path, "reader producer", scenario)


def test_a_member_that_does_not_answer_is_a_problem_by_name(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        async def unanswered(*_: object) -> dict[str, Any] | None:
            return None

        reader.agent._inspector._ask = unanswered  # type: ignore[method-assign]
        answer = await ask(reader, Inspect("status"))
        assert [
            (found["name"], found["agent"]) for found in answer["problems"] if found["name"] == "member_silent"
        ] == [("member_silent", "producer")]

    with_agents(tmp_path, "reader producer", scenario)


def test_the_status_of_a_cluster_that_fits_into_no_frame_is_told_without_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await pull(reader, producer, "request-1")
        monkeypatch.setattr("kvpeer.agent.inspector.ANSWER_BYTES_MAX", 1000)
        answer = await ask(reader, Inspect("status"))
        for member in answer["members"]:
            assert member["status"]["tiers"]["pool"]["pages"] == 40
            assert (member["status"]["recent"], member["status"]["peers"]) == ([], [])

    with_agents(tmp_path, "reader producer", scenario)


def test_more_questions_than_may_be_under_way_are_refused(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        agent.agent._inspector._n_under_way = INSPECTIONS_MAX
        refused = await asked(agent, Inspect("status"))
        assert isinstance(refused, Refusal)
        assert refused.code == "busy"

    with_agents(tmp_path, "alone", scenario)


def test_a_question_makes_no_client(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(agent.agent.config.agent.socket)
            await ask(agent, Inspect("explain", "nobody"))
        assert agent.agent._clients.n_clients == 0

    with_agents(tmp_path, "alone", scenario)
