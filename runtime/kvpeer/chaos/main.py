"""The process of `kvpeer chaos`: builds the proxies of a scenario, runs until told to stop, says what they did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
from typing import Any

from kvpeer.chaos.control import Control
from kvpeer.chaos.proxy import Proxy
from kvpeer.chaos.scenario import SEED_MAX, Scenario

__all__ = ["run"]

_log = logging.getLogger(__name__)


def run(scenario: Scenario, control: str = "") -> int:
    """Runs until SIGTERM or SIGINT, then prints what was done as JSON on stdout; returns the exit status. `control`:
    path of the Unix socket for live control, empty for none.

    Raises:
        ConfigError: an address or the socket cannot be had.
    """
    asyncio.run(_main(scenario, control))
    return 0


async def _main(scenario: Scenario, control: str) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    seed = random.SystemRandom().randint(0, SEED_MAX) if scenario.seed is None else scenario.seed
    proxies: dict[str, Proxy] = {}

    def status() -> dict[str, Any]:
        return {"seed": seed, "routes": {name: proxy.status() for name, proxy in proxies.items()}}

    async with contextlib.AsyncExitStack() as closing:
        for route in scenario.routes:
            proxies[route.name] = Proxy(route, seed)
            closing.push_async_callback(proxies[route.name].close)
        running = [proxy.run() for proxy in proxies.values()]
        if control:
            endpoint = Control(control, proxies, status)
            closing.callback(endpoint.close)
            running.append(endpoint.run())
        tasks = [loop.create_task(work) for work in running]
        closing.push_async_callback(_end, tasks)
        for name, proxy in proxies.items():
            _log.info("route %s listens on %s and forwards to %s", name, proxy.address, proxy.route.to)
        _log.info("ready; the same faults again with  --seed %d", seed)
        waiting = loop.create_task(stopped.wait())
        done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # one that failed ends the process: faults that are not injected prove nothing
        sys.stdout.write(json.dumps(status(), indent=1) + "\n")


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
