"""One connection to an agent, over a socket pair whose other end the test holds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kvpeer.client import link as link_module
from kvpeer.client.link import AgentSilentError, Link
from kvpeer.model import PeerUnavailableError
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, FrameReader, pack_frame
from kvpeer.wire.messages import ClientMessage, ClientWelcome, Reserve, Reserved

RESERVE = Reserve(0, b"k" * 16, b"k" * 16)
RESERVED = Reserved(b"\0", b"\1\0\0\0", b"\1\0\0\0", b"\0" * 8)
DEADLINE_S = 10.0


class NoPool:
    def close(self) -> None:
        pass


class Agent:
    """The other end. `late` are the answers that nobody waited for."""

    def __init__(self) -> None:
        own, self._sock = socket.socketpair()
        self.link = Link(own, ClientWelcome(b"x" * 16, 1, 1, 1, 2, 100), NoPool())  # type: ignore[arg-type]
        self.late: list[ClientMessage] = []
        self._serving = threading.Thread(target=self.link.serve, args=(self.late.append,))
        self._serving.start()

    def request(self) -> int:
        """The id of the next request that arrives."""
        reader, frames = FrameReader(), []
        while not frames:
            frames = reader.feed(self._sock.recv(1 << 16))
        return int(frames[0].id)

    def answer(self, frame_id: int) -> None:
        self._sock.sendall(pack_frame(FrameKind.REPLY, frame_id, encode(RESERVED)))

    def leave(self) -> None:
        """Closes the connection; returns when the client has read all that was sent."""
        self._sock.close()
        self._serving.join(DEADLINE_S)


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.leave()
    agent.link.close()


def asking(agent: Agent, timeout_s: float) -> tuple[threading.Thread, list[Any]]:
    """A thread that asks; what it got is in the list once it ended."""
    got: list[Any] = []

    def ask() -> None:
        try:
            got.append(agent.link.request(RESERVE, time.monotonic() + timeout_s))
        except PeerUnavailableError as error:
            got.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, got


def test_an_answer_in_time_is_the_askers(agent: Agent) -> None:
    thread, got = asking(agent, DEADLINE_S)
    agent.answer(agent.request())
    thread.join()
    agent.leave()
    assert (got, agent.late) == ([RESERVED], [])


def test_an_answer_after_the_deadline_is_given_back(agent: Agent) -> None:
    thread, got = asking(agent, 0.05)
    frame_id = agent.request()
    thread.join()
    agent.answer(frame_id)
    agent.leave()
    assert isinstance(got[0], AgentSilentError)
    assert agent.late == [RESERVED]


@dataclass
class _DeadlineWhileAnswered(link_module._Waiter):
    """A waiter whose deadline passes at the moment at which the answer is handed to it."""

    is_being_answered: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.is_over.wait = lambda timeout=None: not self.is_being_answered.wait(DEADLINE_S)  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "answer" and value is not None:
            self.is_being_answered.set()
            threading.Event().wait(0.1)  # the asker goes on meanwhile, as far as it can
        super().__setattr__(name, value)


def test_an_answer_at_the_very_deadline_is_used_or_given_back(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_Waiter", _DeadlineWhileAnswered)
    thread, got = asking(agent, DEADLINE_S)
    agent.answer(agent.request())
    thread.join()
    agent.leave()
    assert [answer for answer in [*got, *agent.late] if isinstance(answer, Reserved)] == [RESERVED]


def test_who_waits_when_the_connection_ends_is_told(agent: Agent) -> None:
    thread, got = asking(agent, DEADLINE_S)
    agent.request()
    agent.leave()
    thread.join()
    assert isinstance(got[0], PeerUnavailableError)
    assert not isinstance(got[0], AgentSilentError)
