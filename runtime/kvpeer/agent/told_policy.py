"""The policy of this pod's engine, as the cluster's operator tells it while the engine runs.

The operator posts a document that is signed with a key which follows from the cluster's secret. Documents carry the
revision of the policies that they were made of, and the highest one wins: what comes late, or again, changes nothing,
and what a deletion said is not undone by an older word. The last one is kept in the runtime folder, for an agent that
is started again. Its clients are told by `PolicyTold`; what it means, the adapters know.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvpeer.agent.config import AgentSettings
from kvpeer.model import CapacityError, RemoteProtocolError
from kvpeer.wire.messages import VARIABLES_MAX, PolicyTold

__all__ = ["DOCUMENT_BYTES_MAX", "PolicyRefusedError", "ToldPolicy", "policy_key", "signature"]

DOCUMENT_BYTES_MAX = 16 << 10
"""Of a posted body. A policy has a few hundred bytes."""

ACCEPT_DEADLINE_S = 1.0
"""For the event loop to take a posted document; the operator posts it again."""

_FILE = "policy.json"
_PURPOSE = b"kvpeer policy 1 "

_log = logging.getLogger(__name__)


class PolicyRefusedError(RemoteProtocolError):
    """The document is not for this agent, or nobody proved that it comes from the operator."""


_Text = Annotated[str, Meta(max_length=253)]  # as PolicyTold has it


class _Envelope(msgspec.Struct, frozen=True):
    document: str
    signature: str


class _Document(msgspec.Struct, frozen=True):
    cluster: str
    agent: str
    revision: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    policy: _Text
    variables: Annotated[dict[_Text, _Text], Meta(max_length=VARIABLES_MAX)]


def policy_key(secret: bytes, cluster: str) -> bytes:
    """The key that documents of this cluster are signed with. secret: the cluster's; empty in insecure mode."""
    return hmac.digest(secret, _PURPOSE + cluster.encode(), hashlib.sha256)


def signature(key: bytes, document: str) -> str:
    """What stands beside a document, in hexadecimal."""
    return hmac.digest(key, document.encode(), hashlib.sha256).hex()


class ToldPolicy:
    """Belongs to one event loop. key: see `policy_key`; empty: no document is taken, because none can be proved.
    on_change: called with what clients are to be told."""

    def __init__(self, agent: AgentSettings, key: bytes, folder: Path, on_change: Callable[[PolicyTold], None]) -> None:
        """Takes up the document that an earlier agent of this folder kept, if it still proves itself."""
        self._recipient = (agent.cluster, agent.name)
        self._key = key
        self._file = folder / _FILE
        self._on_change = on_change
        self.current: PolicyTold | None = None
        try:
            self.current = self._checked(self._file.read_bytes())
            on_change(self.current)
        except FileNotFoundError:
            pass
        except (OSError, RemoteProtocolError) as error:
            _log.warning("the policy in %s is not used: %s", self._file, error)

    def accept(self, body: bytes) -> int:
        """Takes a posted document if it is not older than what is known; returns the revision that is known now.

        Raises:
            RemoteProtocolError: it is malformed.
            PolicyRefusedError: it is not proved, or for another agent or cluster.
        """
        told = self._checked(body)
        known = self.current
        if known is not None and (told.revision < known.revision or told == known):
            return known.revision
        self.current = told
        self._keep(body)
        _log.info("policy %s at revision %d: %s", told.policy or "(none)", told.revision, told.variables)
        if known is None or (known.policy, known.variables) != (told.policy, told.variables):
            self._on_change(told)
        return told.revision

    def accept_from_threads(self) -> Callable[[bytes], int]:
        """`accept` for other threads than that of the running event loop, for which it blocks: at most
        ACCEPT_DEADLINE_S, then it raises CapacityError."""
        loop = asyncio.get_running_loop()

        async def accept(body: bytes) -> int:
            return self.accept(body)

        def call(body: bytes) -> int:
            try:
                return asyncio.run_coroutine_threadsafe(accept(body), loop).result(ACCEPT_DEADLINE_S)
            except (FutureTimeoutError, CancelledError) as error:
                raise CapacityError("the agent is busy") from error

        return call

    def _checked(self, body: bytes) -> PolicyTold:
        if len(body) > DOCUMENT_BYTES_MAX:
            raise RemoteProtocolError(f"a document of more than {DOCUMENT_BYTES_MAX} bytes")
        try:
            envelope = msgspec.json.decode(body, type=_Envelope)
            if not self._key:
                raise PolicyRefusedError("this agent has no secret of a cluster, so that no document can be proved")
            if not hmac.compare_digest(signature(self._key, envelope.document), envelope.signature):
                raise PolicyRefusedError("the signature is not one with this cluster's secret")
            document = msgspec.json.decode(envelope.document, type=_Document)
        except (msgspec.DecodeError, UnicodeError, TypeError) as error:
            raise RemoteProtocolError(f"the document cannot be read: {error}") from error
        if (document.cluster, document.agent) != self._recipient:
            raise PolicyRefusedError(f"the document is for {document.cluster}/{document.agent}")
        return PolicyTold(document.revision, document.policy, document.variables)

    def _keep(self, body: bytes) -> None:
        draft = self._file.with_suffix(".draft")
        try:
            draft.write_bytes(body)
            draft.replace(self._file)
        except OSError as error:
            _log.warning("the policy cannot be kept for the next start: %s", error)
