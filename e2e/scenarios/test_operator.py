"""The operator on a real API server: what it makes, and that it comes to the same end whatever happens on the way."""

from __future__ import annotations

import datetime
import json

import pytest
from cluster.control_plane import kubectl
from engines.harness import eventually
from kvpeer_operator.serving import LIFE, ca_bundle, decoded, is_due, issue, webhook_hosts

from scenarios.installation import OPERATOR, RELEASE_NAMESPACE
from scenarios.kube import apply, await_condition, condition, delete, get, listed
from scenarios.pods import fake_pod, peer_cache_cluster, policy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SERVICE, SECRET, TRIAL = "chat-kvpeer-agents", "chat-kvpeer-secret", "chat-kvpeer-trial"


def test_what_a_cluster_needs_is_made_and_belongs_to_it(chat: str) -> None:
    owner = (get("pcc", "chat", chat) or {})["metadata"]["uid"]
    for kind, name in (("service", SERVICE), ("secret", SECRET)):
        found = get(kind, name, chat)
        assert found is not None
        assert [each["uid"] for each in found["metadata"]["ownerReferences"]] == [owner]
    eventually(lambda: get("pod", TRIAL, chat) is None, "the trial pod is taken away", 60)


def test_a_cluster_without_pods_is_ready_and_says_what_to_do(chat: str) -> None:
    found = await_condition("pcc", "chat", chat, "Ready")
    assert condition(found, "Ready")[1:] == (
        "NoMembers",
        "no pod has joined: label pods kvpeer.io/cluster and recreate them",
    )


def test_what_another_took_over_is_taken_back(chat: str) -> None:
    """Another field manager changes the Service; the next look at the cluster mends it."""
    change = json.dumps({"spec": {"publishNotReadyAddresses": False}})
    kubectl("patch", "service", SERVICE, "-n", chat, "--type=merge", "-p", change, "--field-manager=another")
    kubectl("annotate", "pcc", "chat", "-n", chat, "touched=yes", "--overwrite")

    def is_mended() -> bool:
        return bool((get("service", SERVICE, chat) or {})["spec"].get("publishNotReadyAddresses"))

    eventually(is_mended, "the Service is as the operator wants it", 30)


def test_a_cluster_that_is_deleted_and_made_anew_gets_all_it_needs_again(chat: str) -> None:
    """Its Secret is still that of the first one, which the garbage collector is about to take away."""
    before = (get("secret", SECRET, chat) or {})["metadata"]["uid"]
    kubectl("delete", "pcc", "chat", "-n", chat)
    apply(peer_cache_cluster(), namespace=chat)
    new = (get("pcc", "chat", chat) or {})["metadata"]["uid"]

    def owners() -> set[str]:
        found = [get("service", SERVICE, chat), get("secret", SECRET, chat)]
        return {each["metadata"]["ownerReferences"][0]["uid"] if each else "" for each in found}

    eventually(lambda: owners() == {new}, "Service and Secret belong to the new one", 90, seen=owners)
    assert (get("secret", SECRET, chat) or {})["metadata"]["uid"] != before
    await_condition("pcc", "chat", chat, "Ready", deadline_s=90)


def test_a_policy_whose_cluster_is_gone_says_so(chat: str) -> None:
    apply(policy("lonely", cluster="none"), namespace=chat)
    found = await_condition("p2p", "lonely", chat, "Ready", status="False")
    assert condition(found, "Ready")[1] == "NoCluster"
    assert found["status"]["effectiveMode"] == "Off"
    delete("p2p", "lonely", chat)


def test_operators_that_are_killed_at_work_come_to_the_same_end(chat: str) -> None:
    apply(*(peer_cache_cluster(f"many-{index}") for index in range(5)), namespace=chat)
    words = ["delete", "pods", "--selector", "app.kubernetes.io/name=kvpeer-operator", "--grace-period=0", "--force"]
    kubectl("-n", RELEASE_NAMESPACE, *words)
    for index in range(5):
        await_condition("pcc", f"many-{index}", chat, "Ready", deadline_s=180)
        delete("pcc", f"many-{index}", chat)
    eventually(lambda: len(listed("secret", chat)) == 1, "what they owned went with them", 60)


def test_a_certificate_that_is_over_is_replaced_when_the_operator_starts(chat: str) -> None:
    """As after a season without an operator. Until then pods are made unchanged, and then they get their agents."""
    hosts = webhook_hosts("kvpeer-webhook", RELEASE_NAMESPACE)
    long_ago = datetime.datetime.now(datetime.timezone.utc) - LIFE - datetime.timedelta(days=30)
    over = issue(hosts, long_ago, None)
    kubectl(
        *("patch", "secret", "kvpeer-webhook-certificate", "-n", RELEASE_NAMESPACE, "--type=merge"),
        *("-p", json.dumps({"data": over.encoded()})),
    )
    kubectl("-n", RELEASE_NAMESPACE, "rollout", "restart", OPERATOR)
    kubectl("-n", RELEASE_NAMESPACE, "rollout", "status", OPERATOR, "--timeout=180s")
    kept = decoded((get("secret", "kvpeer-webhook-certificate", RELEASE_NAMESPACE) or {})["data"])
    assert not is_due(kept, hosts, datetime.datetime.now(datetime.timezone.utc))
    assert kept is not None
    trusted = (get("mutatingwebhookconfiguration", "kvpeer-injection") or {})["webhooks"][0]["clientConfig"]["caBundle"]
    assert trusted == ca_bundle(kept)
    pod = json.dumps(fake_pod("engine"))

    def gets_its_agent() -> bool:
        made = json.loads(kubectl("create", "-n", chat, "--dry-run=server", "-o", "json", "-f", "-", text=pod))
        return "initContainers" in made["spec"]

    eventually(gets_its_agent, "the API server trusts the new certificate", 30)


def test_the_certificate_survives_the_operator(chat: str) -> None:
    """Replicas that start anew take the one that is there: the webhook's trust does not change."""
    found = get("mutatingwebhookconfiguration", "kvpeer-injection")
    assert found is not None
    assert found["webhooks"][0]["clientConfig"]["caBundle"]
