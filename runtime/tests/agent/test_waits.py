"""A wait ends with its event, its deadline or its task, whichever comes first."""

from __future__ import annotations

import asyncio

import pytest
from kvpeer.waits import is_set_within


def test_it_ends_with_the_event() -> None:
    async def run() -> bool:
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        return await is_set_within(event, 60)

    assert asyncio.run(run())


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.001])
def test_it_ends_with_the_deadline(timeout_s: float) -> None:
    assert not asyncio.run(is_set_within(asyncio.Event(), timeout_s))


def test_a_task_that_is_cancelled_while_its_event_is_set_ends() -> None:
    async def for_ever(event: asyncio.Event) -> None:
        while True:
            event.clear()
            await is_set_within(event, 60)

    async def run() -> None:
        event = asyncio.Event()
        task = asyncio.ensure_future(for_ever(event))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        await asyncio.sleep(0)  # the wait is over, and its task has not been told
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()

    asyncio.run(run())
