"""One connection to the agent: the hello, the mapped pool, and requests of several threads over one socket.

One thread runs `serve`, which reads answers and hands each to the thread that waits for it; requests may come from
any thread. After the connection broke the link is dead for good: every request on it fails at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpeer.client.settings import Registration
from kvpeer.model import (
    CapacityError,
    ConfigError,
    KvPeerError,
    LocalProtocolError,
    PeerUnavailableError,
    RemoteProtocolError,
    Verify,
)
from kvpeer.native import PoolMap
from kvpeer.wire.codec import decode_client, encode
from kvpeer.wire.framing import Frame, FrameKind, FrameReader, pack_frame, remaining_ms
from kvpeer.wire.messages import (
    Abandon,
    ClientHello,
    ClientMessage,
    ClientWelcome,
    PolicyTold,
    Refusal,
    RefusalCode,
    Release,
    Traced,
)

__all__ = ["AgentSilentError", "Link", "open_link"]

READ_BYTES = 256 << 10
"""One read; a reply for 4,096 pages (70 KiB) fits."""

REPLY_MARGIN_S = 0.02
"""The agent is told a deadline this much earlier than the caller's, so that its answer is still in time; never more
than a quarter of what is left."""

SILENT_AFTER_S = 0.2
"""An agent that was not heard from for this long while a request waited is taken for frozen: it answers in
milliseconds, or by the deadline that the request carries."""

SILENCE_S = 1.0
"""While the agent is taken for frozen, requests fail at once for this long, so that not each of them costs its whole
deadline; then the next one tries again. Anything heard from the agent ends it."""

GIVE_BACK_TIMEOUT_S = 1.0
"""For a notice to be taken by the socket. Its buffer holds hundreds of them, so that this is a frozen agent."""

HELLO_FDS = 2


class AgentSilentError(PeerUnavailableError):
    """The agent did not answer by the deadline, or is known not to answer at present."""


@dataclass
class _Waiter:
    """A thread that waits for the answer to its request. Who takes it out of `Link._waiters` under the lock decides
    whose the answer is: it is set there and then, or belongs to nobody and is given back."""

    is_over: threading.Event = field(default_factory=threading.Event)
    answer: ClientMessage | None = None
    error: KvPeerError | None = None


class Link:
    """A live connection with its pool mapped. See the module docstring; made by `open_link`.

    `_lock` protects `_waiters` with their answers, `_last_id` and `_fault`; `_send_lock` keeps frames whole on the
    socket. Neither is held while the other is taken.
    """

    def __init__(self, sock: socket.socket, welcome: ClientWelcome, pool: PoolMap) -> None:
        self.welcome = welcome
        self.verify = Verify(welcome.verify)
        self.pool = pool
        self._sock = sock
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._last_id = 0
        self._fault: PeerUnavailableError | None = None
        self._heard_at = 0.0
        self._silent_until = 0.0
        self.policy: PolicyTold | None = None
        """What the agent told last of the engine's policy; None: nothing. Replaced as a whole."""

    @property
    def is_responsive(self) -> bool:
        """False while the agent is known not to answer."""
        return self._fault is None and time.monotonic() >= self._silent_until

    def request(self, message: ClientMessage, deadline: float) -> ClientMessage:
        """The agent's answer. Blocks until it is there, at most until `deadline` (monotonic seconds).

        Raises:
            AgentSilentError: no answer by the deadline, or none is expected.
            PeerUnavailableError: the connection is broken.
            CapacityError: the agent refused because a limit is reached.
            RemoteProtocolError: the agent refused for another reason; the message is its own.
        """
        now = time.monotonic()
        if now < self._silent_until:
            raise AgentSilentError("the agent does not answer at present")
        if now >= deadline:
            raise AgentSilentError("the deadline passed before the request was sent")
        waiter = _Waiter()
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._last_id += 1
            frame_id = self._last_id
            self._waiters[frame_id] = waiter
        try:
            left_s = deadline - now
            deadline_ms = remaining_ms(left_s - min(REPLY_MARGIN_S, left_s / 4))
            self._send(pack_frame(FrameKind.REQUEST, frame_id, encode(message), deadline_ms), deadline)
            waiter.is_over.wait(max(0.0, deadline - time.monotonic()))
        finally:
            with self._lock:
                self._waiters.pop(frame_id, None)
                answer, error = waiter.answer, waiter.error
        if error is not None:
            raise error
        if answer is None:
            self._note_silence(now)
            raise AgentSilentError(f"no answer to a {type(message).__name__} by its deadline")
        return answer

    def give_back(self, message: Release | Abandon) -> None:
        """Tells the agent what is not needed any more. If that is not possible the connection is ended, which tells
        it too: nothing stays held for ever. Blocks only while the agent does not read, for GIVE_BACK_TIMEOUT_S at
        most."""
        try:
            self._send(pack_frame(FrameKind.NOTICE, 0, encode(message)), time.monotonic() + GIVE_BACK_TIMEOUT_S)
        except PeerUnavailableError:
            self.shutdown()

    def tell(self, message: Traced) -> bool:
        """Tells the agent something that may be lost; whether it was taken. Blocks only while the agent does not read,
        for GIVE_BACK_TIMEOUT_S at most."""
        try:
            self._send(pack_frame(FrameKind.NOTICE, 0, encode(message)), time.monotonic() + GIVE_BACK_TIMEOUT_S)
        except PeerUnavailableError:
            return False
        return True

    def serve(self, late: Callable[[ClientMessage], None]) -> PeerUnavailableError:
        """Reads until the connection ends; returns why. `late` gets the answers whose askers have given up."""
        reader = FrameReader()
        try:
            while chunk := self._sock.recv(READ_BYTES):
                self._heard_at, self._silent_until = time.monotonic(), 0.0
                for frame in reader.feed(chunk):
                    self._dispatch(frame, late)
            fault = PeerUnavailableError("the agent closed the connection")
        except (OSError, RemoteProtocolError, LocalProtocolError) as error:
            fault = PeerUnavailableError(f"the connection to the agent broke: {error}")
            fault.__cause__ = error
        with self._lock:
            self._fault = fault
            waiters = list(self._waiters.values())
            for waiter in waiters:
                waiter.error = fault
        for waiter in waiters:
            waiter.is_over.set()
        return fault

    def shutdown(self) -> None:
        """Makes `serve` return. May be called from any thread, again and again."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Unmaps the pool and closes the socket, in this order: the agent reuses slots once the socket is closed. The
        caller knows that no copy is running."""
        self.pool.close()
        self._sock.close()

    def _dispatch(self, frame: Frame, late: Callable[[ClientMessage], None]) -> None:
        answer = decode_client(frame.body)
        if isinstance(answer, PolicyTold):
            self.policy = answer
            return
        error = _refusal_error(answer) if isinstance(answer, Refusal) else None
        with self._lock:
            waiter = self._waiters.pop(frame.id, None)
            if waiter is not None and error is not None:
                waiter.error = error
            elif waiter is not None:
                waiter.answer = answer
        if waiter is None:
            late(answer)
        else:
            waiter.is_over.set()

    def _send(self, frame: bytes, deadline: float) -> None:
        if not self._send_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise AgentSilentError("the agent does not read its socket")
        try:
            view = memoryview(frame)
            while view:
                try:
                    view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self._await_room(deadline, is_partial=len(view) < len(frame))
        except (OSError, ValueError) as error:
            raise PeerUnavailableError(f"the connection to the agent broke: {error}") from error
        finally:
            self._send_lock.release()

    def _await_room(self, deadline: float, *, is_partial: bool) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if poll.poll(max(0, deadline - time.monotonic()) * 1000):
            return
        if is_partial:  # what follows on this stream would be taken for the rest of this frame
            self.shutdown()
        raise AgentSilentError("the agent does not read its socket")

    def _note_silence(self, since: float) -> None:
        now = time.monotonic()
        if now - max(since, self._heard_at) >= SILENT_AFTER_S:
            self._silent_until = now + SILENCE_S


def open_link(path: str, registration: Registration, deadline: float) -> Link:
    """A link to the agent at this socket, after a hello. Blocks until `deadline` at most.

    Raises:
        PeerUnavailableError: nobody serves there, or did not answer.
        ConfigError: the agent refused this client; the message says why.
        CapacityError: the agent serves as many clients as it may, or its pool could not be mapped.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(path)
        hello = ClientHello(**vars(registration))
        sock.sendall(pack_frame(FrameKind.REQUEST, 0, encode(hello), remaining_ms(deadline - time.monotonic())))
        welcome = _welcome(sock, fds)
        payload_fd, header_fd = fds
        pool = PoolMap(payload_fd, header_fd, welcome.extent_bytes, welcome.agent_id)
        sock.settimeout(None)  # reads wait for as long as the connection lives; sends never block, see _send
    except OSError as error:
        sock.close()
        raise PeerUnavailableError(f"no agent answers at {path}: {error}") from error
    except KvPeerError:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
    return Link(sock, welcome, pool)


def _welcome(sock: socket.socket, fds: list[int]) -> ClientWelcome:
    """Reads the answer to the hello. Received descriptors are added to `fds`, whatever happens then."""
    reader = FrameReader()
    frames: list[Frame] = []
    while not frames:
        chunk, received, _, _ = socket.recv_fds(sock, READ_BYTES, HELLO_FDS, socket.MSG_CMSG_CLOEXEC)
        fds.extend(received)
        if not chunk:
            raise PeerUnavailableError("the agent closed the connection at the hello")
        frames = reader.feed(chunk)
    answer = decode_client(frames[0].body)
    if isinstance(answer, Refusal):
        if answer.code == RefusalCode.BUSY:
            raise CapacityError(f"the agent refused this client: {answer.message}")
        raise ConfigError(f"the agent refused this client: {answer.message}")
    if not isinstance(answer, ClientWelcome) or len(fds) != HELLO_FDS:
        raise RemoteProtocolError(
            f"the agent answered the hello with {type(answer).__name__} and {len(fds)} descriptors"
        )
    if answer.verify not in tuple(Verify):
        raise RemoteProtocolError(
            f"the agent wants pages to be verified in way {answer.verify}, which this client does not know: "
            "run the same release on both"
        )
    return answer


def _refusal_error(refusal: Refusal) -> KvPeerError:
    kind = CapacityError if refusal.code == RefusalCode.BUSY else RemoteProtocolError
    return kind(f"the agent refused ({refusal.code}): {refusal.message}")
