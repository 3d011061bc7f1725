"""How two agents meet: connection, TLS, hello, welcome; each step with a deadline, each failure counted by its reason.

In TLS 1.3 a client's handshake succeeds before the server has looked at its certificate: only the welcome shows that a
peer has accepted us. So a link counts as open after it, and not before.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from typing import Any

from kvpeer.agent.links.link import Link
from kvpeer.agent.links.refusals import Refusals
from kvpeer.agent.links.settings import HELLO_BYTES_MAX, UNACKNOWLEDGED_MS, LinkEnd, LinkSettings, PeerRefusedError
from kvpeer.agent.security import PeerRejectedError, Security
from kvpeer.model import PeerUnavailableError, RemoteProtocolError
from kvpeer.wire.codec import decode_peer
from kvpeer.wire.framing import BODY_BYTES_MAX, WireVersionError
from kvpeer.wire.messages import AgentInfo, PeerHello, PeerMessage, PeerWelcome, Refusal, RefusalCode

__all__ = ["Handshakes", "SelfDialledError"]


class SelfDialledError(PeerUnavailableError):
    """The address is this agent's own."""


class Handshakes:
    """Belongs to one event loop. `new_link(body_bytes_max)` makes an unintroduced link; `members` is what a welcome
    tells; `may_link(agent_id)` says whether one more link of that agent is wanted."""

    def __init__(
        self,
        info: AgentInfo,
        security: Security,
        settings: LinkSettings,
        refusals: Refusals,
        new_link: Callable[[int], Link],
        members: Callable[[], Collection[AgentInfo]],
        may_link: Callable[[bytes], bool],
    ) -> None:
        self._info = info
        self._security = security
        self._settings = settings
        self._refusals = refusals
        self._new_link = new_link
        self._members = members
        self._may_link = may_link

    async def dial(self, host: str, port: int, deadline_s: float) -> tuple[Link, PeerWelcome]:
        """A link whose peer has welcomed us and proved who it is; not introduced yet.

        Raises:
            SelfDialledError: this agent itself answered.
            PeerUnavailableError: there is no such peer, or one side refuses the other (counted).
        """
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        timeout_s = min(deadline_s, self._settings.dial_timeout_s)
        remote = f"{host}:{port}"
        link = await self._connect(host, port, timeout_s)
        is_welcome = False
        try:
            left_s = max(timeout_s - (loop.time() - started_at), 0.001)
            answer = await link.request(PeerHello(self._security.said_cluster, self._info), left_s)
            welcome = self._read_welcome(link, answer)
        except SelfDialledError:
            raise
        except PeerRejectedError as rejection:
            self._refuse(link, rejection.reason, remote, str(rejection))
            raise PeerUnavailableError(f"{remote} is refused: {rejection}") from rejection
        except RemoteProtocolError as fault:
            link.fail(fault)
            self._refusals.add("protocol", remote, fault)
            raise PeerUnavailableError(f"{remote} breaks the protocol: {fault}") from fault
        except PeerUnavailableError as error:
            self._count_failed_hello(link, remote, error)
            raise PeerUnavailableError(f"{remote} did not welcome us: {error}") from error
        else:
            is_welcome = True
            return link, welcome
        finally:
            if not is_welcome:
                link.close(LinkEnd.FORGOTTEN)

    async def accept(self, connection: socket.socket, remote: str) -> tuple[Link, AgentInfo] | None:
        """The link with the peer that dialled us, after our welcome was sent; None when it was refused (counted). Takes
        the socket over in any case."""
        link = await self._connect_accepted(connection, remote)
        if link is None:
            return None
        is_accepted = False
        try:
            first = await asyncio.wait_for(link.first_request(), self._settings.hello_timeout_s)
            info = self._read_hello(link, first.body)
            await link.reply(first.id, PeerWelcome(self._security.said_cluster, self._info, list(self._members())))
        except asyncio.TimeoutError:
            self._refuse(link, "hello_timeout", remote, f"no hello within {self._settings.hello_timeout_s} s")
        except PeerRejectedError as rejection:
            self._refuse(link, rejection.reason, remote, str(rejection))
        except RemoteProtocolError as fault:
            link.fail(fault)
            self._refusals.add("protocol", remote, fault)
        except PeerUnavailableError as error:
            self._refusals.add(_fault_reason(link), remote, link.fault or error)
        else:
            is_accepted = True
            return link, info
        finally:
            if not is_accepted:
                link.close(LinkEnd.PROTOCOL)
        return None

    async def _connect(self, host: str, port: int, timeout_s: float) -> Link:
        remote = f"{host}:{port}"
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._security.client_context is not None:
            tls = {"ssl": self._security.client_context, "ssl_handshake_timeout": timeout_s}
        link = self._new_link(BODY_BYTES_MAX)
        try:
            dialling = loop.create_connection(lambda: link, host, port, **tls)
            transport, _ = await asyncio.wait_for(dialling, timeout_s)
        except asyncio.TimeoutError:
            raise PeerUnavailableError(f"{remote} did not answer within {timeout_s:.3g} s") from None
        except ssl.SSLError as error:
            self._refusals.add("tls", remote, error)
            raise PeerUnavailableError(f"{remote} failed the TLS handshake: {error}") from error
        except OSError as error:
            raise PeerUnavailableError(f"{remote}: {error.strerror or error}") from error
        except (ValueError, OverflowError) as error:  # what no address can be, such as a label of 64 letters
            raise PeerUnavailableError(f"{remote} is no address: {error}") from error
        _tune(transport.get_extra_info("socket"))
        return link

    async def _connect_accepted(self, connection: socket.socket, remote: str) -> Link | None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._security.server_context is not None:
            tls = {"ssl": self._security.server_context, "ssl_handshake_timeout": self._settings.hello_timeout_s}
        _tune(connection)
        link = self._new_link(HELLO_BYTES_MAX)
        try:
            # uvloop returns its own TLS protocol instead of ours, so the result is not used.
            await loop.connect_accepted_socket(lambda: link, connection, **tls)
        except (OSError, asyncio.TimeoutError) as error:  # SSLError and ConnectionError are OSErrors
            self._refusals.add("tls", remote, error)
            connection.close()
            return None
        return link

    def _read_hello(self, link: Link, body: bytes) -> AgentInfo:
        hello = decode_peer(body)
        if not isinstance(hello, PeerHello):
            raise RemoteProtocolError(f"the first message is {type(hello).__name__} instead of PeerHello")
        if hello.info.agent_id == self._info.agent_id:
            raise PeerRejectedError("self", "it has this agent's own id")
        self._security.check(link.certificate, hello.cluster, hello.info)
        if not self._may_link(hello.info.agent_id):
            raise PeerRejectedError("limit", "it has as many links to this agent as one may have")
        return hello.info

    def _read_welcome(self, link: Link, welcome: PeerMessage) -> PeerWelcome:
        if not isinstance(welcome, PeerWelcome):
            raise RemoteProtocolError(f"it answered a hello with {type(welcome).__name__}")
        if welcome.info.agent_id == self._info.agent_id:
            raise SelfDialledError("this agent itself answered")
        self._security.check(link.certificate, welcome.cluster, welcome.info)
        return welcome

    def _refuse(self, link: Link, reason: str, remote: str, detail: str) -> None:
        self._refusals.add(reason, remote, detail)
        link.close(LinkEnd.PROTOCOL, Refusal(RefusalCode.REFUSED, detail))

    def _count_failed_hello(self, link: Link, remote: str, error: PeerUnavailableError) -> None:
        has_tls = self._security.client_context is not None
        if link.fault is not None:
            self._refusals.add(_fault_reason(link), remote, link.fault)
        elif has_tls and link.end is LinkEnd.RESET:
            self._refusals.add(
                "tls", remote, "it ended the connection before its welcome: our certificate may be foreign"
            )
        elif isinstance(error, PeerRefusedError):
            self._refusals.add("refused_us", remote, error)


def _fault_reason(link: Link) -> str:
    return "version" if isinstance(link.fault, WireVersionError) else "protocol"


def _tune(connection: socket.socket | None) -> None:
    """Small messages leave at once, and a host that vanished is noticed by the kernel."""
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
