"""What a cluster needs in its namespace, made step by step; and what its status says on the way."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from admission import admit
from golden_pods import apply, cluster, policy
from kvpeer_operator.injection import Patch, Skip, inject, skip_patch
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster
from kvpeer_operator.reconcile import (
    Apply,
    Change,
    Create,
    Delete,
    Observed,
    cluster_status,
    governing_policy,
    plan,
    policy_status,
)
from kvpeer_operator.reconcile.observed import Refusal
from kvpeer_operator.schema import cluster_crd, policy_crd

NOW, TIME = 1_767_225_600.0, "2026-01-01T00:00:00Z"
SECRET = "ab" * 32


class Namespace:
    """Performs changes as the API server does, and is looked at again: no clock, no network."""

    def __init__(self, of: PeerCacheCluster, *policies: P2PPolicy) -> None:
        self.observed = Observed(of, policies)
        self.now = NOW

    def step(self) -> list[Change]:
        changes = plan(self.observed, self.now, SECRET)
        for change in changes:
            self._perform(change)
        return changes

    def note(self) -> None:
        """Writes the status."""
        status = cluster_status(self.observed, TIME)
        self.observed = replace(self.observed, cluster=self.observed.cluster.model_copy(update={"status": status}))

    def trial(self, **status: Any) -> None:
        """The kubelet says something of the trial pod."""
        assert self.observed.trial is not None
        self.observed = replace(self.observed, trial={**self.observed.trial, "status": status})

    def condition(self, kind: str) -> tuple[str, str, str]:
        (found,) = [each for each in cluster_status(self.observed, TIME).conditions if each.type == kind]
        return found.status, found.reason, found.message

    def _perform(self, change: Change) -> None:
        if isinstance(change, Delete):
            assert self.observed.trial is not None
            assert (change.name, change.uid) == ("chat-kvpeer-trial", "u-1")
            self.observed = replace(self.observed, trial=None)
            return
        made = copy.deepcopy(dict(change.object))
        made["metadata"] = {**made["metadata"], "uid": "u-1", "creationTimestamp": TIME}
        if made["kind"] == "Secret":
            made["data"] = made.pop("stringData")  # the API server encodes it, too
        field = {"Service": "service", "Secret": "secret", "Pod": "trial"}[made["kind"]]
        self.observed = replace(self.observed, **{field: made})


def fresh(**spec: Any) -> PeerCacheCluster:
    return cluster(status={}, **spec)


def member(name: str, of: PeerCacheCluster, by: P2PPolicy | None = None, ready: bool = True, **labels: str) -> Any:
    """A pod as it runs after the webhook saw it."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"kvpeer.io/cluster": "chat", **labels}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["m"]}]},
    }
    result = inject(pod, of, by)
    after = apply(pod, skip_patch(pod, result) if isinstance(result, Skip) else result)
    statuses = [{"name": "kvpeer-agent", "ready": ready}] if isinstance(result, Patch) else []
    return {**after, "status": {"phase": "Running", "initContainerStatuses": statuses}}


def test_a_new_cluster_gets_its_service_its_secret_and_a_trial_once() -> None:
    namespace = Namespace(fresh())
    first = namespace.step()
    assert [type(each) for each in first] == [Apply, Create, Create]
    kinds = [each.object["kind"] for each in first if not isinstance(each, Delete)]
    assert kinds == ["Service", "Secret", "Pod"]
    assert namespace.step() == []


def test_everything_it_makes_goes_with_the_cluster() -> None:
    for change in plan(Observed(fresh()), NOW, SECRET):
        assert not isinstance(change, Delete)
        (owner,) = change.object["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("PeerCacheCluster", "chat", True)
        assert change.object["metadata"]["namespace"] == "models"


def test_agents_find_each_other_by_a_headless_service_of_pods_with_an_agent() -> None:
    (service, *_) = plan(Observed(fresh()), NOW, SECRET)
    assert isinstance(service, Apply)
    seed = f"{service.object['metadata']['name']}.models.svc:{service.object['spec']['ports'][0]['port']}"
    pod = member("a", cluster())
    agent = pod["spec"]["initContainers"][-1]
    assert {"name": "KVPEER_AGENT_SEEDS", "value": seed} in agent["env"]
    assert service.object["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service.object["spec"]["clusterIP"] == "None"
    assert service.object["spec"]["publishNotReadyAddresses"] is True


def test_a_service_that_was_changed_is_put_right_and_what_others_add_stays() -> None:
    namespace = Namespace(fresh())
    namespace.step()
    service = copy.deepcopy(namespace.observed.service)
    service["spec"]["ipFamilies"] = ["IPv4"]
    namespace.observed = replace(namespace.observed, service=service)
    assert namespace.step() == []
    service["spec"]["selector"] = {"app": "other"}
    assert [type(each) for each in namespace.step()] == [Apply]


def test_a_secret_that_is_there_is_never_changed() -> None:
    namespace = Namespace(fresh())
    namespace.step()
    assert namespace.observed.secret is not None
    assert namespace.observed.secret["data"] == {"secret": SECRET}
    assert not [each for each in plan(namespace.observed, NOW, "cd" * 32) if isinstance(each, Create)]


@pytest.mark.parametrize("security", [{"mode": "Insecure"}, {"secretName": "mine"}])
def test_without_need_no_secret_is_made(security: dict[str, str]) -> None:
    kinds = [each.object["kind"] for each in plan(Observed(fresh(security=security)), NOW, SECRET)]  # type: ignore[union-attr]
    assert kinds == ["Service", "Pod"]


def test_a_cluster_that_is_being_deleted_gets_nothing() -> None:
    gone = fresh()
    gone = gone.model_copy(update={"metadata": gone.metadata.model_copy(update={"deletion_timestamp": TIME})})
    assert plan(Observed(gone), NOW, SECRET) == []


# ---- the trial


def test_pods_get_agents_only_after_the_images_ran() -> None:
    namespace = Namespace(fresh())
    pod = {"metadata": {"labels": {"kvpeer.io/cluster": "chat"}}, "spec": {"containers": []}}
    for status in ({}, {"phase": "Pending"}, {"phase": "Running"}):
        namespace.step()
        namespace.trial(**status)
        namespace.note()
        skip = inject(pod, namespace.observed.cluster, None)
        assert isinstance(skip, Skip)
        assert skip.reason.value == "images-not-ready"
    namespace.trial(phase="Succeeded")
    namespace.note()
    assert namespace.condition("ImagesReady")[0] == "True"
    assert isinstance(result := inject(pod, namespace.observed.cluster, None), Skip)
    assert result.reason.value == "unknown-engine"  # the images are no reason any more


def test_a_trial_that_succeeded_is_noted_and_cleaned_up_and_not_repeated() -> None:
    namespace = Namespace(fresh())
    namespace.step()
    namespace.trial(phase="Succeeded")
    assert namespace.step() == []  # not before it is noted
    namespace.note()
    assert [type(each) for each in namespace.step()] == [Delete]
    assert namespace.step() == []
    assert namespace.condition("ImagesReady")[0] == "True"


def test_other_images_are_tried_anew() -> None:
    namespace = Namespace(fresh())
    namespace.step()
    namespace.trial(phase="Succeeded")
    namespace.note()
    images = {"agent": "kvpeer/agent:0.2.0", "payload": "kvpeer/agent:0.2.0"}
    changed = fresh(images=images).model_copy(update={"status": namespace.observed.cluster.status})
    namespace.observed = replace(namespace.observed, cluster=changed)
    assert namespace.condition("ImagesReady") == ("Unknown", "NotTried", "a trial pod will run both images")
    assert [type(each) for each in namespace.step()] == [Delete]
    (create,) = namespace.step()
    assert isinstance(create, Create)
    assert create.object["spec"]["containers"][0]["image"] == "kvpeer/agent:0.2.0"


def test_a_trial_that_failed_is_repeated_after_a_while_and_not_before() -> None:
    namespace = Namespace(fresh())
    namespace.step()
    ended = {"terminated": {"exitCode": 127, "finishedAt": "2026-01-01T00:01:00Z"}}
    namespace.trial(phase="Failed", containerStatuses=[{"name": "trial", "state": ended}])
    status, reason, message = namespace.condition("ImagesReady")
    assert (status, reason) == ("False", "TrialFailed")
    assert "trial ended with status 127" in message
    namespace.now = NOW + 119
    assert namespace.step() == []
    namespace.now = NOW + 120
    assert [type(each) for each in namespace.step()] == [Delete]
    assert [type(each) for each in namespace.step()] == [Create]


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    namespace = Namespace(fresh())
    namespace.step()
    waiting = {"waiting": {"reason": "ErrImagePull", "message": 'no match for "kvpeer/agent:0.1.0"'}}
    namespace.trial(phase="Pending", initContainerStatuses=[{"name": "kvpeer-payload", "state": waiting}])
    status, reason, message = namespace.condition("ImagesReady")
    assert (status, reason) == ("False", "CannotRun")
    assert "kvpeer-payload: ErrImagePull" in message
    assert namespace.condition("Ready")[:2] == ("False", "ImagesNotReady")


@pytest.mark.parametrize(
    ("message", "reason", "skip"),
    [
        ('pods "t" is forbidden: violates PodSecurity "restricted:latest": ...', "PodSecurity", "pod-security"),
        ('pods "t" is forbidden: exceeded quota: team, requested: pods=1', "Quota", "quota"),
        ('pods "t" is forbidden: failed quota: team: must specify limits.cpu', "Quota", "quota"),
        ('admission webhook "policy.example" denied the request', "Refused", "images-not-ready"),
    ],
)
def test_a_trial_that_is_refused_says_why_to_cluster_and_pods(message: str, reason: str, skip: str) -> None:
    observed = Observed(fresh(), refusal=Refusal.of(message, NOW))
    assert not [each for each in plan(observed, NOW + 59, SECRET) if getattr(each, "object", {}).get("kind") == "Pod"]
    assert [each for each in plan(observed, NOW + 60, SECRET) if getattr(each, "object", {}).get("kind") == "Pod"]
    namespace = Namespace(fresh())
    namespace.observed = observed
    assert namespace.condition("ImagesReady") == ("False", reason, f"the trial pod was refused: {message}")
    namespace.note()
    result = inject({"metadata": {}, "spec": {"containers": []}}, namespace.observed.cluster, None)
    assert isinstance(result, Skip)
    assert result.reason.value == skip


# ---- status


def _running(*pods: Any, of: PeerCacheCluster | None = None, policies: tuple[P2PPolicy, ...] = ()) -> Namespace:
    namespace = Namespace(of or fresh(), *policies)
    namespace.step()
    namespace.trial(phase="Succeeded")
    namespace.note()
    namespace.observed = replace(namespace.observed, pods=pods)
    return namespace


def test_members_are_counted_and_those_that_do_not_run_are_named() -> None:
    by = policy()
    over = {**member("d", cluster(), by), "status": {"phase": "Succeeded"}}
    other = member("e", cluster(), by)
    other["spec"]["containers"][0]["command"] = ["/start.sh"]
    missed = {"metadata": {"name": "f", "labels": {"kvpeer.io/cluster": "chat"}}, "spec": {}, "status": {}}
    pods = (member("a", cluster(), by), member("b", cluster(), by, ready=False), over, missed)
    namespace = _running(*pods, policies=(by,))
    counts = cluster_status(namespace.observed, TIME).members
    assert (counts.expected, counts.ready, counts.skipped, counts.outdated) == (2, 1, 1, 0)
    assert namespace.condition("Ready") == ("False", "AgentsNotReady", "agents that do not run: b")


def test_pods_with_earlier_settings_are_named_and_never_restarted() -> None:
    by = policy()
    pods = [member(f"pod-{i}", cluster(), by) for i in range(7)]
    namespace = _running(*pods, of=fresh(pool={"size": "128Gi"}), policies=(by,))
    assert cluster_status(namespace.observed, TIME).members.outdated == 7
    status, reason, message = namespace.condition("UpToDate")
    assert (status, reason) == ("False", "PodsWithEarlierSettings")
    assert message.endswith("pod-0, pod-1, pod-2, pod-3, pod-4 and 2 more")
    assert not [each for each in namespace.step() if isinstance(each, Apply | Create)]


def test_a_changed_selector_makes_no_pod_outdated() -> None:
    by = policy()
    namespace = _running(
        member("a", cluster(), by, app="chat"),
        of=fresh(engineSelector={"matchLabels": {"app": "chat"}}),
        policies=(policy(selector={"matchLabels": {"app": "chat"}}),),
    )
    assert namespace.condition("UpToDate")[0] == "True"


def test_a_secret_of_the_user_is_asked_for() -> None:
    namespace = _running(of=fresh(security={"secretName": "mine"}))
    assert namespace.condition("SecretReady")[:2] == ("False", "Missing")
    namespace.observed = replace(namespace.observed, secret={"data": {"password": "eA=="}})
    assert namespace.condition("SecretReady")[:2] == ("False", "NoKey")
    assert "openssl rand -hex 32" in namespace.condition("Ready")[2]


def test_the_time_of_a_condition_is_that_of_its_change_and_an_equal_look_gives_an_equal_status() -> None:
    namespace = _running()
    later = cluster_status(namespace.observed, "2026-02-02T00:00:00Z")
    ready = {each.type: each for each in later.conditions}
    assert ready["ImagesReady"].last_transition_time == TIME
    noted = namespace.observed.cluster.model_copy(update={"status": later})
    assert cluster_status(replace(namespace.observed, cluster=noted), "2026-03-03T00:00:00Z") == later


def test_the_api_server_takes_every_status() -> None:
    namespace = _running(member("a", cluster(), policy(), ready=False))
    admit(
        cluster_crd(), _object("PeerCacheCluster", namespace.observed.cluster, cluster_status(namespace.observed, TIME))
    )
    by = policy()
    status = policy_status(by, None, [by], [], (), TIME)
    admit(policy_crd(), _object("P2PPolicy", by, status))


# ---- policies


def _aged(name: str, created: str, **spec: Any) -> P2PPolicy:
    made = policy(**spec)
    return made.model_copy(
        update={"metadata": made.metadata.model_copy(update={"name": name, "creation_timestamp": created})}
    )


OLD = _aged("old", "2025-01-01T00:00:00Z", selector={"matchLabels": {"app": "a"}})
NEW = _aged("new", "2025-06-01T00:00:00Z", mode="Off")


def test_the_oldest_policy_governs() -> None:
    assert governing_policy([NEW, OLD], "chat", {"app": "a"}) is OLD
    assert governing_policy([NEW, OLD], "chat", {"app": "b"}) is NEW
    assert governing_policy([NEW, OLD], "other", {"app": "a"}) is None
    twin = _aged("a-twin", OLD.metadata.creation_timestamp)
    assert governing_policy([OLD, twin], "chat", {"app": "a"}) is twin  # equally old: by name


def test_a_policy_says_what_it_governs_and_who_came_first() -> None:
    pods = [member("a", cluster(), OLD, app="a"), member("b", cluster(), NEW, app="b")]
    both = [OLD, NEW]
    old, new = (policy_status(each, cluster(), both, pods, (), TIME) for each in both)
    assert (old.pods, old.effective_mode, old.conditions[0].reason) == (1, "On", "Governs")
    assert (new.pods, new.conditions[0].reason) == (1, "PartlyOverlapped")
    alone = policy_status(NEW, cluster(), both, pods[:1], (), TIME)
    assert (alone.pods, alone.conditions[0].status, alone.conditions[0].reason) == (0, "False", "Overlapped")
    assert "old" in alone.conditions[0].message


def test_a_policy_without_its_cluster_is_off() -> None:
    status = policy_status(OLD, None, [OLD], [], (), TIME)
    assert (status.effective_mode, status.conditions[0].reason) == ("Off", "NoCluster")


def test_pods_whose_agents_could_not_be_told_are_counted_and_named() -> None:
    pods = [member("a", cluster(), OLD, app="a"), member("b", cluster(), OLD, app="a")]
    for pod in pods:
        pod["metadata"]["uid"] = f"uid of {pod['metadata']['name']}"
    status = policy_status(OLD, cluster(), [OLD], pods, {"uid of b"}, TIME)
    assert (status.pods, status.outdated_pods) == (2, 1)
    assert status.conditions[1].message == "agents that cannot be told of the policy: b"
    namespace = _running(*pods, policies=(OLD,))
    assert namespace.condition("UpToDate")[0] == "True"
    namespace.observed = replace(namespace.observed, untold=frozenset({"uid of b"}))
    assert namespace.condition("UpToDate")[:2] == ("False", "PodsWithEarlierPolicy")


def _object(kind: str, of: PeerCacheCluster | P2PPolicy, status: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "metadata": {"name": "chat"},
        "spec": of.spec.model_dump(by_alias=True, mode="json"),
        "status": status.model_dump(by_alias=True, mode="json"),
    }
