"""One question to an agent at its socket, as `kvpeer status` and `kvpeer explain` ask it: no pool and no hello."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpeer.client.embedded import runtime_folder
from kvpeer.client.settings import SOCKET_VARIABLE
from kvpeer.model import ConfigError, KvPeerError, RemoteProtocolError
from kvpeer.wire.codec import decode_client, encode
from kvpeer.wire.framing import FrameKind, FrameReader, pack_frame, remaining_ms
from kvpeer.wire.messages import Inspect, Inspected, Refusal

__all__ = ["ask", "sockets"]

ASK_TIMEOUT_S = 10.0
"""For the whole answer: the agent itself gives its peers three seconds."""

READ_BYTES = 256 << 10

ENGINES_MAX = 64
"""Agents of one user on one host that are tried; a host has one or a few."""


def sockets(environment: Mapping[str, str], chosen: str = "") -> list[str]:
    """Where agents may be asked, the likeliest first: the chosen one alone; else the one that engines are told of, the
    one that an agent is told to make, and those that engines of this user started."""
    if chosen:
        return [chosen]
    told = [environment.get(name, "") for name in (SOCKET_VARIABLE, "KVPEER_AGENT_SOCKET")]
    folder = runtime_folder(environment)
    found = sorted((folder / "engines").glob("*/agent.sock"))[:ENGINES_MAX]
    return [path for path in (*told, str(folder / "agent.sock"), *map(str, found)) if path and Path(path).exists()]


def ask(question: Inspect, environment: Mapping[str, str] = os.environ, chosen: str = "") -> dict[str, Any]:
    """The first agent's answer. Blocks for ASK_TIMEOUT_S at most.

    Raises:
        ConfigError: no agent answers; the message names the places and the fix.
    """
    faults = []
    for path in sockets(environment, chosen):
        try:
            return _ask_at(path, question, time.monotonic() + ASK_TIMEOUT_S)
        except (OSError, KvPeerError) as error:
            faults.append(f"{path}: {error}")
    tried = "; ".join(faults) or "there is no socket of one"
    raise ConfigError(f"no agent answers ({tried}); run this where an agent runs, or name its socket with --socket")


def _ask_at(path: str, question: Inspect, deadline: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(deadline - time.monotonic())
        sock.connect(path)
        sock.sendall(pack_frame(FrameKind.REQUEST, 1, encode(question), remaining_ms(deadline - time.monotonic())))
        reader = FrameReader()
        while True:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = sock.recv(READ_BYTES)
            if not chunk:
                raise RemoteProtocolError("the agent closed the connection: it may be of an older release")
            for frame in reader.feed(chunk):
                return _report(decode_client(frame.body))


def _report(answer: object) -> dict[str, Any]:
    if isinstance(answer, Refusal):
        raise RemoteProtocolError(f"the agent refused ({answer.code}): {answer.message}")
    if not isinstance(answer, Inspected):
        raise RemoteProtocolError(f"the agent answered with a {type(answer).__name__}")
    report = json.loads(answer.report)
    if not isinstance(report, dict):
        raise RemoteProtocolError("the agent's report is no object")
    return report
