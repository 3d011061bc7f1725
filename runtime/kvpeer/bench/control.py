"""The bare round trip of the control channel: two ends of it with nothing behind them, in processes of their own.

The near end is in the benchmark's process. Runs as `python -m kvpeer.bench.control FOLDER` as the far end: it prints
its AgentInfo and answers every Lookup with as many bytes as an owner that knows one holder of each key.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from kvpeer.agent.config import load
from kvpeer.agent.links import LinkEnd, LinkSettings, PeerLinks
from kvpeer.agent.security import open_security
from kvpeer.bench.agents import own_environment
from kvpeer.metrics import build
from kvpeer.model import AGENT_ID_BYTES, HOLDER_DTYPE, KEY_BYTES, AgentId, InternalError
from kvpeer.wire.messages import AgentInfo, Holders, Lookup, PeerMessage

__all__ = ["round_trips"]

HOST = "127.0.0.1"

REQUEST_S_MAX = 5.0
"""A round trip takes 0.1 ms; one that takes this long ends the benchmark with an error."""


class End:
    """One end of the control channel. Belongs to one event loop."""

    def __init__(self, folder: str) -> None:
        agent_id = AgentId(os.urandom(AGENT_ID_BYTES))
        security = open_security(load(None, {"KVPEER_AGENT_RUNTIME_DIR": folder}), agent_id)
        rng = random.Random()  # noqa: S311 - backoffs
        self.links = PeerLinks(HOST, 0, security, build(CollectorRegistry()), LinkSettings(), rng)
        self.info = AgentInfo(agent_id, "benchmark", HOST, self.links.control_port, 1)
        self.links.start(self.info, {Lookup: _answer}, self)

    def members(self) -> Collection[AgentInfo]:
        """See LinkEvents."""
        return [self.info]

    def link_up(self, info: AgentInfo) -> None:
        """See LinkEvents."""

    def link_down(self, agent_id: AgentId, end: LinkEnd) -> None:
        """See LinkEvents."""

    def unreachable(self, agent_id: AgentId, reason: str) -> None:
        """See LinkEvents."""


@contextmanager
def round_trips(folder: Path) -> Iterator[Callable[[Lookup, int], float]]:
    """A function that returns the median of so many round trips of a Lookup, in microseconds; one after another."""
    command = [sys.executable, "-m", "kvpeer.bench.control", str(folder)]
    far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own_environment())  # noqa: S603
    loop = uvloop.new_event_loop()
    try:
        assert far.stdout is not None  # noqa: S101 - a pipe was asked for
        line = far.stdout.readline()
        if not line:
            raise InternalError("the far end of the bare control channel did not start")
        info = msgspec.json.decode(line, type=AgentInfo)
        near = loop.run_until_complete(_near(str(folder), info))
        yield lambda message, n: loop.run_until_complete(_median_us(near, AgentId(info.agent_id), message, n))
        loop.run_until_complete(near.links.close(1.0))
    finally:
        loop.close()
        far.communicate()  # its stdin is closed, and it ends


async def _near(folder: str, info: AgentInfo) -> End:
    near = End(folder)
    near.links.know([info])
    return near


async def _median_us(near: End, far_id: AgentId, message: Lookup, n: int) -> float:
    took = []
    for _ in range(n):
        started = time.perf_counter()
        await near.links.request(far_id, message, REQUEST_S_MAX)
        took.append(time.perf_counter() - started)
    return 1e6 * statistics.median(took)


async def _answer(_: AgentInfo, message: PeerMessage) -> PeerMessage:
    assert isinstance(message, Lookup)  # noqa: S101 - what it is registered for
    n = len(message.keys) // KEY_BYTES
    return Holders(bytes(n), b"\1" * n, bytes(AGENT_ID_BYTES), bytes(n * HOLDER_DTYPE.itemsize))


async def _serve(folder: str) -> None:
    far = End(folder)
    sys.stdout.buffer.write(msgspec.json.encode(far.info) + b"\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await far.links.close(1.0)


if __name__ == "__main__":
    far_loop = uvloop.new_event_loop()
    far_loop.run_until_complete(_serve(sys.argv[1]))
