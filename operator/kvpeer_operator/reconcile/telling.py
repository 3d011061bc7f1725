"""What running agents are to be told of policies, and which of them know it already. Pure; time comes in.

Policies reach a pod's engine at its creation by its environment, and from then on by its agent: the operator posts a
signed document to each agent whose policy changed, or which it has not told yet in this run of its own.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpeer_operator.injection import policy_variables
from kvpeer_operator.injection.command_line import Engine
from kvpeer_operator.injection.names import SECRET_KEY, TOLD_ANNOTATION
from kvpeer_operator.models import ClusterReference, P2PPolicySpec, PeerCacheCluster
from kvpeer_operator.reconcile.observed import Object, Observed, agent_runs, annotation, is_member, is_over
from kvpeer_operator.reconcile.policies import governing_policy

__all__ = ["Telling", "Word", "words"]

RETRY_FIRST_S, RETRY_LAST_S = 2.0, 300.0
"""After an agent could not be told, doubled each time: it may just be starting, or be cut off for hours."""

_PURPOSE = b"kvpeer policy 1 "


@dataclass(frozen=True, slots=True)
class Word:
    """What one agent is to be told. meaning: equal for words that mean the same; body: what is posted to it."""

    pod: str
    host: str
    port: int
    meaning: str
    body: bytes


def words(observed: Observed) -> list[Word]:
    """One for each agent that runs, and whose engine has variables that are the policy's to change. Empty without the
    cluster's secret: nothing could be proved."""
    cluster = observed.cluster
    secret = _secret(observed)
    if secret is None:
        return []
    key = hmac.digest(secret, _PURPOSE + cluster.metadata.name.encode(), hashlib.sha256)
    return [_word(observed, pod, key) for pod in observed.pods if _can_be_told(pod, cluster)]


@dataclass(slots=True)
class Telling:
    """Which words the agents of one cluster have taken. Not thread-safe."""

    _taken: dict[str, str] = field(default_factory=dict)
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)

    def due(self, all_words: Sequence[Word], now: float) -> list[Word]:
        """Those that are to be posted now. What is known of pods without a word is forgotten."""
        pods = {each.pod for each in all_words}
        self._taken = {pod: meaning for pod, meaning in self._taken.items() if pod in pods}
        untold = self.untold(all_words)
        self._failures = {pod: failed for pod, failed in self._failures.items() if pod in untold}
        # A time further away was set before the clock was put back.
        waiting = {pod for pod, (_, at) in self._failures.items() if 0 < at - now <= RETRY_LAST_S}
        return [each for each in self._open(all_words) if each.pod not in waiting]

    def ended(self, word: Word, now: float, *, is_taken: bool) -> None:
        """A word was posted."""
        if is_taken:
            self._taken[word.pod] = word.meaning
            self._failures.pop(word.pod, None)
        else:
            n_failures = self._failures.get(word.pod, (0, 0.0))[0]
            wait_s = min(RETRY_LAST_S, RETRY_FIRST_S * 2.0 ** min(n_failures, 16))
            self._failures[word.pod] = n_failures + 1, now + wait_s

    def untold(self, all_words: Sequence[Word]) -> frozenset[str]:
        """The pods whose agents have not taken their word."""
        return frozenset(each.pod for each in self._open(all_words))

    def wait_s(self, now: float) -> float:
        """Until a word is to be posted again; infinite if none is. To be asked once what was due is posted."""
        return min((max(0.0, at - now) for _, at in self._failures.values()), default=float("inf"))

    def _open(self, all_words: Iterable[Word]) -> list[Word]:
        return [each for each in all_words if self._taken.get(each.pod) != each.meaning]


def _can_be_told(pod: Object, cluster: PeerCacheCluster) -> bool:
    is_there = is_member(pod, cluster.metadata.name) and agent_runs(pod) and not is_over(pod)
    return is_there and bool(annotation(pod, TOLD_ANNOTATION)) and bool(pod["status"].get("podIP"))


def _word(observed: Observed, pod: Object, key: bytes) -> Word:
    cluster = observed.cluster.metadata.name
    policy = governing_policy(observed.policies, cluster, dict(pod["metadata"].get("labels") or {}))
    spec = policy.spec if policy else P2PPolicySpec(cluster_ref=ClusterReference(name=cluster))
    names = annotation(pod, TOLD_ANNOTATION).split(",")
    of_any_engine = {**policy_variables(Engine.VLLM, spec), **policy_variables(Engine.SGLANG, spec)}
    variables = {name: of_any_engine[name] for name in names if name in of_any_engine}
    told = {
        "cluster": cluster,
        "agent": pod["metadata"]["name"],
        "policy": f"{policy.metadata.name}@{policy.metadata.generation}" if policy else "",
        "variables": variables,
    }
    document = json.dumps({**told, "revision": observed.revision})
    signature = hmac.digest(key, document.encode(), hashlib.sha256).hex()
    body = json.dumps({"document": document, "signature": signature}).encode()
    meaning = json.dumps(variables, sort_keys=True)
    return Word(pod["metadata"]["uid"], pod["status"]["podIP"], observed.cluster.spec.ports.metrics, meaning, body)


def _secret(observed: Observed) -> bytes | None:
    """The secret's bytes, as agents read them; empty in mode Insecure; None: there is none that can be read."""
    if observed.cluster.spec.security.mode == "Insecure":
        return b""
    try:
        text = base64.b64decode((observed.secret or {}).get("data", {})[SECRET_KEY], validate=True).decode("ascii")
        return bytes.fromhex(text.strip())
    except (KeyError, ValueError):
        return None
