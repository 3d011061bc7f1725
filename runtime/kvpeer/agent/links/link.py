"""One connection between two agents: frames in both directions, requests with ids and deadlines, bounded in every
direction.

A link starts unintroduced: it can only send a hello and receive one (`handshake` does that). After `introduce` it
serves the peer's requests and sends ours, many at once. How it ends, and why, is told once to `on_lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvpeer.agent.links.dispatch import Dispatcher
from kvpeer.agent.links.pending import PendingReplies
from kvpeer.agent.links.settings import (
    CLOSE_S,
    NOTICE_SERVING_S,
    REPLY_SEND_S,
    SERVING_BYTES_MAX,
    WRITE_BUFFER_BYTES_MAX,
    LinkClosingError,
    LinkEnd,
    LinkSettings,
    PeerRefusedError,
)
from kvpeer.model import KvPeerError, LocalProtocolError, PeerUnavailableError, RemoteProtocolError
from kvpeer.wire.codec import decode_peer, encode
from kvpeer.wire.framing import (
    BODY_BYTES_MAX,
    Frame,
    FrameKind,
    FrameReader,
    WireVersionError,
    pack_frame,
    remaining_ms,
)
from kvpeer.wire.messages import AgentInfo, Message, PeerMessage, Refusal, RefusalCode

__all__ = ["Link", "LinkCallbacks"]

GOODBYE_ID = 0
"""An error frame with this id is about the connection, which ends. Requests count from 1."""


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """What a link tells its owner, on the event loop.

    connected, lost: once each, when the connection is there and when it is gone. writable: a full buffer has drained.
    late_reply, notice_dropped: for counting.
    """

    connected: Callable[[Link], None]
    lost: Callable[[Link], None]
    writable: Callable[[Link], None]
    late_reply: Callable[[], None]
    notice_dropped: Callable[[], None]


class Link(asyncio.Protocol):
    """Belongs to one event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: LinkSettings,
        callbacks: LinkCallbacks,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer: AgentInfo | None = None
        self.end: LinkEnd | None = None
        self.fault: RemoteProtocolError | None = None
        """What the other side did wrong, if that ended the link."""
        self.lost: asyncio.Future[BaseException | None] = loop.create_future()
        """Done when the connection is gone; its result is the transport's error."""
        self._loop = loop
        self._dispatcher = dispatcher
        self._settings = settings
        self._callbacks = callbacks
        self._reader = FrameReader(body_bytes_max)
        self._pending = PendingReplies(settings.requests_max)
        self._early: list[Frame] = []  # came before the introduction
        self._has_early = asyncio.Event()  # or the link ended
        self._serving: set[asyncio.Task[None]] = set()
        self._serving_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._turn = asyncio.Lock()  # senders that wait for a full buffer pass one at a time, in order
        self._last_frame_at = loop.time()

    # ---- facts

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and self.end is None

    @property
    def is_writable(self) -> bool:
        """Whether a frame would be taken at once."""
        return self.is_open and self._writable.is_set() and not self._turn.locked()

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The peer's certificate, as `SSLObject.getpeercert` gives it; None without TLS."""
        return self._transport.get_extra_info("peercert") if self._transport else None

    def is_idle(self, idle_s: float) -> bool:
        """Whether nothing is under way and no frame passed for this long."""
        return not self._pending and not self._serving and self._loop.time() - self._last_frame_at > idle_s

    # ---- sending

    async def request(self, message: Message, deadline_s: float) -> PeerMessage:
        """The peer's answer, within `deadline_s` from now.

        Raises:
            PeerRefusedError: the peer refused.
            LinkClosingError: the peer closed the link before it served the request.
            PeerUnavailableError: no answer came in time, or the link ended.
            LocalProtocolError: the message is too large.
        """
        if not self.is_open:
            raise PeerUnavailableError(f"the link is closed ({self._why()})")
        body = encode(message)
        expires_at = self._loop.time() + deadline_s
        request_id, reply = self._pending.open()
        timer = self._loop.call_at(expires_at, self._expire, request_id, type(message).__name__, deadline_s)
        try:
            await self._send(pack_frame(FrameKind.REQUEST, request_id, body, remaining_ms(deadline_s)), deadline_s)
            return await reply
        finally:
            timer.cancel()
            self._pending.close(request_id)
            if self._pending.is_mute(self._loop.time(), self._settings.mute_s):
                self.close(LinkEnd.MUTE)

    def notify(self, frame: bytes) -> None:
        """Sends a packed notice; only when `is_writable`."""
        self._write(frame)

    async def reply(self, request_id: int, message: PeerMessage) -> None:
        """Answers a request; a link whose peer does not take it ends."""
        kind = FrameKind.ERROR if isinstance(message, Refusal) else FrameKind.REPLY
        try:
            frame = pack_frame(kind, request_id, encode(message))
        except LocalProtocolError as fault:
            frame = pack_frame(FrameKind.ERROR, request_id, encode(Refusal(RefusalCode.INTERNAL, str(fault))))
        try:
            await self._send(frame, REPLY_SEND_S)
        except PeerUnavailableError:
            self.close(LinkEnd.SLOW)

    # ---- handshake

    async def first_request(self) -> Frame:
        """The first request of a link that is not introduced yet.

        Raises:
            PeerUnavailableError: the connection ended before.
            RemoteProtocolError: something else came first.
        """
        await self._has_early.wait()
        if not self._early:
            raise PeerUnavailableError(f"the link ended before a hello ({self._why()})")
        frame = self._early.pop(0)
        if frame.kind is not FrameKind.REQUEST:
            raise RemoteProtocolError("the first frame is a notice instead of a hello")
        return frame

    def introduce(self, peer: AgentInfo) -> None:
        """From now on this is a link to `peer`: its requests are served."""
        self.peer = peer
        self._reader.body_bytes_max = BODY_BYTES_MAX
        early, self._early = self._early, []
        for frame in early:
            self._receive(frame)
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    # ---- ending

    def close(self, end: LinkEnd, refusal: Refusal | None = None) -> None:
        """Ends the link for this reason; the peer is told the refusal where the buffer has room. Idempotent."""
        if self.end is not None:
            return
        if self._transport is None:
            self.end = end
            return
        if refusal is not None and self.is_writable:
            self._write(pack_frame(FrameKind.ERROR, GOODBYE_ID, encode(refusal)))
        self.end = end
        self._release(PeerUnavailableError(f"the link is closed ({self._why()})"))
        self._transport.close()
        self._loop.call_later(CLOSE_S, self._transport.abort)

    def abort(self) -> None:
        """Ends the connection without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, fault: RemoteProtocolError) -> None:
        """Ends the link because the other side broke the protocol."""
        if self.fault is None:
            self.fault = fault
        code = RefusalCode.UNSUPPORTED if isinstance(fault, WireVersionError) else RefusalCode.FAULTY
        self.close(LinkEnd.PROTOCOL, Refusal(code, str(fault)))

    async def cancel_serving(self) -> None:
        """Cancels the handlers that still run for this peer, and waits for them."""
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._callbacks.connected(self)

    def data_received(self, data: bytes) -> None:
        self._last_frame_at = self._loop.time()
        if self.end is not None:
            return
        try:
            for frame in self._reader.feed(data):
                self._receive(frame)
        except RemoteProtocolError as fault:
            self.fail(fault)

    def connection_lost(self, error: Exception | None) -> None:
        if self.end is None:
            self.end = LinkEnd.RESET
        if self._transport is not None:
            self._transport.close()  # it is gone, but asyncio's TLS transport of Python 3.10 wants to hear it
        self._release(PeerUnavailableError(f"the link is gone ({self._why()})"))
        if not self.lost.done():
            self.lost.set_result(error)
        self._callbacks.lost(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._callbacks.writable(self)

    # ---- receiving

    def _receive(self, frame: Frame) -> None:
        if self.end is not None:
            return
        if frame.kind in (FrameKind.REPLY, FrameKind.ERROR):
            self._receive_answer(frame)
        elif self.peer is None:
            self._receive_early(frame)
        elif len(self._serving) < self._settings.requests_max:
            self._serve(self.peer, frame)
        elif frame.kind is FrameKind.NOTICE:
            self._callbacks.notice_dropped()
        elif self.is_writable:
            limit = Refusal(RefusalCode.BUSY, f"{self._settings.requests_max} requests of this link are being served")
            self._write(pack_frame(FrameKind.ERROR, frame.id, encode(limit)))
        else:  # it sends more than it may and does not read: refusals would pile up without bound
            self.close(LinkEnd.SLOW)

    def _receive_answer(self, frame: Frame) -> None:
        message = decode_peer(frame.body)
        self._pending.heard()
        if frame.kind is FrameKind.REPLY:
            is_awaited = self._pending.answer(frame.id, message)
        elif not isinstance(message, Refusal):
            raise RemoteProtocolError(f"an error frame holds {type(message).__name__} instead of Refusal")
        elif frame.id == GOODBYE_ID:
            self._receive_goodbye(message)
            return
        else:
            is_awaited = self._pending.fail(frame.id, PeerRefusedError(message.code, message.message))
        if not is_awaited:
            self._callbacks.late_reply()

    def _receive_goodbye(self, refusal: Refusal) -> None:
        is_orderly = refusal.code == RefusalCode.CLOSING
        error = LinkClosingError(refusal.message) if is_orderly else PeerRefusedError(refusal.code, refusal.message)
        self._release(error)
        self.close(LinkEnd.CLOSED if is_orderly else LinkEnd.PROTOCOL)

    def _receive_early(self, frame: Frame) -> None:
        """Keeps what comes before the introduction, which is at most the rest of one read: nothing more is read until
        then."""
        self._early.append(frame)
        self._has_early.set()
        if self._transport is not None:
            self._transport.pause_reading()

    def _serve(self, peer: AgentInfo, frame: Frame) -> None:
        self._serving_bytes += len(frame.body)
        if self._serving_bytes > SERVING_BYTES_MAX and self._transport is not None:
            self._transport.pause_reading()
        task = self._loop.create_task(self._answer(peer, frame))
        self._serving.add(task)
        task.add_done_callback(lambda done: self._served(done, len(frame.body)))

    def _served(self, task: asyncio.Task[None], n_bytes: int) -> None:
        self._serving.discard(task)
        self._serving_bytes -= n_bytes
        if self._serving_bytes <= SERVING_BYTES_MAX and self._transport is not None and self.is_open:
            self._transport.resume_reading()

    async def _answer(self, peer: AgentInfo, frame: Frame) -> None:
        limit_s = frame.deadline_ms / 1000 or NOTICE_SERVING_S
        timer = self._loop.call_later(limit_s, cast("asyncio.Task[None]", asyncio.current_task()).cancel)
        answer: PeerMessage
        try:
            answer = await self._dispatcher.answer(peer, frame.body)
        except RemoteProtocolError as fault:
            self.fail(fault)
            return
        except asyncio.CancelledError:
            if not self.is_open:
                raise
            answer = Refusal(RefusalCode.LATE, f"not served within {limit_s} s")
        finally:
            timer.cancel()
        if frame.kind is FrameKind.REQUEST and self.is_open:
            await self.reply(frame.id, answer)

    # ---- writing

    async def _send(self, frame: bytes, deadline_s: float) -> None:
        if self.is_writable:
            self._write(frame)
            return
        try:
            await asyncio.wait_for(self._send_in_turn(frame), deadline_s)
        except asyncio.TimeoutError:
            raise PeerUnavailableError(f"the peer takes no data (nothing for {deadline_s:.3g} s)") from None

    async def _send_in_turn(self, frame: bytes) -> None:
        async with self._turn:
            await self._writable.wait()
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self._transport is None or self.end is not None:
            raise PeerUnavailableError(f"the link is closed ({self._why()})")
        self._last_frame_at = self._loop.time()
        self._transport.write(frame)

    # ---- helpers

    def _expire(self, request_id: int, name: str, deadline_s: float) -> None:
        self._pending.fail(request_id, PeerUnavailableError(f"no answer to {name} within {deadline_s:.3g} s"))

    def _release(self, error: KvPeerError) -> None:
        """Nobody waits on this link any more."""
        self._pending.fail_all(error)
        self._has_early.set()
        self._writable.set()

    def _why(self) -> str:
        return str(self.fault) if self.fault else (self.end or LinkEnd.RESET).value
