"""What the webhook reads, kept for a moment: when a Deployment grows by hundreds, its pods come faster than the API
server can be asked about each, and the answers are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["FRESH_S", "Reader", "RecentReads"]

FRESH_S = 1.0
"""A pod that is made within this time of a change may get what was before it. Of its policy it is told as soon as its
agent runs; for the rest it counts as outdated."""

KEPT_MAX = 1024
"""Answers that are kept: four a namespace in which pods are made within a second. Beyond, they are forgotten."""

_COUNTED = ("ResourceQuota",)
"""Kinds that change with each pod: an answer that has any is not kept."""


class Reader(Protocol):
    """See kvpeer_operator.reconciler.Api."""

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None: ...
    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[Mapping[str, Any]]: ...


@dataclass(slots=True)
class _Answer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float = 0.0
    value: Any = None


class RecentReads:
    """A Reader whose answers may be FRESH_S old, and as much older as reading took. Thread-safe; who asks for what
    somebody else is asking for waits for that answer. Objects are shared between callers, who do not change them."""

    def __init__(self, api: Reader, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._lock = threading.Lock()  # protects _answers; nothing blocks under it
        self._answers: dict[tuple[str, ...], _Answer] = {}

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        """See Reader. Raises what the API raises."""
        found: Mapping[str, Any] | None = self._recent(
            ("get", kind, namespace, name), lambda: self._api.get(kind, namespace, name)
        )
        return found

    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[Mapping[str, Any]]:
        """See Reader. Raises what the API raises."""
        found: Sequence[Mapping[str, Any]] = self._recent(
            ("list", kind, namespace, labels), lambda: self._api.list(kind, namespace, labels)
        )
        return found

    def _recent(self, key: tuple[str, ...], read: Callable[[], Any]) -> Any:
        with self._lock:
            if len(self._answers) >= KEPT_MAX:
                self._answers.clear()
            answer = self._answers.setdefault(key, _Answer())
        with answer.lock:  # held while the API server is asked: that is what the others wait for
            if self._clock() >= answer.until:
                answer.value = read()
                is_kept = not (answer.value and key[1] in _COUNTED)
                # From now and not from when it was asked for: a slow API server is the one to be spared.
                answer.until = self._clock() + FRESH_S if is_kept else 0.0
            return answer.value
