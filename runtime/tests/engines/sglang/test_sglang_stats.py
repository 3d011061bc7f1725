"""Numbers of the adapter: given once, in GB/s, bounded, and only of transfers that moved something."""

from __future__ import annotations

import pytest
from kvpeer.engines.sglang.stats import TRANSFERS_MAX, Meter
from prometheus_client import REGISTRY


def test_transfers_are_given_once_and_in_gigabytes_a_second() -> None:
    meter = Meter(is_published=False)
    meter.read("kv", 4, 3, 6_000_000_000, 2.0)
    meter.written("swa", 2, 2, 500_000_000, 0.25)
    drained = meter.drain()
    assert (drained.read_pages, drained.read_gb_per_s) == ([3], [pytest.approx(3.0)])
    assert (drained.written_pages, drained.written_gb_per_s) == ([2], [pytest.approx(2.0)])
    assert not meter.drain()


def test_what_moved_nothing_is_no_transfer() -> None:
    meter = Meter(is_published=False)
    meter.read("kv", 4, 0, 0, 0.1)
    meter.written("kv", 4, 0, 0, 0.1)
    meter.located("kv", 4, 4, 0.1)
    assert not meter.drain()


def test_a_burst_that_nobody_looks_at_is_cut() -> None:
    meter = Meter(is_published=False)
    for _ in range(TRANSFERS_MAX + 10):
        meter.read("kv", 1, 1, 1, 0.1)
        meter.written("kv", 1, 1, 1, 0.1)
    drained = meter.drain()
    assert len(drained.read_pages) == len(drained.written_pages) == TRANSFERS_MAX


def test_a_backend_that_is_attached_again_goes_on_counting() -> None:
    def count(**labels: str) -> float:
        return REGISTRY.get_sample_value("kvpeer_sglang_pages_total", labels) or 0.0

    hits = {"operation": "exists", "pool": "kv", "outcome": "hit"}
    before = count(**hits)
    Meter(is_published=True).located("kv", 5, 2, 0.1)
    Meter(is_published=True).located("kv", 5, 3, 0.1)
    assert count(**hits) - before == 5
    assert count(operation="exists", pool="kv", outcome="miss") >= 5
