"""Waiting for an event, until a deadline, without losing a cancellation.

`asyncio.wait_for` may swallow a cancellation that comes together with the event (before Python 3.12): a task that waits
in a loop would then go on for ever, and whoever ends it would wait for that.
"""

from __future__ import annotations

import asyncio

__all__ = ["is_set_within"]


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event is set, for which it waits so many seconds at most. Others run meanwhile, unless it is set
    already."""
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=max(0.0, timeout_s))
    finally:
        waiting.cancel()
    return event.is_set()
