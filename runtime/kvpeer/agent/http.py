"""/metrics, /healthz and the status page over plain HTTP, on threads of its own: a busy event loop still answers.

Nothing here is secret, but it has no authentication either: bind it where only the monitoring and the operator reach
it. The one thing that can be changed through it proves itself: a policy that is posted to /policy is signed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvpeer.agent.told_policy import DOCUMENT_BYTES_MAX, PolicyRefusedError
from kvpeer.model import CapacityError, ConfigError, KvPeerError

__all__ = ["HttpAnswer", "HttpEndpoint", "Page"]

REQUESTS_MAX = 8
"""Requests served at once: two Prometheus servers, the kubelet and a person need less. Further ones are closed at
once."""

IO_TIMEOUT_S = 5.0
"""For a request to arrive and an answer to be taken; a scrape takes milliseconds."""

STOP_TIMEOUT_S = 2.0

_TEXT = "text/plain; charset=utf-8"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a page answers a GET with."""

    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    status: int = 200


Page = Callable[[], HttpAnswer]
"""Called on the endpoint's threads; may block for seconds."""


class HttpEndpoint:
    """Serves until `close`. `health` returns the reason why the agent is not healthy, or an empty text; it is called on
    other threads and must not block. `accept_policy` takes a posted document and returns the revision that is known
    then; it is called on other threads, and may raise KvPeerError. `pages`: what else is served, by path."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        health: Callable[[], str],
        accept_policy: Callable[[bytes], int],
        pages: Mapping[str, Page] = MappingProxyType({}),
    ) -> None:
        """Listens (port 0: any free one).

        Raises:
            ConfigError: the address or port cannot be had.
        """
        try:
            handler = _handler(registry, health, accept_policy, pages)
            self._server = _Server((host, port), handler, bind_and_activate=True)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot listen on {host}:{port}: {error.strerror}; choose another metrics.host or metrics.port"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvpeer-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops listening; requests under way end by their own timeout. Blocks for at most STOP_TIMEOUT_S."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_TIMEOUT_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], bind_and_activate: bool
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._slots = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__(address, handler, bind_and_activate)

    def server_bind(self) -> None:
        """Binds without asking the name service for a host name, as the base class would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("a request from %s ended early", client_address, exc_info=True)


def _exposition(registry: CollectorRegistry, accepted: str) -> tuple[str, bytes]:
    """The metrics in the best format of those that are accepted, and in the plain one for a request that cannot be
    understood: the library raises for versions that are not of numbers."""
    try:
        encode, content_type = choose_encoder(accepted)
        return content_type, encode(registry)
    except (TypeError, ValueError):
        encode, content_type = choose_encoder("")
        return content_type, encode(registry)


def _handler(
    registry: CollectorRegistry,
    health: Callable[[], str],
    accept_policy: Callable[[bytes], int],
    pages: Mapping[str, Page],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IO_TIMEOUT_S
        server_version = "kvpeer"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, *_exposition(registry, self.headers.get("Accept", "")))
            elif path == "/healthz":
                reason = health()
                self._answer(503 if reason else 200, _TEXT, f"{reason or 'ok'}\n".encode())
            elif path in pages:
                answer = pages[path]()
                self._answer(answer.status, answer.content_type, answer.body, answer.headers)
            else:
                known = ", ".join(["/metrics", "/healthz", *pages])
                self._answer(404, _TEXT, f"there are {known}\n".encode())

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self.path != "/policy" or not length.isdecimal() or int(length) > DOCUMENT_BYTES_MAX:
                self._answer(400, _TEXT, f"POST /policy takes at most {DOCUMENT_BYTES_MAX} bytes\n".encode())
                return
            try:
                revision = accept_policy(self.rfile.read(int(length)))
            except PolicyRefusedError as error:
                self._answer(403, _TEXT, f"{error}\n".encode())
            except CapacityError as error:
                self._answer(503, _TEXT, f"{error}\n".encode())
            except KvPeerError as error:
                self._answer(400, _TEXT, f"{error}\n".encode())
            else:
                self._answer(200, _TEXT, f"{revision}\n".encode())

        def _answer(
            self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            _log.debug(format, *arguments)

    return Handler
