"""Background tasks with one root: an unexpected error is logged and counted, never lost, and all of them end with their
owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvpeer.metrics import Metrics

__all__ = ["BackgroundTasks"]

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Belongs to one event loop. Keeps a reference to each running task, as asyncio itself does not."""

    def __init__(self, metrics: Metrics) -> None:
        self._failures = metrics.counter("kvpeer_agent_task_failures_total")
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Runs the work. `name` is the label of the failure counter, so it is one of few."""
        task = asyncio.get_running_loop().create_task(self._root(name, work), name=name)
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

    async def _root(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - a root
            _log.exception("task %s ended by an unexpected error", name)
            self._failures.labels(task=name).inc()
