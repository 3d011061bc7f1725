"""Agents get to know of policies that change while they run, whoever fails on the way, and are left in peace then."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from golden_pods import cluster, policy
from jsonpatch import apply_patch
from kvpeer.agent.config import AgentSettings
from kvpeer.agent.http import HttpEndpoint
from kvpeer.agent.told_policy import PolicyRefusedError, ToldPolicy, policy_key
from kvpeer.model import RemoteProtocolError
from kvpeer_operator.injection import Patch, inject
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster
from kvpeer_operator.reconcile import Observed, Word, words
from kvpeer_operator.reconcile.plan import LOOK_AGAIN_S
from kvpeer_operator.reconciler import Reconciler
from kvpeer_operator.telling import post_words
from prometheus_client import CollectorRegistry
from store import KEY, SECRET, TIME, Agents, Store, cluster_object, pod_object, policy_object

MODE = "KVPEER_CONNECTOR_MODE"


def running(name: str = "engine", *, env: list[dict[str, str]] | None = None, by: P2PPolicy | None = None) -> Any:
    """A pod with an agent that runs."""
    pod = pod_object()
    pod["metadata"].update({"name": name, "uid": f"uid of {name}"})
    pod["spec"]["containers"][0]["env"] = env or []
    patch = inject(pod, cluster(), by or policy())
    assert isinstance(patch, Patch)
    made = apply_patch(pod, list(patch.operations))
    agent = {"name": "kvpeer-agent", "ready": True}
    return {**made, "status": {"podIP": "10.0.0.7", "phase": "Running", "initContainerStatuses": [agent]}}


def tried_cluster() -> dict[str, Any]:
    """One whose images were tried, and which has its Secret."""
    store, of = Store(cluster_object()), Reconciler
    of(store, Agents().post).look(KEY, 0.0, TIME, SECRET)
    store.objects["Pod", "chat-kvpeer-trial"]["status"] = {"phase": "Succeeded"}
    for _ in range(2):
        of(store, Agents().post).look(KEY, 0.0, TIME, SECRET)
    return store.objects


def with_pods(*pods: Any, **spec: Any) -> Store:
    made = policy_object()
    made["spec"].update(spec)
    store = Store(*tried_cluster().values(), made, *pods)
    secret = store.objects["Secret", "chat-kvpeer-secret"]
    secret["data"] = {"secret": base64.b64encode(SECRET.encode()).decode()}
    return store


def told_modes(agents: Agents) -> list[str]:
    modes = [each["variables"][MODE] for each in agents.told]
    agents.told.clear()
    return modes


def test_a_change_is_told_once_and_with_a_higher_revision() -> None:
    store, agents = with_pods(running()), Agents()
    reconciler = Reconciler(store, agents.post)
    revisions = []
    for mode in ("On", "On", "Shadow", "Shadow", "Off", "On"):
        store.objects["P2PPolicy", "chat"]["spec"]["mode"] = mode
        reconciler.look(KEY, 0.0, TIME, SECRET)
        revisions += [each["revision"] for each in agents.told]
        assert len(told_modes(agents)) in (0, 1)
    assert len(revisions) == 4
    assert revisions == sorted(set(revisions))


def test_a_policy_that_is_deleted_turns_its_engines_off() -> None:
    store, agents = with_pods(running()), Agents()
    reconciler = Reconciler(store, agents.post)
    reconciler.look(KEY, 0.0, TIME, SECRET)
    del store.objects["P2PPolicy", "chat"]
    reconciler.look(KEY, 0.0, TIME, SECRET)
    assert told_modes(agents) == ["on", "off"]


def test_an_agent_that_does_not_answer_is_told_again_at_growing_distances_and_counted() -> None:
    store, agents = with_pods(running("a"), running("b")), Agents()
    agents.silent = {"uid of b"}
    reconciler, now, waits = Reconciler(store, agents.post), 0.0, []
    for _ in range(10):
        again_s = reconciler.look(KEY, now, TIME, SECRET)
        assert again_s is not None
        waits.append(again_s)
        now += again_s
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    assert len(agents.told) == 1
    assert store.objects["P2PPolicy", "chat"]["status"]["outdatedPods"] == 1
    agents.silent = set()
    assert reconciler.look(KEY, now, TIME, SECRET) == LOOK_AGAIN_S
    assert store.objects["P2PPolicy", "chat"]["status"]["outdatedPods"] == 0


def test_a_clock_that_is_put_back_does_not_put_off_what_is_to_be_told() -> None:
    agents = Agents()
    agents.silent = {"uid of engine"}
    reconciler = Reconciler(with_pods(running()), agents.post)
    reconciler.look(KEY, 400 * 86400.0, TIME, SECRET)
    agents.silent = set()
    assert reconciler.look(KEY, 0.0, TIME, SECRET) == LOOK_AGAIN_S
    assert len(agents.told) == 1


def test_a_word_that_failed_and_is_not_to_be_said_any_more_is_no_reason_to_look_again() -> None:
    store, agents = with_pods(running()), Agents()
    reconciler = Reconciler(store, agents.post)
    reconciler.look(KEY, 0.0, TIME, SECRET)
    agents.silent = {"uid of engine"}
    store.objects["P2PPolicy", "chat"]["spec"]["mode"] = "Off"
    assert reconciler.look(KEY, 1.0, TIME, SECRET) == 2.0
    store.objects["P2PPolicy", "chat"]["spec"]["mode"] = "On"
    assert reconciler.look(KEY, 5.0, TIME, SECRET) == LOOK_AGAIN_S


def test_events_do_not_make_an_agent_that_does_not_answer_be_asked_more_often() -> None:
    asked: list[Word] = []

    def post(given: Any) -> list[bool]:
        asked.extend(given)
        return [False] * len(given)

    reconciler = Reconciler(with_pods(running()), post)
    for _ in range(20):
        reconciler.look(KEY, 1.0, TIME, SECRET)
    assert len(asked) == 1


def test_what_a_pod_sets_itself_is_not_changed_while_it_runs() -> None:
    store, agents = with_pods(running(env=[{"name": MODE, "value": "on"}]), mode="Off"), Agents()
    Reconciler(store, agents.post).look(KEY, 0.0, TIME, SECRET)
    assert set(agents.told[0]["variables"]) == {
        "KVPEER_CONNECTOR_LOAD_TIMEOUT_S",
        "KVPEER_CONNECTOR_MIN_CACHED_TOKEN_DELTA",
        "KVPEER_CONNECTOR_PUBLISH",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"deletionTimestamp": TIME}},
        {"status": {"initContainerStatuses": [{"name": "kvpeer-agent", "ready": False}]}},
        {"status": {"podIP": ""}},
        {"metadata": {"annotations": {}}},
    ],
    ids=["ends", "starts", "no address", "no agent"],
)
def test_only_agents_that_run_are_told(change: dict[str, Any]) -> None:
    pod = running()
    for part, values in change.items():
        pod[part] = {**pod[part], **values}
    store, agents = with_pods(pod), Agents()
    Reconciler(store, agents.post).look(KEY, 0.0, TIME, SECRET)
    assert agents.told == []


@pytest.mark.parametrize("mode", ["SharedSecret", "Insecure"])
def test_an_agent_believes_what_it_is_told_and_no_other_agent_does(tmp_path: Path, mode: str) -> None:
    of = cluster().model_dump(by_alias=True)
    of["spec"]["security"]["mode"] = mode
    secret = {"data": {"secret": base64.b64encode(f"{SECRET}\n".encode()).decode()}} if mode == "SharedSecret" else None
    observed = Observed(PeerCacheCluster.model_validate(of), (policy(),), revision=41, pods=(running(),), secret=secret)
    (word,) = words(observed)
    key = policy_key(bytes.fromhex(SECRET) if secret else b"", "chat")
    told: list[Any] = []
    for name, folder in (("engine", tmp_path / "a"), ("other", tmp_path / "b")):
        folder.mkdir()
        agent = ToldPolicy(AgentSettings(name=name, cluster="chat"), key, folder, told.append)
        if name == "engine":
            assert agent.accept(word.body) == 41
        else:
            with pytest.raises(PolicyRefusedError):
                agent.accept(word.body)
    assert [each.variables[MODE] for each in told] == ["on"]


def test_without_the_cluster_s_secret_nobody_is_told() -> None:
    observed = Observed(cluster(), (policy(),), pods=(running(),))
    assert words(observed) == []
    spoilt = Observed(cluster(), (policy(),), pods=(running(),), secret={"data": {"secret": "%"}})
    assert words(spoilt) == []


def test_agents_that_refuse_or_are_not_there_did_not_take_their_word() -> None:
    """By HTTP, to a real endpoint."""
    got: list[bytes] = []

    def accept(body: bytes) -> int:
        got.append(body)
        if body == b"bad":
            raise RemoteProtocolError("no")
        return 1

    endpoint = HttpEndpoint("127.0.0.1", 0, CollectorRegistry(), lambda: "", accept)
    try:
        posted = [Word("p", "127.0.0.1", endpoint.port, "", body) for body in (b"good", b"bad")]
        assert post_words([*posted, Word("p", "127.0.0.1", 1, "", b"nobody")]) == [True, False, False]
        assert sorted(got) == [b"bad", b"good"]
    finally:
        endpoint.close()
    assert post_words([]) == []
