"""`cluster_status` and `policy_status`: what is true, with the fix for what should not be. Pure; equal observations
give an equal status, so that nothing is written when nothing changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvpeer_operator.injection import settings_digest
from kvpeer_operator.injection.names import SECRET_KEY, secret_name
from kvpeer_operator.models import (
    Condition,
    MemberCounts,
    P2PPolicy,
    P2PPolicyStatus,
    PeerCacheCluster,
    PeerCacheClusterStatus,
)
from kvpeer_operator.reconcile.objects import images_digest
from kvpeer_operator.reconcile.observed import (
    Object,
    Observed,
    agent_runs,
    is_member,
    is_over,
    is_skipped,
    settings_of,
)
from kvpeer_operator.reconcile.plan import trial_fits, trial_succeeded
from kvpeer_operator.reconcile.policies import selecting_policies

__all__ = ["cluster_status", "policy_status"]

NAMES_MAX = 5
"""Pods that a message names; the counts are in the status."""

_MESSAGE_CHARS_MAX = 1024

_Facts = tuple[str, str, str]
"""Status, reason and message of a condition."""


def cluster_status(observed: Observed, now: str) -> PeerCacheClusterStatus:
    """What is true of the cluster. now: the time of conditions that changed, as the API server writes times."""
    cluster = observed.cluster
    pods = [pod for pod in observed.pods if not is_over(pod)]
    members = [pod for pod in pods if is_member(pod, cluster.metadata.name)]
    waiting = [pod for pod in members if not agent_runs(pod)]
    outdated = [pod for pod in members if settings_of(pod) != settings_digest(cluster.spec)]
    untold = [pod for pod in members if pod["metadata"].get("uid") in observed.untold]
    images, secret = _images(observed), _secret(observed)
    facts = {
        "ImagesReady": images,
        "SecretReady": secret,
        "UpToDate": _up_to_date(outdated, untold),
        "Ready": _ready(images, secret, members, waiting),
    }
    has_tried = trial_succeeded(observed)
    return PeerCacheClusterStatus(
        observed_generation=cluster.metadata.generation,
        members=MemberCounts(
            expected=len(members),
            ready=len(members) - len(waiting),
            outdated=len(outdated),
            skipped=sum(map(is_skipped, pods)),
        ),
        tried_images=images_digest(cluster) if has_tried else "",
        conditions=_conditions(facts, cluster.status.conditions, cluster.metadata.generation, now),
    )


def policy_status(
    policy: P2PPolicy,
    cluster: PeerCacheCluster | None,
    policies: Sequence[P2PPolicy],
    pods: Iterable[Object],
    untold: Collection[str],
    now: str,
) -> P2PPolicyStatus:
    """What the policy does. cluster: the one that it names; None: there is none. policies: all of the namespace. pods:
    those with the cluster's label. untold: uids of those whose engines run with an earlier policy."""
    name = policy.spec.cluster_ref.name
    governed: list[Object] = []
    older: set[str] = set()
    for pod in pods:
        if is_over(pod):
            continue
        selecting = selecting_policies(policies, name, _labels(pod))
        if selecting and selecting[0].metadata.name == policy.metadata.name:
            governed.append(pod)
        elif any(each.metadata.name == policy.metadata.name for each in selecting):
            older.add(selecting[0].metadata.name)
    outdated = [pod for pod in governed if pod["metadata"].get("uid") in untold]
    facts = {"Ready": _governs(policy, cluster, governed, older), "UpToDate": _up_to_date((), outdated)}
    return P2PPolicyStatus(
        observed_generation=policy.metadata.generation,
        effective_mode=policy.spec.mode if facts["Ready"][0] == "True" else "Off",
        pods=len(governed),
        outdated_pods=len(outdated),
        conditions=_conditions(facts, policy.status.conditions, policy.metadata.generation, now),
    )


def _images(observed: Observed) -> _Facts:
    if trial_succeeded(observed):
        return "True", "Tried", "a pod of this namespace has run both images"
    if observed.refusal:
        return "False", observed.refusal.reason, f"the trial pod was refused: {observed.refusal.message}"
    if not trial_fits(observed) or observed.trial is None:
        return "Unknown", "NotTried", "a trial pod will run both images"
    problem = _container_problem(observed.trial)
    name = observed.trial["metadata"]["name"]
    if (observed.trial.get("status") or {}).get("phase") == "Failed":
        return "False", "TrialFailed", f"pod {name} failed ({problem or 'no reason given'}): see kubectl logs {name}"
    return (
        ("False", "CannotRun", f"pod {name}: {problem}") if problem else ("Unknown", "Trying", f"pod {name} runs them")
    )


def _container_problem(pod: Object) -> str:
    """Why the trial's first container that has a problem has it."""
    status = pod.get("status") or {}
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = each.get("state") or {}
        waiting, terminated = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{each['name']}: {waiting['reason']} {waiting.get('message', '')}".strip()
        if terminated.get("exitCode"):
            return f"{each['name']} ended with status {terminated['exitCode']}"
    return str(status.get("reason", ""))


def _secret(observed: Observed) -> _Facts:
    security, name = observed.cluster.spec.security, observed.cluster.metadata.name
    if security.mode == "Insecure":
        return "True", "NotNeeded", "mode Insecure: whoever reaches an agent can read and publish pages"
    if observed.secret is not None:
        if SECRET_KEY in (observed.secret.get("data") or {}):
            return "True", "Exists", ""
        fix = f"kubectl create secret generic {security.secret_name} --from-literal=secret=$(openssl rand -hex 32)"
        return "False", "NoKey", f"the Secret has no key `{SECRET_KEY}`: {fix}"
    if security.secret_name:
        return (
            "False",
            "Missing",
            f"there is no Secret {security.secret_name}: make it, or remove spec.security.secretName",
        )
    return "Unknown", "BeingMade", f"the Secret {secret_name(name)} is being made"


def _up_to_date(outdated: Sequence[Object], untold: Sequence[Object]) -> _Facts:
    if outdated:
        return "False", "PodsWithEarlierSettings", f"restart, when it suits you: {_names(outdated)}"
    if untold:
        return "False", "PodsWithEarlierPolicy", f"agents that cannot be told of the policy: {_names(untold)}"
    return "True", "AllCurrent", ""


def _ready(images: _Facts, secret: _Facts, members: Sequence[Object], waiting: Sequence[Object]) -> _Facts:
    for reason, facts in (("ImagesNotReady", images), ("SecretNotReady", secret)):
        if facts[0] != "True":
            return "False", reason, facts[2]
    if waiting:
        return "False", "AgentsNotReady", f"agents that do not run: {_names(waiting)}"
    if not members:
        return "True", "NoMembers", "no pod has joined: label pods kvpeer.io/cluster and recreate them"
    return "True", "AllAgentsRun", ""


def _governs(
    policy: P2PPolicy, cluster: PeerCacheCluster | None, governed: Sequence[Object], older: set[str]
) -> _Facts:
    if cluster is None:
        return "False", "NoCluster", f"there is no PeerCacheCluster {policy.spec.cluster_ref.name}: make it"
    if older:
        who = ", ".join(sorted(older)[:NAMES_MAX])
        fix = f"older policies govern pods that this one selects ({who}): make the selectors disjoint"
        return ("True", "PartlyOverlapped", fix) if governed else ("False", "Overlapped", fix)
    return "True", "Governs", "" if governed else "no pod that it selects runs"


def _conditions(
    facts: dict[str, _Facts], before: Iterable[Condition], generation: int, now: str
) -> tuple[Condition, ...]:
    earlier = {each.type: each for each in before}
    made = []
    for kind, (status, reason, message) in facts.items():
        old = earlier.get(kind)
        since = old.last_transition_time if old and old.status == status else now
        made.append(
            Condition.model_validate(
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": message[:_MESSAGE_CHARS_MAX],
                    "lastTransitionTime": since,
                    "observedGeneration": generation,
                }
            )
        )
    return tuple(made)


def _names(pods: Sequence[Object]) -> str:
    names = [str(pod["metadata"]["name"]) for pod in pods]
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(sorted(names)[:NAMES_MAX]) + more


def _labels(pod: Object) -> dict[str, str]:
    return dict(pod["metadata"].get("labels") or {})
