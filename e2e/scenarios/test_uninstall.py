"""Nothing of a user's pods changes when the operator is upgraded or goes, and what they made is kept."""

from __future__ import annotations

import pytest
from cluster.control_plane import kubectl
from engines.harness import eventually

from scenarios.installation import RELEASE_NAMESPACE, install, uninstall
from scenarios.kube import Object, apply, await_condition, get
from scenarios.pods import fake_pod, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(600)]


def test_an_upgrade_and_an_uninstallation_leave_pods_and_clusters_as_they_are(chat: str) -> None:
    apply(fake_pod("stays", node="n1"), namespace=chat)
    agent = wait_ready("stays", chat, deadline_s=120)
    eventually(agent.has_agent, "its agent answers", 60)
    before = _looks(get("pod", "stays", chat))
    install("--set", "replicas=1")
    assert _looks(get("pod", "stays", chat)) == before
    uninstall()
    try:
        assert _looks(get("pod", "stays", chat)) == before
        assert agent.has_agent()
        assert get("pcc", "chat", chat) is not None
        assert get("mutatingwebhookconfiguration", "kvpeer-injection") is None
        eventually(lambda: not _left(), "nothing of the release is left", 60, seen=_left)
        assert "kvpeer" not in kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
        apply(fake_pod("later", node="n1"), namespace=chat)
        kubectl("wait", "pod/later", "-n", chat, "--for=condition=Ready", "--timeout=60s")
        assert "initContainers" not in (get("pod", "later", chat) or {})["spec"]
    finally:
        install()
    await_condition("pcc", "chat", chat, "Ready")
    eventually(lambda: _looks(get("pod", "stays", chat)) == before, "the pod is as before", 10)


def _left() -> list[str]:
    kinds = "pods,services,secrets,deployments,serviceaccounts,roles,rolebindings"
    names = kubectl("get", kinds, "-n", RELEASE_NAMESPACE, "-o", "name").split()
    return [name for name in names if "kvpeer" in name]


def _looks(pod: Object | None) -> tuple[object, object, object, int]:
    """What would be noticed if anything touched the pod."""
    assert pod is not None
    status = pod["status"]
    restarts = sum(each["restartCount"] for each in [*status["initContainerStatuses"], *status["containerStatuses"]])
    return pod["metadata"]["uid"], pod["spec"], pod["metadata"].get("annotations"), restarts
