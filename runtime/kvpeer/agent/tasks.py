"""Background tasks with one root: an unexpected error is logged and counted, never lost, and all of them end with their
owner.

What the agent cannot go on without, or after, is told to the event loop's exception handler (`escalate`), which is the
agent's own: it stops. An agent that goes on without its membership, say, would look healthy and judge nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvpeer.metrics import Metrics
from kvpeer.model import InternalError

__all__ = ["BackgroundTasks", "escalate", "is_fatal"]

_log = logging.getLogger(__name__)


def escalate(error: Exception, *, is_vital: bool = False) -> None:
    """To be called by every root with the error that it caught: the agent stops if it is an InternalError, or if what
    failed is vital."""
    if is_vital or isinstance(error, InternalError):
        context = {"message": "the agent cannot go on", "exception": error, "is_vital": True}
        asyncio.get_running_loop().call_exception_handler(context)


def is_fatal(context: dict[str, Any]) -> bool:
    """Whether the agent has to stop for what the event loop's exception handler was told."""
    return bool(context.get("is_vital")) or isinstance(context.get("exception"), InternalError)


class BackgroundTasks:
    """Belongs to one event loop. Keeps a reference to each running task, as asyncio itself does not."""

    def __init__(self, metrics: Metrics) -> None:
        self._failures = metrics.counter("kvpeer_agent_task_failures_total")
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, object], *, is_vital: bool = False) -> asyncio.Task[None]:
        """Runs the work. `name` is the label of the failure counter, so it is one of few. Vital work runs until it is
        cancelled: when it ends in another way, the agent stops."""
        task = asyncio.get_running_loop().create_task(self._root(name, work, is_vital), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: work.close())  # cancelled before its first step, it never came to the work
        return task

    async def cancel(self, deadline_s: float) -> None:
        """Cancels all tasks and waits for them, at most `deadline_s`."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)

    async def _root(self, name: str, work: Coroutine[Any, Any, object], is_vital: bool) -> None:
        try:
            await work
            if is_vital:
                raise InternalError(f"task {name} came to an end")  # noqa: TRY301 - the same as an error of its own
        except Exception as error:  # noqa: BLE001 - a root
            _log.exception("task %s ended by an unexpected error", name)
            self._failures.labels(task=name).inc()
            escalate(error, is_vital=is_vital)
