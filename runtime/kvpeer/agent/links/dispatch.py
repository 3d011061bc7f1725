"""From a request's frame to its answer: decoding, the handler, and how errors become refusals."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvpeer.agent.tasks import escalate
from kvpeer.metrics import Metrics
from kvpeer.model import CapacityError, PeerUnavailableError, RemoteProtocolError
from kvpeer.wire.codec import decode_peer
from kvpeer.wire.messages import AgentInfo, Message, Ok, PeerMessage, Refusal, RefusalCode

__all__ = ["Dispatcher", "Handler", "Handlers"]

Handler = Callable[[AgentInfo, Any], Awaitable["PeerMessage | None"]]
"""Serves one message of a peer; None stands for Ok. A notice's answer is dropped."""

Handlers = Mapping[type[Message], Handler]

_log = logging.getLogger(__name__)


class Dispatcher:
    """Stateless besides its counters; one serves all links."""

    def __init__(self, handlers: Handlers, metrics: Metrics) -> None:
        self._handlers = handlers
        self._served = metrics.counter("kvpeer_links_served_requests_total")
        self._failures = metrics.counter("kvpeer_agent_task_failures_total")

    async def answer(self, peer: AgentInfo, body: bytes) -> PeerMessage:
        """What to send back: the handler's answer, or a Refusal for each error that it may raise.

        Raises:
            RemoteProtocolError: the body is malformed, or its columns do not fit together: the link must end.
        """
        message = decode_peer(body)
        name = type(message).__name__
        handler = self._handlers.get(type(message))
        if handler is None:
            self._served.labels(message=name, outcome="refused").inc()
            return Refusal(RefusalCode.UNSUPPORTED, f"{name} is not served here")
        try:
            answer = await handler(peer, message) or Ok()
        except RemoteProtocolError as fault:
            self._served.labels(message=name, outcome="failed").inc()
            raise RemoteProtocolError(f"{name}: {fault}") from fault
        except CapacityError as limit:
            answer = Refusal(RefusalCode.BUSY, str(limit))
        except PeerUnavailableError as error:
            answer = Refusal(RefusalCode.REFUSED, str(error))
        except Exception as error:  # noqa: BLE001 - a root: what a handler does wrong costs this request, not the link
            _log.exception("serving %s of %s failed", name, peer.name)
            self._failures.labels(task=f"serve {name}").inc()
            escalate(error)
            answer = Refusal(RefusalCode.INTERNAL, f"{name} failed; see the log of the agent")
        self._served.labels(message=name, outcome=_outcome(answer)).inc()
        return answer


def _outcome(answer: PeerMessage) -> str:
    if not isinstance(answer, Refusal):
        return "answered"
    return "failed" if answer.code == RefusalCode.INTERNAL else "refused"
