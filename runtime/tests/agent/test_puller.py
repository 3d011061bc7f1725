"""Pulls between whole agents: one pull for all who want a page, and whatever goes wrong costs its own pages only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from whole_agents import WholeAgent, with_agents


def test_pages_of_a_peer_are_pulled_once_and_reported_to_all_who_asked(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2, 3)
        outcomes = await asyncio.gather(*(reader.pull(1, 2, 3) for _ in range(3)))
        assert outcomes == [["HIT"] * 3] * 3
        assert producer.agent._server.stats().pages_sent == 3

    with_agents(tmp_path, "reader producer", scenario)


def test_a_pull_that_fails_unexpectedly_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        entered, may_fail = asyncio.Event(), asyncio.Event()

        async def find_fails(*_: Any) -> None:
            entered.set()
            await may_fail.wait()
            raise RuntimeError("a bug")

        with monkeypatch.context() as broken:
            broken.setattr(reader.locator, "find", find_fails)
            first = asyncio.ensure_future(reader.pull(1, 2, 1))
            await entered.wait()
            joined = asyncio.ensure_future(reader.pull(2))
            await asyncio.sleep(0)  # its first step, which finds the other pull
            may_fail.set()
            with pytest.raises(RuntimeError, match="a bug"):
                await first
            assert await asyncio.wait_for(joined, 1.0) == ["MISS"], "who waits is told at once"
        assert await reader.pull(1, 2) == ["HIT"] * 2

    with_agents(tmp_path, "reader producer", scenario)
