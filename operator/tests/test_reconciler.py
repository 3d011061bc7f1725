"""Looks at a cluster whose API server is a dictionary converge, whatever fails on the way, and then write nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import kopf
import pytest
from jsonpatch import apply_patch
from kvpeer_operator import main
from kvpeer_operator.injection.names import CLUSTER_LABEL
from kvpeer_operator.models import PeerCacheCluster
from kvpeer_operator.reconciler import ForbiddenError, Reconciler, admit_pod
from kvpeer_operator.work import ClusterKey

KEY = ClusterKey("models", "chat")
TIME = "2026-01-01T00:00:00Z"
SECRET = "ab" * 32


class Store:
    """An `Api` that keeps objects by kind and name, and counts what is written. `fails` holds after how many calls the
    next one raises."""

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        self.objects = {(each["kind"], each["metadata"]["name"]): copy.deepcopy(dict(each)) for each in objects}
        self.writes: list[str] = []
        self.fails_after: int | None = None
        self.forbidden = ""

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        self._call()
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[Mapping[str, Any]]:
        self._call()
        wanted = dict([labels.split("=")]) if labels else {}
        found = [each for (each_kind, _), each in self.objects.items() if each_kind == kind]
        return [each for each in found if wanted.items() <= each["metadata"].get("labels", {}).items()]

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


def _cluster() -> dict[str, Any]:
    return {
        "apiVersion": "kvpeer.io/v1alpha1",
        "kind": "PeerCacheCluster",
        "metadata": {"name": "chat", "namespace": "models", "uid": "c-1", "generation": 3},
        "spec": {"images": {"agent": "a:1", "payload": "a:1"}},
    }


def _policy(name: str = "chat") -> dict[str, Any]:
    return {
        "apiVersion": "kvpeer.io/v1alpha1",
        "kind": "P2PPolicy",
        "metadata": {"name": name, "namespace": "models", "creationTimestamp": TIME},
        "spec": {"clusterRef": {"name": "chat"}, "mode": "On"},
    }


def _pod() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "engine", "namespace": "models", "labels": {CLUSTER_LABEL: "chat"}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["m"]}]},
    }


def _look(store: Store, reconciler: Reconciler | None = None, now: float = 0.0) -> list[str]:
    store.writes.clear()
    (reconciler or Reconciler(store)).look(KEY, now, TIME, SECRET)
    return list(store.writes)


def _look_often(store: Store) -> None:
    for _ in range(3):
        _look(store)


def _converge(store: Store) -> None:
    for _ in range(10):
        trial = store.objects.get(("Pod", "chat-kvpeer-trial"))
        if trial:
            trial["status"] = {"phase": "Succeeded"}
        if not _look(store):
            return
    pytest.fail(f"still writes: {store.writes}")


def test_looks_converge_and_then_write_nothing() -> None:
    store = Store(_cluster(), _policy())
    assert _look(store) == [
        "apply Service",
        "create Secret",
        "create Pod",
        "status PeerCacheCluster",
        "status P2PPolicy",
    ]
    _converge(store)
    status = PeerCacheCluster.model_validate(store.objects["PeerCacheCluster", "chat"]).status
    assert status.observed_generation == 3
    assert {each.type: each.status for each in status.conditions}["Ready"] == "True"
    assert ("Pod", "chat-kvpeer-trial") not in store.objects


@pytest.mark.parametrize("n_calls", range(14))
def test_an_operator_that_dies_in_the_middle_is_made_good_by_the_next(n_calls: int) -> None:
    whole, cut = Store(_cluster(), _policy()), Store(_cluster(), _policy())
    _converge(whole)
    cut.fails_after = n_calls
    with pytest.raises(ConnectionError):
        _look_often(cut)
    cut.fails_after = None
    _converge(cut)
    assert cut.objects == whole.objects


def test_two_operators_at_once_end_with_the_same() -> None:
    alone, shared = Store(_cluster(), _policy()), Store(_cluster(), _policy())
    _converge(alone)
    for _ in range(3):
        _look(shared)
        shared.writes.clear()
        Reconciler(shared).look(KEY, 0.0, TIME, "cd" * 32)
    _converge(shared)
    assert shared.objects == alone.objects
    assert shared.objects["Secret", "chat-kvpeer-secret"]["data"] == {"secret": SECRET}


def test_a_refused_trial_is_said_and_not_asked_for_again_at_once() -> None:
    store = Store(_cluster())
    store.forbidden = "exceeded quota: team"
    reconciler = Reconciler(store)
    _look(store, reconciler)
    _look(store, reconciler)
    conditions = store.objects["PeerCacheCluster", "chat"]["status"]["conditions"]
    assert {each["type"]: each["reason"] for each in conditions}["ImagesReady"] == "Quota"
    store.forbidden = ""
    assert _look(store, reconciler, now=59.0) == []
    assert "create Pod" in _look(store, reconciler, now=61.0)


def test_a_cluster_that_is_gone_leaves_its_policies_without_one() -> None:
    store = Store(_cluster(), _policy())
    _converge(store)
    del store.objects["PeerCacheCluster", "chat"]
    assert Reconciler(store).look(KEY, 0.0, TIME, SECRET) is False
    assert store.objects["P2PPolicy", "chat"]["status"]["conditions"][0]["reason"] == "NoCluster"


def test_a_policy_that_this_version_does_not_understand_keeps_nothing_from_working() -> None:
    newer = _policy("newer")
    newer["spec"]["mode"] = "Shadow"
    store = Store(_cluster(), _policy(), newer)
    _converge(store)
    assert store.objects["P2PPolicy", "chat"]["status"]["effectiveMode"] == "On"


def test_the_webhook_gives_a_pod_its_agent_through_kopf() -> None:
    store = Store(_cluster(), _policy())
    _converge(store)
    pod = _pod()
    patch = kopf.Patch(body=kopf.Body(pod))
    main.inject_agent(body=kopf.Body(pod), namespace="models", patch=patch, memo=kopf.Memo(api=store))
    after = apply_patch(pod, patch.as_json_patch())
    expected, skip = admit_pod(store, pod, "models")
    assert skip is None
    assert after == apply_patch(pod, list(expected.operations))
    assert [each["name"] for each in after["spec"]["initContainers"]] == ["kvpeer-payload", "kvpeer-agent"]


def test_the_webhook_notes_why_a_pod_is_left_alone() -> None:
    pod = _pod()
    patch = kopf.Patch(body=kopf.Body(pod))
    main.inject_agent(body=kopf.Body(pod), namespace="models", patch=patch, memo=kopf.Memo(api=Store()))
    after = apply_patch(pod, patch.as_json_patch())
    assert after["metadata"].pop("annotations")["kvpeer.io/skipped"] == "no-cluster"
    assert after == pod
