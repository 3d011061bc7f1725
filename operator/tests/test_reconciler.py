"""Looks at a cluster whose API server is a dictionary converge, whatever fails on the way, and then write nothing."""

from __future__ import annotations

import kopf
import pytest
from jsonpatch import apply_patch
from kvpeer_operator import main
from kvpeer_operator.models import PeerCacheCluster
from kvpeer_operator.reconcile.plan import LOOK_AGAIN_S
from kvpeer_operator.reconciler import Reconciler, admit_pod
from store import KEY, SECRET, TIME, Agents, Store, cluster_object, pod_object, policy_object


def _anew() -> dict[str, object]:
    return {**cluster_object()["metadata"], "uid": "c-2"}


def _look(store: Store, reconciler: Reconciler | None = None, now: float = 0.0) -> list[str]:
    store.writes.clear()
    (reconciler or Reconciler(store, Agents().post)).look(KEY, now, TIME, SECRET)
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
    store = Store(cluster_object(), policy_object())
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
    whole, cut = Store(cluster_object(), policy_object()), Store(cluster_object(), policy_object())
    _converge(whole)
    cut.fails_after = n_calls
    with pytest.raises(ConnectionError):
        _look_often(cut)
    cut.fails_after = None
    _converge(cut)
    assert cut.objects == whole.objects


def test_two_operators_at_once_end_with_the_same() -> None:
    alone, shared = Store(cluster_object(), policy_object()), Store(cluster_object(), policy_object())
    _converge(alone)
    for _ in range(3):
        _look(shared)
        shared.writes.clear()
        Reconciler(shared, Agents().post).look(KEY, 0.0, TIME, "cd" * 32)
    _converge(shared)
    assert shared.objects == alone.objects
    assert shared.objects["Secret", "chat-kvpeer-secret"]["data"] == {"secret": SECRET}


def test_a_refused_trial_is_said_and_not_asked_for_again_at_once() -> None:
    store = Store(cluster_object())
    store.forbidden = "exceeded quota: team"
    reconciler = Reconciler(store, Agents().post)
    _look(store, reconciler)
    _look(store, reconciler)
    conditions = store.objects["PeerCacheCluster", "chat"]["status"]["conditions"]
    assert {each["type"]: each["reason"] for each in conditions}["ImagesReady"] == "Quota"
    store.forbidden = ""
    assert _look(store, reconciler, now=59.0) == []
    assert "create Pod" in _look(store, reconciler, now=61.0)


def test_a_trial_is_looked_after_until_it_ends() -> None:
    """No event tells of the trial's end: without a look soon, no engine would get an agent for minutes."""
    store = Store(cluster_object())
    reconciler = Reconciler(store, Agents().post)

    def again_s() -> float | None:
        return reconciler.look(KEY, 0.0, TIME, SECRET)

    assert again_s() == 5.0
    assert again_s() == 5.0
    trial = store.objects["Pod", "chat-kvpeer-trial"]
    trial["status"] = {"phase": "Failed"}
    trial["metadata"]["creationTimestamp"] = "1970-01-01T00:00:00Z"
    assert again_s() == 30.0
    trial["status"] = {"phase": "Succeeded"}
    assert again_s() == LOOK_AGAIN_S


def test_a_secret_that_the_user_has_to_make_is_looked_for() -> None:
    cluster = cluster_object()
    cluster["spec"]["security"] = {"secretName": "mine"}
    store = Store(cluster)
    reconciler = Reconciler(store, Agents().post)
    reconciler.look(KEY, 0.0, TIME, SECRET)
    store.objects["Pod", "chat-kvpeer-trial"]["status"] = {"phase": "Succeeded"}
    assert reconciler.look(KEY, 0.0, TIME, SECRET) == 30.0
    store.objects["Secret", "mine"] = {"kind": "Secret", "metadata": {"name": "mine"}, "data": {"secret": "YWI="}}
    assert reconciler.look(KEY, 0.0, TIME, SECRET) == LOOK_AGAIN_S


def test_the_secret_of_an_earlier_cluster_of_that_name_is_none() -> None:
    """The garbage collector takes it away at some time: until then it is waited for, and then one is made."""
    store = Store(cluster_object())
    _converge(store)
    store.objects["PeerCacheCluster", "chat"] = {**cluster_object(), "metadata": _anew()}
    reconciler = Reconciler(store, Agents().post)
    reconciler.look(KEY, 0.0, TIME, SECRET)
    store.objects["Pod", "chat-kvpeer-trial"]["status"] = {"phase": "Succeeded"}
    assert reconciler.look(KEY, 0.0, TIME, SECRET) == 30.0
    conditions = store.objects["PeerCacheCluster", "chat"]["status"]["conditions"]
    assert {each["type"]: each["reason"] for each in conditions}["SecretReady"] == "BeingMade"
    del store.objects["Secret", "chat-kvpeer-secret"]
    _converge(store)
    owners = store.objects["Secret", "chat-kvpeer-secret"]["metadata"]["ownerReferences"]
    assert [each["uid"] for each in owners] == ["c-2"]


def test_a_cluster_that_is_gone_leaves_its_policies_without_one() -> None:
    store = Store(cluster_object(), policy_object())
    _converge(store)
    del store.objects["PeerCacheCluster", "chat"]
    assert Reconciler(store, Agents().post).look(KEY, 0.0, TIME, SECRET) is None
    assert store.objects["P2PPolicy", "chat"]["status"]["conditions"][0]["reason"] == "NoCluster"


def test_a_policy_that_this_version_does_not_understand_keeps_nothing_from_working() -> None:
    newer = policy_object("newer")
    newer["spec"]["mode"] = "Sometimes"
    store = Store(cluster_object(), policy_object(), newer)
    _converge(store)
    assert store.objects["P2PPolicy", "chat"]["status"]["effectiveMode"] == "On"


def test_the_webhook_gives_a_pod_its_agent_through_kopf() -> None:
    store = Store(cluster_object(), policy_object())
    _converge(store)
    pod = pod_object()
    patch = kopf.Patch(body=kopf.Body(pod))
    main.inject_agent(body=kopf.Body(pod), namespace="models", patch=patch, memo=kopf.Memo(reads=store))
    after = apply_patch(pod, patch.as_json_patch())
    expected, skip = admit_pod(store, pod, "models")
    assert skip is None
    assert after == apply_patch(pod, list(expected.operations))
    assert [each["name"] for each in after["spec"]["initContainers"]] == ["kvpeer-payload", "kvpeer-agent"]


def test_the_webhook_notes_why_a_pod_is_left_alone() -> None:
    pod = pod_object()
    patch = kopf.Patch(body=kopf.Body(pod))
    main.inject_agent(body=kopf.Body(pod), namespace="models", patch=patch, memo=kopf.Memo(reads=Store()))
    after = apply_patch(pod, patch.as_json_patch())
    assert after["metadata"].pop("annotations")["kvpeer.io/skipped"] == "no-cluster"
    assert after == pod
