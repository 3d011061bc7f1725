"""The operator with a thousand pods: how long it takes, what it asks of the API server, and what it keeps in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster.control_plane import AUDIT_LOG, kubectl
from cluster.folders import state_folder
from engines.harness import eventually, say

from scenarios.installation import ACCOUNT, RELEASE_NAMESPACE
from scenarios.kube import Object, annotations, apply, listed
from scenarios.pods import fake_pod, peer_cache_cluster, policy

pytestmark = [pytest.mark.cluster, pytest.mark.scale, pytest.mark.timeout(1500)]

N_NAMESPACES, CLUSTERS_EACH, PODS_EACH = 5, 10, 20
N_CLUSTERS = N_NAMESPACES * CLUSTERS_EACH
N_PODS = N_CLUSTERS * PODS_EACH
BURST = 200

WEBHOOK_P99_S = 0.1
IDLE_REQUESTS_PER_S = 1.0
IDLE_S = 60.0
MEMORY_MIB = 150


@pytest.fixture(scope="module")
def namespaces(installed: str) -> Iterator[list[str]]:
    """Namespaces with clusters and policies, whose images were tried."""
    names = [f"scale-{index}" for index in range(N_NAMESPACES)]
    for name in names:
        kubectl("create", "namespace", name)
    began = time.monotonic()
    for name in names:
        clusters = [f"c{index}" for index in range(CLUSTERS_EACH)]
        apply(*map(peer_cache_cluster, clusters), *(policy(each, each) for each in clusters), namespace=name)
    eventually(lambda: _ready(names) == N_CLUSTERS, "all clusters are ready", 900, seen=lambda: _ready(names))
    say(f"{N_CLUSTERS} clusters and policies from nothing to ready, images tried: {time.monotonic() - began:.0f} s")
    yield names
    for name in names:
        kubectl("delete", "namespace", name, "--wait=false")


def test_a_thousand_pods_are_injected_counted_and_left_in_peace(namespaces: list[str]) -> None:
    before = _webhook_calls()
    began = time.monotonic()
    batches = [[_pod(index, cluster) for index in range(PODS_EACH)] for cluster in range(CLUSTERS_EACH)]
    with ThreadPoolExecutor(max_workers=4) as at_once:
        for name in namespaces:
            list(at_once.map(lambda pods, name=name: apply(*pods, namespace=name), batches))
    say(f"{N_PODS} pods made: {time.monotonic() - began:.0f} s")
    eventually(lambda: _members(namespaces) == N_PODS, "all pods are counted", 120, seen=lambda: _members(namespaces))
    say(f"and counted: {time.monotonic() - began:.0f} s")
    calls = _webhook_calls()
    assert calls["+Inf"] - before.get("+Inf", 0) >= N_PODS
    memory_mib = _memory_mib()
    n_requests = _idle_requests()
    say(f"memory of the replicas: {memory_mib} MiB; requests in {IDLE_S:.0f} idle s: {n_requests}")
    say(f"webhook p99 within {_p99_s(before, calls)} s")
    assert max(memory_mib) < MEMORY_MIB
    assert n_requests / IDLE_S < IDLE_REQUESTS_PER_S


def test_a_burst_of_pods_waits_little_for_the_webhook(namespaces: list[str]) -> None:
    """As they come when a Deployment grows: made by its controller, many at a time."""
    before, name = _webhook_calls(), namespaces[0]
    began = time.monotonic()
    apply(_deployment(BURST), namespace=name)
    eventually(lambda: len(listed("pod", name, "app=burst")) == BURST, "all pods are made", 300)
    p99_s = _p99_s(before, _webhook_calls())
    say(f"{BURST} pods of a Deployment: {time.monotonic() - began:.0f} s, webhook p99 within {p99_s} s")
    assert all("kvpeer.io/injected" in annotations(pod) for pod in listed("pod", name, "app=burst"))
    assert p99_s <= WEBHOOK_P99_S


def _pod(index: int, cluster: int) -> Object:
    """Never started: no node is like that."""
    pod = fake_pod(f"p{cluster}-{index}", cluster=f"c{cluster}")
    pod["spec"]["nodeSelector"] = {"kvpeer.io/nowhere": "yes"}
    return pod


def _deployment(replicas: int) -> Object:
    pod = _pod(0, 0)
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], "app": "burst"}}
    template = {"metadata": metadata, "spec": pod["spec"]}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": "burst"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "burst"}, "spec": spec}


def _ready(namespaces: list[str]) -> int:
    path = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
    return sum(kubectl("get", "pcc", "-n", name, "-o", f"jsonpath={path}").split().count("True") for name in namespaces)


def _members(namespaces: list[str]) -> int:
    path = '{range .items[*]}{.status.members.expected}{"\\n"}{end}'
    return sum(
        sum(map(int, kubectl("get", "pcc", "-n", name, "-o", f"jsonpath={path}").split())) for name in namespaces
    )


def _webhook_calls() -> dict[str, int]:
    """How many calls of the webhook took at most so many seconds, as the API server counts them."""
    counts: dict[str, int] = {}
    for line in kubectl("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_admission_webhook_admission_duration_seconds_bucket") and "injection" in line:
            bound = line.partition('le="')[2].partition('"')[0]
            counts[bound] = counts.get(bound, 0) + int(line.split()[-1])
    return counts


def _p99_s(before: dict[str, int], after: dict[str, int]) -> float:
    """The bound of the first bucket that has 99 % of the calls in between."""
    counts = {bound: n - before.get(bound, 0) for bound, n in after.items()}
    enough = [float(bound) for bound, n in counts.items() if n >= 0.99 * counts["+Inf"]]
    return min(enough)


def _memory_mib() -> list[int]:
    names = kubectl(
        "-n", RELEASE_NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=kvpeer-operator", "-o", "name"
    )
    words = ["sh", "-c", "grep VmRSS /proc/1/status"]
    said = [kubectl("-n", RELEASE_NAMESPACE, "exec", name, "--", *words) for name in names.split()]
    return [int(each.split()[1]) >> 10 for each in said]


def _idle_requests() -> int:
    """Requests of both replicas while nothing changes."""
    file = state_folder() / AUDIT_LOG
    written = file.stat().st_size
    time.sleep(IDLE_S)
    lines = file.read_bytes()[written:].splitlines()
    return sum(json.loads(each)["user"]["username"] == ACCOUNT for each in lines if each.endswith(b"}"))
