"""Connections that are open and dead: nothing passes any more, nobody was told, and the peer may be well."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from kvpeer.agent.links import LinkEnd, LinkSettings
from kvpeer.model import PeerUnavailableError
from kvpeer.wire.framing import FrameKind
from kvpeer.wire.messages import AgentInfo, PeerWelcome, Ping, PingAck
from link_nodes import HOST, LOOPS, Node, RawPeer, id_of, raw_server, run, security_of

PEER = id_of(2)
MUTE_S = 0.5
ASK_S = 0.02

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=LOOPS)
def run_on(request: pytest.FixtureRequest) -> Run:
    return lambda main: run(LOOPS[request.param], main)


class FadingAgent:
    """Its first connection goes mute after the welcome, but for one in `answers_every` pings; later ones serve."""

    def __init__(self, answers_every: int = 0) -> None:
        self.info = AgentInfo(PEER, "fading", HOST, 1, 2)
        self.n_connections = 0
        self._answers_every = answers_every

    async def serve(self, peer: RawPeer) -> None:
        self.n_connections += 1
        is_first = self.n_connections == 1
        hello, _ = await peer.receive()
        peer.send(FrameKind.REPLY, hello.id, PeerWelcome("c", self.info, []))
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame, ping = await peer.receive()
                if not isinstance(ping, Ping):
                    break  # a goodbye
                if not is_first or (self._answers_every and ping.sequence % self._answers_every == 0):
                    peer.send(FrameKind.REPLY, frame.id, PingAck(ping.sequence, PEER, []))


@contextlib.asynccontextmanager
async def linked(fading: FadingAgent, mute_s: float = MUTE_S) -> AsyncIterator[Node]:
    """An agent with a link to this one."""
    server, port = await raw_server(security_of(PEER), fading.serve)
    fading.info = AgentInfo(PEER, "fading", HOST, port, 2)
    async with server, Node(1, LinkSettings(mute_s=mute_s)).start() as node:
        node.links.know([fading.info])
        await node.links.join(HOST, port, 5)
        yield node


async def is_answered(node: Node, sequence: int) -> bool:
    try:
        await node.links.request(PEER, Ping(sequence, []), ASK_S)
    except PeerUnavailableError:
        return False
    return True


async def n_answered(node: Node, n: int) -> int:
    """Of so many questions, one after the other."""
    return sum([await is_answered(node, sequence) for sequence in range(1, n + 1)])


def test_a_link_on_which_nothing_is_answered_any_more_is_replaced_by_another(run_on: Run) -> None:
    async def main() -> None:
        fading = FadingAgent()
        async with linked(fading) as node:
            started_at = asyncio.get_running_loop().time()
            while not await is_answered(node, 1):
                assert len(node.downs) <= 1
            assert asyncio.get_running_loop().time() - started_at >= MUTE_S
            assert fading.n_connections == 2
            assert set(node.downs) <= {(PEER, LinkEnd.MUTE)}, "no evidence that the agent died"

    run_on(main())


def test_questions_that_nobody_waits_for_any_more_count_too(run_on: Run) -> None:
    """A locate that was answered by another owner leaves the late one alone."""

    async def main() -> None:
        fading = FadingAgent()
        async with linked(fading) as node:
            while fading.n_connections < 2:
                asking = asyncio.ensure_future(node.links.request(PEER, Ping(1, []), 60))
                await asyncio.wait({asking}, timeout=ASK_S)
                asking.cancel()
                await asyncio.wait({asking})

    run_on(main())


def test_a_link_on_which_some_questions_are_answered_is_kept(run_on: Run) -> None:
    async def main() -> None:
        fading = FadingAgent(answers_every=4)
        async with linked(fading) as node:
            assert 0 < await n_answered(node, 40) < 40
            assert (node.downs, fading.n_connections) == ([], 1)

    run_on(main())


def test_a_single_question_without_an_answer_is_no_reason_to_end_a_link(run_on: Run) -> None:
    async def main() -> None:
        fading = FadingAgent()
        async with linked(fading) as node:
            with pytest.raises(PeerUnavailableError):
                await node.links.request(PEER, Ping(1, []), 2 * MUTE_S)
            assert not await is_answered(node, 2)
            assert (node.downs, fading.n_connections) == ([], 1)

    run_on(main())


def test_many_questions_without_an_answer_are_none_before_their_time(run_on: Run) -> None:
    async def main() -> None:
        fading = FadingAgent()
        async with linked(fading, mute_s=60) as node:
            assert await n_answered(node, 20) == 0
            assert (node.downs, fading.n_connections) == ([], 1)

    run_on(main())
