"""`kvpeer explain` and `kvpeer status` against agents that serve, as people see them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from kvpeer.cli import main
from kvpeer.core.block_hashes import block_hashes
from kvpeer.core.chain import Chain, namespace_digest
from kvpeer.wire.messages import ClientHello
from test_inspector import pull
from whole_agents import PAGE_BYTES, WholeAgent, with_agents

FIELDS = {"engine": "vllm", "hash": "sha256:vllm-none-hash", "page_tokens": "4", "weights": "w"}


async def kvpeer(agent: WholeAgent, *arguments: str) -> int:
    """Runs the command beside the agents; its exit status."""
    return await asyncio.to_thread(main, [*arguments, "--socket", agent.agent.config.agent.socket])


def test_explain_says_of_a_pull_who_held_what_what_moved_and_how_long_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await pull(reader, producer, "request-1")
        assert await kvpeer(reader, "explain", "request-1") == 0
        name = f"producer ({producer.id.hex()[:8]})"
        said = capsys.readouterr().out
        assert "loaded: 640 of 640 wanted tokens in 0.006 s, 40 pages from peers" in said
        assert f"{name} with its pages the prefix reaches 640 tokens" in said
        assert "decided: decision.pull" in said
        assert "estimated (measured): a pull 5 ms +- 100 us, computing 90 ms" in said
        assert f"{name}: 40 pages, 640 KiB by tcp in" in said
        assert await kvpeer(reader, "explain", "request-1", "--json") == 0
        assert json.loads(capsys.readouterr().out)["agents"][0]["traces"][0]["request"] == "request-1"

    with_agents(tmp_path, "reader producer", scenario)


def test_explain_says_why_nothing_was_found_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(agent: WholeAgent) -> None:
        ring, now = agent.agent._traces, agent.agent._inspector._own.clock()
        ring.located("r", b"n" * 32, b"k" * 16, [1, 0, 0], "no_members", [], now, now)
        ring.unasked("r", b"n" * 32, b"k" * 16, [("no_room", 1)], now)
        assert await kvpeer(agent, "explain", "r") == 0
        said = capsys.readouterr().out
        assert "locate.no_members (1 pages)" in said
        assert "-> Start another engine with an agent, or give this one the right seeds." in said
        assert "-> Raise pool.size" in said

    with_agents(tmp_path, "alone", scenario)


def test_explain_finds_the_pages_of_a_prompt_by_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        tokens, namespace = list(range(17)), namespace_digest(FIELDS)
        for agent in (reader, producer):
            agent.cohort = agent.pool.join(ClientHello("e", namespace, FIELDS, PAGE_BYTES, 1, 0, 0, PAGE_BYTES))
        chain = Chain(namespace)
        chain.extend(block_hashes(tokens, 4, "sha256", "vllm-none-hash")[:3])
        await producer.publish_chain(chain.slice(0, 3))
        (tmp_path / "tokens.json").write_text(json.dumps(tokens))
        asked = ("explain", "--prompt-tokens", str(tmp_path / "tokens.json"), "--namespace", namespace.hex()[:6])
        assert await kvpeer(reader, *asked) == 0
        assert capsys.readouterr().out.splitlines()[-1].split() == ["producer", "3", "0", "3", "of", "4"]
        assert await kvpeer(reader, *asked[:-1], "ffff") == 2
        assert "those in use are" in capsys.readouterr().err

    with_agents(tmp_path, "reader producer", scenario)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "explain takes a request's id or a page's key, or --prompt-tokens FILE"),
        (["r", "--prompt-tokens", "x"], "explain takes a request's id"),
        (["--prompt-tokens", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_a_wrong_question_is_refused_with_what_is_meant(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    assert fault in capsys.readouterr().err


def test_without_an_agent_the_places_that_were_tried_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "r", "--socket", str(tmp_path / "nobody")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "nobody") in said
    assert "name its socket with --socket" in said


def test_of_what_nobody_knows_explain_says_so_and_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(agent: WholeAgent) -> None:
        assert await kvpeer(agent, "explain", "never-heard-of") == 1
        assert "nobody knows of never-heard-of" in capsys.readouterr().out

    with_agents(tmp_path, "alone", scenario)


def test_status_shows_members_tiers_peers_cohorts_and_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await pull(reader, producer, "request-1")
        status = await kvpeer(producer, "status")
        said = capsys.readouterr().out
        lines = [line.split() for line in said.splitlines()]
        assert "as agent producer sees it: 2 alive" in said
        assert ["reader", "producer", "tcp", "640", "KiB"] in [line[:5] for line in lines]
        assert ["producer", "alive", "127.0.0.1"] in [line[:3] for line in lines]
        assert said.count("640 KiB") == 3  # in both pools, and read from the producer
        assert ["decision.pull", "1"] in lines
        assert "2 engine processes at 2 agents (producer, reader)" in said
        assert said.count("note: no_rdma_device (") <= 1, "what is the same at several agents is said once"
        assert await kvpeer(reader, "status", "--json") == status
        report = json.loads(capsys.readouterr().out)
        assert status == int(any(problem["severity"] == "problem" for problem in report["problems"]))

    with_agents(tmp_path, "reader producer", scenario)


def test_status_says_why_engines_do_not_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(one: WholeAgent, other: WholeAgent) -> None:
        for agent, dtype in ((one, "bfloat16"), (other, "float16")):
            fields = {**FIELDS, "dtype": dtype, "salt": "a secret of the tenant"}
            namespace = namespace_digest(fields)
            agent.pool.join(ClientHello("e", namespace, fields, PAGE_BYTES, 1, 0, 0, PAGE_BYTES))
        await kvpeer(one, "status")
        said = capsys.readouterr().out
        assert "dtype: " in said
        assert "-> Start the engines with the same --dtype." in said
        assert "a secret of the tenant" not in said
        await kvpeer(one, "status", "--json")
        assert "a secret of the tenant" not in capsys.readouterr().out

    with_agents(tmp_path, "one other", scenario)


def test_watch_goes_on_until_it_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter([None, KeyboardInterrupt()])

    def pause(seconds: float) -> None:
        if (end := next(pauses)) is not None:
            raise end

    async def scenario(agent: WholeAgent) -> None:
        monkeypatch.setattr("kvpeer.cli.status.time.sleep", pause)
        assert await kvpeer(agent, "status", "--watch") == 0
        assert capsys.readouterr().out.count("as agent alone sees it") == 2

    with_agents(tmp_path, "alone", scenario)
