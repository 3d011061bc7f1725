"""The client's side of its agent's life: one link at a time, kept by one background thread.

While there is no agent every operation fails at once. When the agent is lost, the thread lets running copies end,
unmaps the pool and only then connects again, with backoff.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator

from kvpeer.client.link import Link, open_link
from kvpeer.client.settings import Registration
from kvpeer.model import ConfigError, KvPeerError, PeerUnavailableError
from kvpeer.wire.messages import Abandon, ClientMessage, Fetched, PolicyTold, Release, Reserved
from kvpeer.wire.packing import U1, U4, count, pack, unpack

__all__ = ["CLOSE_WAIT_S", "Session"]

CONNECT_TIMEOUT_S = 5.0
"""For one attempt to connect and say hello."""

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
"""Between two attempts: quick after a restart, and nearly free while there is no agent. Doubled each time, with
jitter, because all ranks lose their agent at once."""

CLOSE_WAIT_S = 5.0
"""What `close` waits for the thread unless told otherwise: running copies end first."""

COPY_CHECK_S = 1.0
"""How often the thread says that it still waits for a copy."""

_log = logging.getLogger(__name__)


class Session:
    """A link to the agent whenever there is one. Thread-safe.

    find_socket: returns the path to connect to; may start an agent. Called by the session's thread with a deadline.
    `_changed` (a condition) protects `_link`, `_n_users`, `_is_closed`, `_refusal` and `n_losses`; nothing blocks
    under it.
    """

    def __init__(self, find_socket: Callable[[float], str], registration: Registration, start_timeout_s: float) -> None:
        self._find_socket = find_socket
        self._registration = registration
        self._start_timeout_s = start_timeout_s
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._n_users = 0
        self._is_closed = False
        self._refusal: ConfigError | None = None
        self.n_losses = 0
        self._policy: PolicyTold | None = None
        self._thread = threading.Thread(target=self._run, name="kvpeer-session", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether there is an agent that answers."""
        link = self._link
        return link is not None and link.is_responsive

    @property
    def policy(self) -> PolicyTold | None:
        """What an agent told last of the engine's policy; None: nothing yet. Never blocks."""
        link = self._link
        if link is not None and link.policy is not None:
            self._policy = link.policy
        return self._policy

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until there is a link; False if there is none in time.

        Raises:
            ConfigError: connecting failed for a reason that waiting does not cure.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._link is not None or self._refusal is not None, timeout_s)
            if self._link is None and self._refusal is not None:
                raise self._refusal
            return self._link is not None

    @contextlib.contextmanager
    def link(self) -> Iterator[Link]:
        """The live link, whose pool stays mapped until the block ends, even if the agent is lost meanwhile.

        Raises:
            PeerUnavailableError: there is no agent at present.
        """
        with self._changed:
            link = self._link
            if link is None:
                raise PeerUnavailableError("there is no agent at present")
            self._n_users += 1
        try:
            yield link
        finally:
            with self._changed:
                self._n_users -= 1
                self._changed.notify_all()

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Ends the connection and the thread. Blocks until running copies have ended, for `wait_s` at most."""
        with self._changed:
            self._is_closed = True
            link = self._link
            self._changed.notify_all()
        if link is not None:
            link.shutdown()
        self._thread.join(wait_s)

    # ---- the thread

    def _run(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while not self._is_closed:
            try:
                link = self._connect()
            except KvPeerError as error:
                self._note(error)
                self._pause(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
                continue
            backoff_s = BACKOFF_S_MIN
            self._keep(link)

    def _connect(self) -> Link:
        try:
            path = self._find_socket(time.monotonic() + self._start_timeout_s)
        except OSError as error:  # out of descriptors, a full disk: this thread must live to try again
            raise PeerUnavailableError(f"no agent could be looked for: {error}") from error
        return open_link(path, self._registration, time.monotonic() + CONNECT_TIMEOUT_S)

    def _keep(self, link: Link) -> None:
        """From the hello to the unmapping of one link."""
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                self._link, self._refusal = link, None
                self._changed.notify_all()
        if not is_closed:
            fault = link.serve(lambda answer: _give_back(link, answer))
            if not self._is_closed:
                _log.warning("the agent is lost, all pages are misses until it is back: %s", fault)
        with self._changed:
            self._link = None
            self.n_losses += 1
            while not self._changed.wait_for(lambda: self._n_users == 0, COPY_CHECK_S):
                _log.warning("still waiting for %d copies before the pool is unmapped", self._n_users)
        link.close()

    def _note(self, error: KvPeerError) -> None:
        _log.debug("no agent: %s", error)
        if isinstance(error, ConfigError):
            with self._changed:
                if self._refusal is None:
                    _log.error("this engine has no agent: %s", error)
                self._refusal = error
                self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)


def _give_back(link: Link, answer: ClientMessage) -> None:
    """An answer came too late: what it grants is given back, or it would be held until the connection ends."""
    if isinstance(answer, Fetched) and answer.pin:
        link.give_back(Release(answer.pin, b"", b""))
    elif isinstance(answer, Reserved):
        n = count(answer.statuses, 1, "statuses")
        granted = unpack(answer.statuses, U1, n, "statuses") == 0
        slots = unpack(answer.slots, U4, n, "slots")[granted]
        generations = unpack(answer.generations, U4, n, "generations")[granted]
        link.give_back(Abandon(pack(slots, U4), pack(generations, U4)))
