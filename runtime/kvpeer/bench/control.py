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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

__all__ = ["fan_outs", "round_trips"]

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
    with _ends(folder, 1) as (loop, near, (far_id,)):
        yield lambda message, n: loop.run_until_complete(_median_us(near, far_id, message, n))


@contextmanager
def fan_outs(folder: Path, n_ends: int) -> Iterator[Callable[[Sequence[Lookup]], float]]:
    """A function that sends a Lookup to each of so many far ends at once, and returns how long it took until all had
    answered, in microseconds."""
    with _ends(folder, n_ends) as (loop, near, far_ids):
        yield lambda messages: loop.run_until_complete(_fan_out_us(near, far_ids, messages))


@contextmanager
def _ends(folder: Path, n: int) -> Iterator[tuple[asyncio.AbstractEventLoop, End, list[AgentId]]]:
    """The near end with its event loop, and the ids of n far ends."""
    loop = uvloop.new_event_loop()
    with ExitStack() as ending:
        ending.callback(loop.close)
        infos = [ending.enter_context(_far_end(folder)) for _ in range(n)]
        near = loop.run_until_complete(_near(str(folder), infos))
        yield loop, near, [AgentId(info.agent_id) for info in infos]
        loop.run_until_complete(near.links.close(1.0))


@contextmanager
def _far_end(folder: Path) -> Iterator[AgentInfo]:
    command = [sys.executable, "-m", "kvpeer.bench.control", str(folder)]
    far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own_environment())  # noqa: S603
    try:
        assert far.stdout is not None  # noqa: S101 - a pipe was asked for
        line = far.stdout.readline()
        if not line:
            raise InternalError("the far end of the bare control channel did not start")
        yield msgspec.json.decode(line, type=AgentInfo)
    finally:
        far.communicate()  # its stdin is closed, and it ends


async def _near(folder: str, infos: Collection[AgentInfo]) -> End:
    near = End(folder)
    near.links.know(infos)
    return near


async def _median_us(near: End, far_id: AgentId, message: Lookup, n: int) -> float:
    took = []
    for _ in range(n):
        started = time.perf_counter()
        await near.links.request(far_id, message, REQUEST_S_MAX)
        took.append(time.perf_counter() - started)
    return 1e6 * statistics.median(took)


async def _fan_out_us(near: End, far_ids: Sequence[AgentId], messages: Sequence[Lookup]) -> float:
    started = time.perf_counter()
    asked = zip(far_ids, messages, strict=True)
    await asyncio.gather(*(near.links.request(far_id, message, REQUEST_S_MAX) for far_id, message in asked))
    return 1e6 * (time.perf_counter() - started)


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
