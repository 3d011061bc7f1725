"""Limits and times of the links between agents, why a link ended, and the errors that callers of a request see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvpeer.model import PeerUnavailableError

__all__ = ["LinkClosingError", "LinkEnd", "LinkSettings", "PeerRefusedError"]

HELLO_BYTES_MAX = 4096
"""A hello has names of at most 253 characters: this is all that somebody unknown can make us hold."""

HANDSHAKES_MAX = 64
"""Inbound handshakes at once; further connections wait in the kernel's backlog. Each takes about 1 ms of CPU, and a
silent one holds its place for `hello_timeout_s` at most."""

LINKS_PER_PEER_MAX = 4
"""One is enough; two appear when both sides dial at once, and a restarting side may briefly hold more."""

WRITE_BUFFER_BYTES_MAX = 1 << 20
"""What may wait in a link's buffer before senders wait themselves; one frame may come on top of it."""

SERVING_BYTES_MAX = 16 << 20
"""Bodies of requests that one link may have under way here: beyond it nothing more is read from that link."""

NOTICE_BYTES_MAX = 4 << 20
"""Notices that may wait for one peer, besides their number."""

NOTICE_SERVING_S = 10.0
"""A notice names no deadline of its own: its handler is stopped after this."""

REPLY_SEND_S = 10.0
"""A peer that does not take its replies for this long is dropped: it holds memory here."""

CLOSE_S = 1.0
"""For the last bytes and TLS's goodbye; a frozen peer never answers them."""

UNANSWERED_MIN = 3
"""Questions without an answer before a link may be called mute: one or two may meet a peer that is busy."""

UNACKNOWLEDGED_MS = 10_000
"""The kernel resets a connection whose data nobody acknowledged for this long (a host that vanished)."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """requests_max: under way on one link, in each direction. notices_max: waiting for one peer. inbound_max: links
    that others opened. idle_s: a link without any frame for this long is closed. backoff: between two dials to a peer
    that failed. mute_s: a link on which nothing was answered for this long, while there were questions, is ended:
    nobody tells when a box in the middle has forgotten a connection, and the peer may be well."""

    requests_max: int = 256
    notices_max: int = 1024
    inbound_max: int = 2048
    dial_timeout_s: float = 2.0
    hello_timeout_s: float = 2.0
    idle_s: float = 60.0
    mute_s: float = 2.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0


class LinkEnd(str, Enum):
    """Why a link ended."""

    RESET = "reset"
    """The other side or the network ended it without a word: evidence that the agent died."""
    CLOSED = "closed"
    """The other side said goodbye."""
    IDLE = "idle"
    """Nothing was said for a while."""
    FORGOTTEN = "forgotten"
    """This agent does not need the peer any more."""
    SHUTDOWN = "shutdown"
    """This agent is ending."""
    PROTOCOL = "protocol"
    """One side broke the protocol, or was refused."""
    MUTE = "mute"
    """Nothing that was asked on it was answered any more. Says nothing of the peer: membership asks it by others."""
    SLOW = "slow"
    """The peer did not take what it had asked for."""


class LinkClosingError(PeerUnavailableError):
    """The peer closed the link in an orderly way before it served the request: it is safe to ask again on another
    link."""


class PeerRefusedError(PeerUnavailableError):
    """The peer answered and refused; `code` is a RefusalCode, or one that only a later release knows."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"refused ({code}): {message}")
        self.code = code
