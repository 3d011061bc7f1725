"""An `Api` in memory, and objects to put into it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpeer_operator.injection.names import CLUSTER_LABEL
from kvpeer_operator.reconcile import Word
from kvpeer_operator.reconciler import ForbiddenError
from kvpeer_operator.work import ClusterKey

KEY = ClusterKey("models", "chat")
TIME = "2026-01-01T00:00:00Z"
SECRET = "ab" * 32


class Agents:
    """Agents that take what they are told, or some that do not."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.silent: set[str] = set()

    def post(self, words: Sequence[Word]) -> list[bool]:
        for each in words:
            if each.pod not in self.silent:
                self.told.append(json.loads(json.loads(each.body)["document"]))
        return [each.pod not in self.silent for each in words]


class Store:
    """An `Api` that keeps objects by kind and name, and counts what is written. `fails` holds after how many calls the
    next one raises."""

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        self.objects = {(each["kind"], each["metadata"]["name"]): copy.deepcopy(dict(each)) for each in objects}
        self.writes: list[str] = []
        self.fails_after: int | None = None
        self.forbidden = ""
        self.revision = 0

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        self._call()
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[Mapping[str, Any]]:
        self._call()
        wanted = dict([labels.split("=")]) if labels else {}
        found = [each for (each_kind, _), each in self.objects.items() if each_kind == kind]
        return [each for each in found if wanted.items() <= each["metadata"].get("labels", {}).items()]

    def list_at(self, kind: str, namespace: str) -> tuple[Sequence[Mapping[str, Any]], int]:
        self.revision += 1
        return self.list(kind, namespace), self.revision

    def apply(self, obj: Mapping[str, Any]) -> None:
        self._write("apply", obj)

    def create(self, obj: Mapping[str, Any]) -> None:
        if self.forbidden and obj["kind"] == "Pod":
            raise ForbiddenError(self.forbidden)
        if (obj["kind"], obj["metadata"]["name"]) not in self.objects:
            self._write("create", obj)

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self._call()
        if self.objects.get((kind, name), {}).get("metadata", {}).get("uid") == uid:
            del self.objects[kind, name]
            self.writes.append(f"delete {kind}")

    def apply_status(self, obj: Mapping[str, Any]) -> None:
        self._call()
        self.objects[obj["kind"], obj["metadata"]["name"]]["status"] = copy.deepcopy(obj["status"])
        self.writes.append(f"status {obj['kind']}")

    def _write(self, verb: str, obj: Mapping[str, Any]) -> None:
        self._call()
        made = copy.deepcopy(dict(obj))
        made["metadata"] = {**made["metadata"], "uid": "u-1", "creationTimestamp": TIME}
        if "stringData" in made:
            made["data"] = made.pop("stringData")
        self.objects[made["kind"], made["metadata"]["name"]] = made
        self.writes.append(f"{verb} {made['kind']}")

    def _call(self) -> None:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise ConnectionError("429 or 500, or a cut connection")


def cluster_object() -> dict[str, Any]:
    return {
        "apiVersion": "kvpeer.io/v1alpha1",
        "kind": "PeerCacheCluster",
        "metadata": {"name": "chat", "namespace": "models", "uid": "c-1", "generation": 3},
        "spec": {"images": {"agent": "a:1", "payload": "a:1"}},
    }


def policy_object(name: str = "chat") -> dict[str, Any]:
    return {
        "apiVersion": "kvpeer.io/v1alpha1",
        "kind": "P2PPolicy",
        "metadata": {"name": name, "namespace": "models", "creationTimestamp": TIME},
        "spec": {"clusterRef": {"name": "chat"}, "mode": "On"},
    }


def pod_object() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "engine", "namespace": "models", "labels": {CLUSTER_LABEL: "chat"}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["m"]}]},
    }
