"""What the two sides send each other: compact, whole after pickling, and equal on all ranks."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from kvpeer.core.chain import Chain
from kvpeer.engines.vllm.metadata import PageOrder, RankFacts, StepOrders, agreed_facts
from kvpeer.engines.vllm.tally import SAMPLES_MAX, Tally, merge_counts
from kvpeer.model import ConfigError
from requests_of_vllm import page_hashes

FACTS = RankFacts({"engine": "vllm", "weights": "w"}, n_parts=2, part=0, part_bytes=4096)


def order(n_pages: int) -> PageOrder:
    chain = Chain(b"n" * 32)
    chain.extend(page_hashes(n_pages))
    return PageOrder.build("request", chain.slice(0, n_pages), range(n_pages), 1.0)


def test_orders_survive_pickling() -> None:
    orders = StepOrders([order(3)], [order(2)], ["preempted"], ["held"])
    assert pickle.loads(pickle.dumps(orders)) == orders  # noqa: S301 - our own bytes


def test_a_long_prompt_is_a_few_bytes_a_page_and_no_object_a_page() -> None:
    n_pages = 800
    assert len(pickle.dumps(order(n_pages))) < n_pages * (16 + 8) + n_pages // 32 * 16 + 1000


def test_ranks_that_agree_are_accepted_whatever_their_part() -> None:
    assert agreed_facts([FACTS, replace(FACTS, part=1)]) == FACTS


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(FACTS, namespace_fields={"engine": "vllm", "weights": "v"}), "weights"),
        (replace(FACTS, namespace_fields={"engine": "vllm"}), "weights"),
        (replace(FACTS, part_bytes=8192), "parts of a page"),
    ],
)
def test_ranks_that_differ_are_refused_by_name(other: RankFacts, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        agreed_facts([FACTS, other])


def test_an_engine_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rank"):
        agreed_facts([])


def test_counts_of_several_ranks_add_up_and_samples_stay_bounded() -> None:
    tally = Tally()
    tally.count("pages", "hit", 3)
    for _ in range(SAMPLES_MAX + 5):
        tally.observe("seconds", 1.0)
    merged = tally.take()
    assert merged is not None
    assert tally.take() is None, "what was taken is gone"
    tally.count("pages", "hit")
    tally.count("pages", "miss")
    tally.observe("seconds", 2.0)
    other = tally.take()
    assert other is not None
    merge_counts(merged, other)
    assert merged["counts"] == {"pages": {"hit": 4, "miss": 1}}
    assert len(merged["samples"]["seconds"]) == SAMPLES_MAX
