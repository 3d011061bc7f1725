"""What becomes of pods that are created: an agent, or the reason why there is none, and never a pod that is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from cluster.control_plane import kubectl
from engines.harness import eventually

from scenarios.installation import OPERATOR, RELEASE_NAMESPACE, scale_operator
from scenarios.kube import Object, annotations, apply, await_condition, condition, delete, get
from scenarios.pods import CLUSTER_LABEL, SKIPPED, fake_pod, peer_cache_cluster, policy, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

N_MADE_MIN = 10
"""Fewer would prove nothing about the time in between."""

READY_LASTING_S = 28.0
"""Long enough for an agent that is started again every 10 s to end twice."""

AGENT, PAYLOAD = "kvpeer-agent", "kvpeer-payload"


def made(pod: Object, namespace: str) -> Object:
    """What the API server would store: the webhook is called, and nothing is kept."""
    text = kubectl("create", "-n", namespace, "--dry-run=server", "-o", "json", "-f", "-", text=json.dumps(pod))
    stored: Object = json.loads(text)
    return stored


def init_names(pod: Object) -> list[str]:
    return [each["name"] for each in pod["spec"].get("initContainers") or ()]


def _changed(**changes: Any) -> Object:
    """The fake pod with other values of its container, spec or annotations."""
    pod = copy.deepcopy(fake_pod("engine"))
    pod["spec"].update(changes.get("spec", {}))
    pod["spec"]["containers"][0].update(changes.get("container", {}))
    pod["metadata"]["annotations"].update(changes.get("annotations", {}))
    pod["metadata"]["labels"].update(changes.get("labels", {}))
    for name in changes.get("without", ()):
        del pod["metadata"]["annotations"][name]
    return pod


SKIPS = {
    "no-cluster": _changed(labels={CLUSTER_LABEL: "other"}),
    "unknown-engine": _changed(container={"args": ["serve"]}, without=["kvpeer.io/engine"]),
    "command-override": _changed(container={"command": ["sh", "-c", "echo 'vllm serve tiny'"], "args": []}),
    "unknown-version": _changed(without=["kvpeer.io/engine-version"]),
    "unsupported-version": _changed(annotations={"kvpeer.io/engine-version": "0.9.1"}),
    "conflicting-kv-transfer-config": _changed(container={"args": ["vllm", "serve", "m", "--kv-transfer-config={}"]}),
    "unsupported-option": _changed(container={"args": ["vllm", "serve", "m", "--pipeline-parallel-size", "2"]}),
    "host-network-port-clash": _changed(spec={"hostNetwork": True}),
    "port-clash": _changed(container={"ports": [{"containerPort": 7946}]}),
    "name-clash": _changed(spec={"volumes": [{"name": "kvpeer-run", "emptyDir": {}}]}),
    "environment-override": _changed(container={"env": [{"name": "KVPEER_SOCKET", "value": "/elsewhere"}]}),
}


@pytest.mark.core
def test_a_pod_that_opted_in_gets_its_agent(chat: str) -> None:
    pod = made(fake_pod("engine"), chat)
    assert init_names(pod) == [PAYLOAD, AGENT]
    assert annotations(pod)["kvpeer.io/injected"] == "chat"
    assert "--kv-transfer-config" in pod["spec"]["containers"][0]["args"]


@pytest.mark.core
def test_a_pod_that_did_not_opt_in_is_not_changed(chat: str) -> None:
    given = fake_pod("engine", cluster="")
    pod = made(given, chat)
    assert init_names(pod) == []
    assert annotations(pod) == annotations(given)
    assert pod["spec"]["containers"][0]["args"] == given["spec"]["containers"][0]["args"]


@pytest.mark.core
@pytest.mark.parametrize("reason", SKIPS)
def test_a_pod_that_cannot_be_served_is_made_as_it_is_and_says_why(chat: str, reason: str) -> None:
    given = SKIPS[reason]
    pod = made(given, chat)
    assert annotations(pod)[SKIPPED] == reason
    assert len(annotations(pod)["kvpeer.io/skipped-because"]) > 20
    assert init_names(pod) == []
    assert pod["spec"]["containers"][0].get("args", []) == given["spec"]["containers"][0]["args"]


def test_a_pod_of_a_full_namespace_is_left_alone_and_still_made(chat: str) -> None:
    """With the agent it would be refused by the quota; without, it fits."""
    amounts = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "1", "memory": "64Mi"}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    apply({**quota, "spec": {"hard": {"requests.memory": "64Mi"}}}, namespace=chat)
    try:
        eventually(lambda: bool((get("quota", "small", chat) or {}).get("status")), "the quota is counted")
        given = _changed(container={"resources": amounts})
        # That there was none is known for a second.
        eventually(lambda: annotations(made(given, chat)).get(SKIPPED) == "quota", "the pod is left alone", 10)
    finally:
        delete("quota", "small", chat)


def test_a_restricted_namespace_takes_the_agent(chat: str) -> None:
    kubectl("label", "namespace", chat, "pod-security.kubernetes.io/enforce=restricted")
    try:
        strict = {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        pod = made(_changed(container={"securityContext": strict}), chat)
    finally:
        kubectl("label", "namespace", chat, "pod-security.kubernetes.io/enforce-")
    assert init_names(pod) == [PAYLOAD, AGENT]


def test_images_that_cannot_be_pulled_keep_no_pod_from_starting(chat: str) -> None:
    missing = {"images": {"agent": "localhost/none:1", "payload": "localhost/none:1"}}
    apply(peer_cache_cluster("broken", **missing), namespace=chat)
    kept = await_condition("pcc", "broken", chat, "ImagesReady", status="False", deadline_s=90)
    assert "localhost/none:1" in str(kept["status"]["conditions"])
    pod = made(_changed(labels={CLUSTER_LABEL: "broken"}), chat)
    assert annotations(pod)[SKIPPED] == "images-not-ready"
    # And once they can be, it is noticed.
    apply(peer_cache_cluster("broken"), namespace=chat)
    await_condition("pcc", "broken", chat, "ImagesReady", deadline_s=90)
    assert init_names(made(_changed(labels={CLUSTER_LABEL: "broken"}), chat)) == [PAYLOAD, AGENT]


def test_an_agent_that_cannot_start_takes_its_pod_out_of_no_service(chat: str) -> None:
    """It has no secret. The pod is ready all the time, and the agent comes when the secret does."""
    apply(peer_cache_cluster("locked", security={"secretName": "mine"}), namespace=chat)
    await_condition("pcc", "locked", chat, "ImagesReady", deadline_s=90)
    apply(fake_pod("served", node="n1", cluster="locked"), namespace=chat)
    pod = wait_ready("served", chat, deadline_s=60)

    def is_ready() -> bool:
        return condition(get("pod", "served", chat), "Ready")[0] == "True"

    eventually(is_ready, "the pod is ready", 30, READY_LASTING_S)
    assert pod.log("kvpeer-agent", n_lines=-1).count("cannot read /etc/kvpeer/secret/secret") >= 2
    assert condition(get("pcc", "locked", chat), "Ready")[1] == "SecretNotReady"
    kubectl("create", "secret", "generic", "mine", "-n", chat, f"--from-literal=secret={'ab' * 32}")
    eventually(pod.has_agent, "the agent runs", 150)  # the kubelet brings new Secrets within a minute or two
    delete("pod", "served", chat)


@pytest.mark.core
def test_a_policy_reaches_new_pods_and_agents_that_run_and_counts_those_that_do_not_answer(chat: str) -> None:
    apply(fake_pod("old", node="n1"), fake_pod("frozen", node="n2"), namespace=chat)
    old, frozen = (wait_ready(name, chat, deadline_s=90) for name in ("old", "frozen"))
    eventually(lambda: old.has_agent() and frozen.has_agent(), "the agents run", 60)
    eventually(lambda: _outdated(chat) == (0, ""), "both are told", seen=lambda: _outdated(chat))
    _signal_agent("frozen", chat, "STOP")
    try:
        apply(policy(mode="Off"), namespace=chat)
        eventually(lambda: _outdated(chat) == (1, "frozen"), "one is not", seen=lambda: _outdated(chat))
        assert "'KVPEER_CONNECTOR_MODE': 'off'" in old.log("kvpeer-agent")
        assert _mode(made(fake_pod("new"), chat)) == "off"
    finally:
        _signal_agent("frozen", chat, "CONT")
        apply(policy(), namespace=chat)
    eventually(lambda: _outdated(chat) == (0, ""), "both are told again", 90, seen=lambda: _outdated(chat))
    for name in ("old", "frozen"):
        delete("pod", name, chat)


@pytest.mark.core
def test_without_an_operator_pods_start_unchanged(chat: str) -> None:
    scale_operator(0)
    try:
        apply(fake_pod("alone", node="n1"), namespace=chat)
        kubectl("wait", "pod/alone", "-n", chat, "--for=condition=Ready", "--timeout=60s")
        alone = get("pod", "alone", chat)
        assert alone is not None
        assert init_names(alone) == []
        assert "kvpeer.io/injected" not in annotations(alone)
    finally:
        scale_operator(2)
    delete("pod", "alone", chat)
    eventually(lambda: init_names(made(fake_pod("engine"), chat)) == [PAYLOAD, AGENT], "pods get agents again", 60)


def test_no_pod_misses_its_agent_while_the_operator_is_replaced(chat: str) -> None:
    """A replica that is told to end still answers until the API server knows that it will."""
    kubectl("-n", RELEASE_NAMESPACE, "rollout", "restart", OPERATOR)
    n_made, n_missed = 0, 0
    while not _is_rolled_out():
        n_made += 1
        n_missed += init_names(made(fake_pod("engine"), chat)) != [PAYLOAD, AGENT]
    assert n_made >= N_MADE_MIN
    assert n_missed == 0, f"{n_missed} of {n_made}"


def _is_rolled_out() -> bool:
    """And what was replaced is gone."""
    words = ["get", "pods", "-l", "app.kubernetes.io/name=kvpeer-operator", "-o", "json"]
    pods = json.loads(kubectl("-n", RELEASE_NAMESPACE, *words))["items"]
    deployment = get("deployment", "kvpeer", RELEASE_NAMESPACE) or {}
    status = deployment["status"]
    is_seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return is_seen and status.get("updatedReplicas") == status.get("readyReplicas") == len(pods) == 2


def _mode(pod: Object | None) -> str:
    assert pod is not None
    environment = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0].get("env") or ()}
    return str(environment.get("KVPEER_CONNECTOR_MODE"))


def _signal_agent(name: str, namespace: str, signal: str) -> None:
    script = f"kill -{signal} $(grep -l '^kvpeer$' /proc/[0-9]*/comm | cut -d/ -f3)"
    kubectl("exec", name, "-n", namespace, "-c", AGENT, "--", "sh", "-c", script)


def _outdated(namespace: str) -> tuple[int, str]:
    """How many pods have an earlier policy, and which; -1 until the policy was looked at as it is."""
    found = get("p2p", "chat", namespace) or {}
    status = found.get("status") or {}
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return -1, ""
    return status["outdatedPods"], condition(found, "UpToDate")[2].rpartition(": ")[2]
