"""Pulls between whole agents: one pull for all who want a page, and whatever goes wrong costs its own pages only."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from kvpeer.core.breaker import BreakerState
from link_nodes import until
from whole_agents import WholeAgent, with_agents


def test_pages_of_a_peer_are_pulled_once_and_reported_to_all_who_asked(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2, 3)
        await reader.finds(1, 2, 3)
        outcomes = await asyncio.gather(*(reader.pull(1, 2, 3) for _ in range(3)))
        assert outcomes == [["HIT"] * 3] * 3
        assert producer.agent._server.stats().pages_sent == 3

    with_agents(tmp_path, "reader producer", scenario)


def test_a_pull_that_fails_unexpectedly_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        await reader.finds(1, 2)
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


def test_an_unexpected_error_of_a_fetch_gives_its_slots_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        await reader.finds(1, 2)

        def fetch_fails(*_: Any) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as broken:
            broken.setattr(reader.puller._threads, "_fetch", fetch_fails)
            with pytest.raises(RuntimeError, match="a bug"):
                await reader.pull(1, 2)
        assert reader.pool.stats().n_writing == 0
        assert await reader.pull(1, 2) == ["HIT"] * 2

    with_agents(tmp_path, "reader producer", scenario)


def test_a_silent_producer_leaves_threads_to_the_others(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, silent: WholeAgent, healthy: WholeAgent) -> None:
        for number in range(10, 16):
            await silent.publish(number)
        await healthy.publish(1, 2)
        await reader.finds(1, 2)
        for number in range(10, 16):
            await reader.finds(number)
        waiting = [asyncio.ensure_future(reader.pull(number, deadline_s=3.0)) for number in range(10, 16)]
        await until(lambda: reader.puller._threads.in_flight[silent.id] == len(waiting))
        assert await reader.pull(1, 2, deadline_s=1.0) == ["HIT"] * 2
        assert not any(pull.done() for pull in waiting)
        assert await asyncio.gather(*waiting) == [["TIMEOUT"]] * len(waiting)
        n_asked = reader.count("kvpeer_transport_asked_pages_total", outcome="timeout", transport="tcp")
        reasons = ("busy", "late")  # late: whose turn came with the deadline
        n_unasked = sum(reader.count("kvpeer_transport_unasked_pages_total", reason=reason) for reason in reasons)
        assert 2 <= n_asked < n_asked + n_unasked == len(waiting)
        assert not reader.puller._threads.in_flight, "nothing is kept of those who are not asked"

    many_connections = {"transport.fetch_threads": "3", "transport.connections_per_peer": "8"}
    with_agents(tmp_path, "reader silent healthy", scenario, reader=many_connections)


def test_waiting_for_a_thread_is_no_failure_of_the_producer(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, silent: WholeAgent, healthy: WholeAgent) -> None:
        await silent.publish(10)
        for number in (1, 2, 3):
            await healthy.publish(number)
            await reader.finds(number)
        await reader.finds(10)
        holds_the_thread = asyncio.ensure_future(reader.pull(10, deadline_s=2.0))
        await until(lambda: reader.puller._threads.in_flight[silent.id] == 1)
        for number in (1, 2, 3):
            assert await reader.pull(number, deadline_s=0.2) == ["TIMEOUT"]
        await holds_the_thread
        assert reader.count("kvpeer_transport_unasked_pages_total", reason="late") == 3
        assert len(reader.agent._fetches) == 1, "only the silent one failed"
        for number in (1, 2, 3):
            assert await reader.pull(number) == ["HIT"], "nothing was held against the producer"

    with_agents(tmp_path, "reader silent healthy", scenario, reader={"transport.fetch_threads": "1"})


def test_the_one_try_of_a_half_open_breaker_is_given_back_when_it_was_not_made(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, silent: WholeAgent, healthy: WholeAgent) -> None:
        await silent.publish(10)
        await healthy.publish(1)
        await reader.finds(10)
        await reader.finds(1)
        fetches = reader.agent._fetches
        opened_at = time.monotonic() - 10
        for _ in range(3):
            fetches.failed(healthy.id, opened_at)
        assert fetches.state(healthy.id, time.monotonic()) is BreakerState.HALF_OPEN
        holds_the_thread = asyncio.ensure_future(reader.pull(10, deadline_s=1.0))
        await until(lambda: reader.puller._threads.in_flight[silent.id] == 1)
        assert await reader.pull(1, deadline_s=0.1) == ["TIMEOUT"]
        await holds_the_thread
        assert await reader.pull(1) == ["HIT"]

    with_agents(tmp_path, "reader silent healthy", scenario, reader={"transport.fetch_threads": "1"})


def test_pages_that_nobody_holds_are_counted_as_not_asked_for(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await reader.finds(1)
        assert await reader.pull(1, 2, 3) == ["HIT", "MISS", "MISS"]
        assert reader.count("kvpeer_transport_unasked_pages_total", reason="no_source") == 2
        assert reader.count("kvpeer_transport_asked_pages_total", outcome="hit", transport="tcp") == 1

    with_agents(tmp_path, "reader producer", scenario)
