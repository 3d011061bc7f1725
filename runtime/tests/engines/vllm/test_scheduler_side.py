"""The scheduler side against vLLM's rules: what it offers and orders, and its reset and end."""

from __future__ import annotations

import pytest
from kvpeer.core.chain import Chain, namespace_digest
from kvpeer.engines.vllm.lanes import START_SHARE, Lane
from requests_of_vllm import PAGE_TOKENS, FakeRequest
from scheduler_of_vllm import FIELDS, Engine, pages_of


@pytest.mark.parametrize(("extra_tokens", "n_offered"), [(0, 3), (1, 4), (15, 4)])
def test_the_engine_always_computes_at_least_one_token(engine: Engine, extra_tokens: int, n_offered: int) -> None:
    request = FakeRequest.of_pages("r", 4, extra_tokens)
    engine.locator.answer = lambda chain: [1] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request) == n_offered * PAGE_TOKENS


def test_pages_that_the_engine_has_are_not_asked_for(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request, 2 * PAGE_TOKENS) == 4 * PAGE_TOKENS
    assert [(chain.first, len(chain)) for chain in engine.locator.asked] == [(2, 4)]


def test_only_the_pages_before_the_first_gap_are_offered(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [1, 2, 0, 2, 2, 2]
    engine.side.request_arrived(request)
    assert engine.match(request) == 2 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("statuses", "n_offered"),
    [([2, 2, 2, 0], 0), ([2, 2, 2, 2], 4), ([1, 2, 2, 2], 1), ([1, 1, 1, 0], 3)],
    ids=["below the floor", "at the floor", "only the own pool", "the own pool has no floor"],
)
def test_few_tokens_are_not_pulled_from_peers_but_always_from_the_own_pool(statuses: list[int], n_offered: int) -> None:
    engine = Engine(min_cached_token_delta=4 * PAGE_TOKENS)
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: statuses
    engine.side.request_arrived(request)
    assert engine.match(request) == n_offered * PAGE_TOKENS
    engine.side.close()


def test_with_pulling_off_the_own_pool_is_still_reloaded() -> None:
    engine = Engine(mode="off")
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 2]
    engine.side.request_arrived(request)
    assert engine.match(request) == PAGE_TOKENS
    assert engine.counts()["declined_tokens"] == {"mode_off": 3 * PAGE_TOKENS}
    engine.side.close()


def test_an_accepted_load_is_ordered_once_with_the_blocks_behind_the_local_hit(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    n_loaded = engine.match(request, 2 * PAGE_TOKENS)
    engine.allocate(request, n_loaded, first_block=10)
    (order,) = engine.step().loads
    assert pages_of(order) == [2, 3, 4, 5]
    assert order.block_ids().tolist() == [12, 13, 14, 15]
    chain = Chain(namespace_digest(FIELDS))
    chain.extend(request.block_hashes)
    assert order.chain == chain.slice(2, 6)
    # vLLM calls again when the load is over, with nothing to load.
    engine.allocate(request, 0, first_block=10)
    assert engine.step().loads == []


def test_a_load_is_offered_once_for_each_attempt(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    engine.step()
    # The load failed: vLLM asks about the same request again, for ever if we offer again.
    assert engine.side.match(request, 0) == 0
    request.num_preemptions += 1
    assert engine.match(request) == 4 * PAGE_TOKENS


def test_an_offer_that_vllm_could_not_use_is_made_again(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request) == 4 * PAGE_TOKENS
    assert engine.side.match(request, 0) == 4 * PAGE_TOKENS
    assert len(engine.locator.asked) == 1
    engine.clock.now += 10
    assert engine.match(request) == 4 * PAGE_TOKENS
    assert len(engine.locator.asked) == 2, "an answer this old is asked again"


@pytest.mark.parametrize("change", [{"lora_request": object()}, {"resumable": True}])
def test_requests_whose_hash_does_not_name_their_content_are_not_shared(
    engine: Engine, change: dict[str, object]
) -> None:
    request = FakeRequest.of_pages("r", 4)
    for name, value in change.items():
        setattr(request, name, value)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
    engine.allocate(request)
    assert engine.step((request, 0, request.num_tokens, 0)).publishes == []
    assert sum(engine.counts()["unshared_requests"].values()) == 1


def test_a_preempted_request_starts_anew(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 3)
    engine.start(request)
    engine.step((request, 0, request.num_tokens, 0))
    request.num_preemptions += 1
    assert engine.step(preempted=("r",)).preempted == ["r"]
    assert engine.match(request) == 0
    engine.allocate(request)
    (order,) = engine.step((request, 0, request.num_tokens, 0)).publishes
    assert pages_of(order) == [0, 1, 2]


def test_after_a_reset_no_key_of_before_is_used_again(engine: Engine) -> None:
    running, waiting = FakeRequest.of_pages("a", 2), FakeRequest.of_pages("b", 2)
    engine.start(running)
    (before,) = engine.step((running, 0, running.num_tokens, 0)).publishes
    engine.side.request_arrived(waiting)
    engine.side.reset()
    assert engine.locator.n_resets == 1
    running.generate(PAGE_TOKENS)
    tainted = engine.step((running, 2 * PAGE_TOKENS + 1, PAGE_TOKENS, 0)).publishes
    assert tainted == [], "it computes on top of blocks from before the reset"
    assert engine.match(waiting) == 0
    engine.allocate(waiting)
    (after,) = engine.step((waiting, 0, waiting.num_tokens, 0)).publishes
    assert after.chain.keys != before.chain.keys
    engine.side.reset()
    fresh = FakeRequest.of_pages("c", 2)
    engine.start(fresh)
    (again,) = engine.step((fresh, 0, fresh.num_tokens, 0)).publishes
    assert again.chain.keys not in (after.chain.keys, before.chain.keys)


def test_a_request_preempted_by_a_reset_is_shared_again(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2)
    engine.start(request)
    engine.step((request, 0, request.num_tokens, 0))
    request.num_preemptions += 1
    engine.side.reset()
    assert engine.match(request) == 0
    engine.allocate(request)
    assert len(engine.step((request, 0, request.num_tokens, 0)).publishes) == 1


def test_tokens_are_told_apart_by_where_they_come_from(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 1]
    engine.side.request_arrived(request)
    n_loaded = engine.match(request)
    engine.allocate(request, n_loaded)
    assert engine.side.hit_sources(request, n_loaded) == (2 * PAGE_TOKENS, 2 * PAGE_TOKENS)
    assert engine.counts()["accepted_tokens"] == {"own_pool": 2 * PAGE_TOKENS, "peer": 2 * PAGE_TOKENS}


def accepted(engine: Engine, n: int, statuses: list[int], name: str = "r") -> list[str]:
    """Requests that all come at once, each as vLLM handles one; returns those whose loads were accepted."""
    engine.locator.answer = lambda chain: statuses
    loads = []
    for index in range(n):
        request = FakeRequest.of_pages(f"{name}{index}", 4, prompt=f"{name}{index}")
        engine.side.request_arrived(request)
        n_loaded = engine.match(request)
        engine.allocate(request, n_loaded)
        if n_loaded:
            loads.append(request.request_id)
    assert [order.request for order in engine.step().loads] == loads
    return loads


@pytest.mark.parametrize(("lane", "statuses"), [(Lane.PULL, [2] * 4), (Lane.RELOAD, [1] * 4)])
def test_of_a_burst_only_loads_that_begin_soon_are_accepted_and_the_rest_is_computed_at_once(
    engine: Engine, lane: Lane, statuses: list[int]
) -> None:
    loads = accepted(engine, 40, statuses)
    assert len(loads) == lane.loads_max
    assert engine.counts()["declined_tokens"] == {"busy": (40 - lane.loads_max) * 4 * PAGE_TOKENS}
    engine.side.loads_ended([*loads[:2], "somebody else"])
    assert len(accepted(engine, 5, statuses, "later")) == 2


def test_while_peers_are_slow_the_own_pool_is_still_reloaded(engine: Engine) -> None:
    assert len(accepted(engine, 40, [2] * 4)) == Lane.PULL.loads_max
    engine.counts()
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 2]
    engine.side.request_arrived(request)
    assert engine.match(request) == PAGE_TOKENS
    assert engine.counts()["declined_tokens"] == {"busy": 3 * PAGE_TOKENS}
    engine.allocate(request, PAGE_TOKENS)
    assert [order.lane for order in engine.step().loads] == [Lane.RELOAD]


def test_loads_that_were_never_reported_do_not_close_a_lane_for_good(engine: Engine) -> None:
    assert len(accepted(engine, 40, [2] * 4)) == Lane.PULL.loads_max
    engine.clock.now += 2 * engine.side.settings.load_timeout_s
    assert len(accepted(engine, 40, [2] * 4, "later")) == Lane.PULL.loads_max


@pytest.mark.parametrize("statuses", [[1] * 4000, [2] * 4000])
def test_a_load_and_its_wait_for_a_thread_are_no_longer_than_the_load_timeout(
    engine: Engine, statuses: list[int]
) -> None:
    request = FakeRequest.of_pages("long", 4000)
    engine.locator.answer = lambda chain: statuses[: len(chain)]
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    (order,) = engine.step().loads
    assert (1 + START_SHARE) * order.timeout_s == pytest.approx(engine.side.settings.load_timeout_s)


def test_closing_closes_the_locator_and_ends_sharing(engine: Engine) -> None:
    engine.side.close()
    assert engine.locator.is_closed
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
