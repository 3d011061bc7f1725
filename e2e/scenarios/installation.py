"""The chart, installed by helm as its users do, with the images that were built here."""

from __future__ import annotations

from cluster import lifecycle
from cluster.binaries import binary
from cluster.control_plane import kubectl
from cluster.folders import REPOSITORY
from cluster.images import PROJECT_IMAGES
from cluster.keys import kubeconfig
from cluster.processes import run

__all__ = ["ACCOUNT", "OPERATOR", "RELEASE_NAMESPACE", "helm", "install", "scale_operator", "uninstall"]

RELEASE, RELEASE_NAMESPACE = "kvpeer", "kvpeer-system"
OPERATOR = "deployment/kvpeer"
ACCOUNT = f"system:serviceaccount:{RELEASE_NAMESPACE}:kvpeer"
CHART = REPOSITORY / "helm" / "kvpeer"
_DEADLINE = "180s"


def helm(*words: str) -> str:
    """What helm printed. Raises RuntimeError with what it said when it failed."""
    return run(binary("helm"), "--kubeconfig", kubeconfig(), "--namespace", RELEASE_NAMESPACE, *words)


def install(*more: str) -> str:
    """Puts the images on the nodes, installs or upgrades the chart and waits until the operator runs; returns the
    chart's notes."""
    lifecycle.load_images(list(PROJECT_IMAGES.values()))
    repository, _, tag = PROJECT_IMAGES["operator"].rpartition(":")
    values = ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}", *more]
    waiting = ["--create-namespace", "--wait", "--timeout", _DEADLINE]
    notes = helm("upgrade", "--install", RELEASE, str(CHART), *waiting, *values)
    # An image that was built anew has the same name.
    kubectl("-n", RELEASE_NAMESPACE, "rollout", "restart", OPERATOR)
    kubectl("-n", RELEASE_NAMESPACE, "rollout", "status", OPERATOR, f"--timeout={_DEADLINE}")
    return notes


def uninstall() -> None:
    """Takes the release away; the custom resource definitions stay."""
    helm("uninstall", RELEASE, "--wait", "--timeout", _DEADLINE)


def scale_operator(replicas: int) -> None:
    """Returns when there are so many, and no more."""
    kubectl("-n", RELEASE_NAMESPACE, "scale", OPERATOR, f"--replicas={replicas}")
    if replicas:
        kubectl("-n", RELEASE_NAMESPACE, "rollout", "status", OPERATOR, f"--timeout={_DEADLINE}")
    else:
        selector = "app.kubernetes.io/name=kvpeer-operator"
        words = ["wait", "pod", "--selector", selector, "--for=delete", f"--timeout={_DEADLINE}"]
        kubectl("-n", RELEASE_NAMESPACE, *words)
