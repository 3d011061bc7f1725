"""Pods that come many at a time are admitted from few reads, and never from old ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kvpeer_operator.recent_reads import FRESH_S, KEPT_MAX, RecentReads
from kvpeer_operator.reconciler import admit_pod
from store import Store, cluster_object, pod_object, policy_object


class Counting(Store):
    """Counts what is asked; answers when the test lets it."""

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        super().__init__(*objects)
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        self.asked.append(kind)
        assert self.may_answer.wait(10)
        return super().get(kind, namespace, name)

    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[Mapping[str, Any]]:
        self.asked.append(kind)
        return super().list(kind, namespace, labels)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_of_pods_costs_one_set_of_reads() -> None:
    store = Counting(cluster_object(), policy_object())
    reads = RecentReads(store, Clock())
    results = [admit_pod(reads, pod_object(), "models") for _ in range(200)]
    assert sorted(store.asked) == ["LimitRange", "P2PPolicy", "PeerCacheCluster", "ResourceQuota"]
    assert results == [admit_pod(store, pod_object(), "models")] * 200


def test_who_asks_at_the_same_time_waits_for_the_same_answer() -> None:
    store = Counting(cluster_object())
    store.may_answer.clear()
    reads = RecentReads(store, Clock())
    with ThreadPoolExecutor(max_workers=8) as at_once:
        asking = [at_once.submit(reads.get, "PeerCacheCluster", "models", "chat") for _ in range(8)]
        store.may_answer.set()
        assert all(each.result(10) for each in asking)
    assert store.asked == ["PeerCacheCluster"]


def test_a_slow_api_server_is_not_asked_for_each_pod() -> None:
    clock = Clock()

    class Slow(Counting):
        def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
            clock.now += 3 * FRESH_S
            return super().get(kind, namespace, name)

    store = Slow(cluster_object())
    reads = RecentReads(store, clock)
    for _ in range(5):
        reads.get("PeerCacheCluster", "models", "chat")
    assert store.asked == ["PeerCacheCluster"]


def test_a_change_is_seen_within_a_second() -> None:
    store, clock = Counting(), Clock()
    reads = RecentReads(store, clock)
    assert reads.get("PeerCacheCluster", "models", "chat") is None
    store.objects["PeerCacheCluster", "chat"] = cluster_object()
    clock.now += FRESH_S - 0.01
    assert reads.get("PeerCacheCluster", "models", "chat") is None
    clock.now += 0.01
    assert reads.get("PeerCacheCluster", "models", "chat") is not None


def test_a_quota_is_read_for_each_pod_because_each_pod_uses_some_of_it() -> None:
    quota = {"kind": "ResourceQuota", "metadata": {"name": "team"}, "status": {}}
    store = Counting(quota)
    reads = RecentReads(store, Clock())
    for _ in range(3):
        assert reads.list("ResourceQuota", "models") == [quota]
    assert store.asked == ["ResourceQuota"] * 3


def test_a_read_that_failed_is_made_again() -> None:
    store = Counting(cluster_object())
    store.fails_after = 0
    reads = RecentReads(store, Clock())
    with pytest.raises(ConnectionError):
        reads.get("PeerCacheCluster", "models", "chat")
    store.fails_after = None
    assert reads.get("PeerCacheCluster", "models", "chat") is not None


def test_what_is_kept_is_bounded() -> None:
    reads = RecentReads(Counting(), Clock())
    for index in range(2 * KEPT_MAX + 5):
        reads.get("PeerCacheCluster", f"n{index}", "chat")
    assert len(reads._answers) <= KEPT_MAX
