"""Accepts connections of other agents, a bounded number of handshakes at a time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from kvpeer.agent.links.settings import HANDSHAKES_MAX
from kvpeer.agent.tasks import BackgroundTasks
from kvpeer.model import ConfigError

__all__ = ["Listener"]

BACKLOG = 512
"""Connections that wait in the kernel while agents of a large cluster start at once."""

ACCEPT_PAUSE_S = 0.1
"""After the kernel could not give a connection (no file descriptors): nothing tells when it can again."""

_log = logging.getLogger(__name__)


class Listener:
    """Listens from the start, so that the port is known; accepts from `run` on."""

    def __init__(self, host: str, port: int) -> None:
        """Raises:
        ConfigError: the address or port cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the control channel cannot listen on {host}:{port}: {error.strerror}; choose another agent.host or "
                f"agent.control_port"
            ) from error
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._socket.getsockname()[1])

    async def run(self, admit: Callable[[socket.socket, str], Awaitable[None]], tasks: BackgroundTasks) -> None:
        """Accepts until cancelled. `admit(connection, remote)` owns the socket and makes the handshake."""
        loop = asyncio.get_running_loop()
        places = asyncio.Semaphore(HANDSHAKES_MAX)

        async def admit_one(connection: socket.socket, remote: str) -> None:
            try:
                await admit(connection, remote)
            finally:
                places.release()

        while True:
            await places.acquire()
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError as error:
                places.release()
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            tasks.spawn("accept link", admit_one(connection, str(address[0])))

    def close(self) -> None:
        """Stops listening; call it after `run` was cancelled."""
        self._socket.close()
