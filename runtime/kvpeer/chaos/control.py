"""Live control of a running injector: HTTP on a Unix socket, for tests and for `curl --unix-socket`.

    GET  /                      what all routes did (the same JSON that is printed at the end)
    PUT  /routes/NAME/faults    a JSON list of faults as in a scenario: from now on these; [] for none
    PUT  /faults                the same for all routes

Who can open the socket can break the agents' traffic: it is its owner's alone (mode 0600).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpeer.chaos.proxy import Proxy
from kvpeer.chaos.scenario import parse_faults
from kvpeer.model import ConfigError

__all__ = ["Control"]

REQUEST_S = 5.0
"""For a request to arrive and its answer to be taken."""

HEAD_BYTES_MAX = 8 << 10
BODY_BYTES_MAX = 64 << 10
"""The faults of a route (at most 32) have a few KiB."""

CONNECTIONS_MAX = 8
"""At a time: one operator and a few tests."""

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}
_LENGTH = re.compile(rb"^content-length:[ \t]*(\d{1,9})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)

_log = logging.getLogger(__name__)


class Control:
    """Answers requests on the socket at `path`. `status()` is what GET gives. Belongs to one event loop."""

    def __init__(self, path: str, proxies: Mapping[str, Proxy], status: Callable[[], dict[str, Any]]) -> None:
        """Raises:
        ConfigError: the socket cannot be had.
        """
        self._path = path
        self._proxies = proxies
        self._status = status
        self._n_open = 0
        self._socket = _listen(path)

    async def run(self) -> None:
        """Serves until cancelled."""
        server = await asyncio.start_unix_server(self._connected, sock=self._socket, limit=HEAD_BYTES_MAX)
        async with server:
            await server.serve_forever()

    def close(self) -> None:
        """Takes the socket away; call it after `run` was cancelled."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._n_open += 1
        try:
            await asyncio.wait_for(self._exchange(reader, writer), REQUEST_S)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
            _log.warning("a request to the control socket failed: %r", error)
        except Exception:  # noqa: BLE001 - a root
            _log.exception("a request to the control socket ended by an unexpected error")
        finally:
            self._n_open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        n_bytes = int(length[1]) if length else 0
        if self._n_open > CONNECTIONS_MAX:
            status, answer = 503, {"error": f"at most {CONNECTIONS_MAX} connections at a time"}
        elif n_bytes > BODY_BYTES_MAX:
            status, answer = 400, {"error": f"a body of {n_bytes} bytes; at most {BODY_BYTES_MAX} are taken"}
        else:
            method, path, *_ = [*head.split(b"\r\n", 1)[0].decode("latin-1").split(" "), "", ""]
            status, answer = self._answer(method, path, await reader.readexactly(n_bytes))
        body = json.dumps(answer).encode() + b"\n"
        headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"HTTP/1.1 {status} {_REASONS[status]}\r\n{headers}\r\n\r\n".encode() + body)
        await writer.drain()
        if n_bytes > BODY_BYTES_MAX:  # closed over what is still being sent, the socket would take the answer with it
            while await reader.read(BODY_BYTES_MAX):
                pass

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if (method, path) == ("GET", "/"):
            return 200, self._status()
        route = re.fullmatch(r"/faults|/routes/([^/]+)/faults", path)
        if method != "PUT" or route is None:
            return 404, {"error": "there are GET /, PUT /faults and PUT /routes/NAME/faults"}
        if route[1] is not None and route[1] not in self._proxies:
            return 404, {"error": f"no route is named {route[1]!r}; there are {', '.join(self._proxies)}"}
        try:
            faults = parse_faults(json.loads(body))
        except (ConfigError, ValueError, RecursionError) as error:
            return 400, {"error": str(error)}
        for proxy in [self._proxies[route[1]]] if route[1] is not None else self._proxies.values():
            proxy.change(faults)
        _log.info("%s: %s", path, body.decode())
        return 200, self._status()


def _listen(path: str) -> socket.socket:
    """A socket at this path that only its owner can open; one that nobody listens at any more is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(CONNECTIONS_MAX)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the control socket cannot be made at {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _is_abandoned(path: str) -> bool:
    if not (Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode)):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False
