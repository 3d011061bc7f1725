"""Which pages are published when, and for how long their blocks are held."""

from __future__ import annotations

from kvpeer.engines.vllm.metadata import PageOrder
from requests_of_vllm import PAGE_TOKENS, FakeRequest
from scheduler_of_vllm import Engine, pages_of


def test_pages_are_published_in_the_step_that_fills_them(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 3, extra_tokens=10)
    engine.start(request)
    chunk = 2 * PAGE_TOKENS + 5
    (first,) = engine.step((request, 0, chunk, 0)).publishes
    assert pages_of(first) == [0, 1]
    assert first.block_ids().tolist() == [1, 2]
    (second,) = engine.step((request, chunk, request.num_tokens - chunk, 0)).publishes
    assert pages_of(second) == [2]


def test_a_generated_page_is_published_after_the_step_that_computes_its_last_token(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 1, extra_tokens=PAGE_TOKENS - 1)
    engine.start(request)
    engine.step((request, 0, request.num_tokens, 0))
    n_computed = request.num_tokens
    request.generate(1)
    # The token that fills page 1 was sampled, but its own KV is computed only in the step that takes it as input.
    assert len(request.block_hashes) == 2
    (order,) = engine.step((request, n_computed, 1, 0)).publishes
    assert pages_of(order) == [1]


def test_a_sampled_token_whose_kv_is_not_computed_yet_keeps_its_page_back(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2, extra_tokens=0)
    engine.start(request)
    assert [pages_of(o) for o in engine.step((request, 0, 2 * PAGE_TOKENS - 1, 0)).publishes] == [[0]]


def test_a_page_whose_last_token_is_not_known_yet_waits_for_its_hash(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 1, extra_tokens=PAGE_TOKENS - 1)
    engine.start(request)
    # With asynchronous scheduling the next step is planned before the token that this one samples is known.
    assert [pages_of(o) for o in engine.step((request, 0, request.num_tokens, 0)).publishes] == [[0]]
    assert engine.step((request, 2 * PAGE_TOKENS - 1, 1, 0)).publishes == []
    request.generate(2)
    assert [pages_of(o) for o in engine.step((request, 2 * PAGE_TOKENS, 1, 0)).publishes] == [[1]]


def generate_pages(engine: Engine, request: FakeRequest, n_pages: int) -> list[list[int]]:
    """Token by token; returns the pages of each publish."""
    published = []
    for _ in range(n_pages * PAGE_TOKENS):
        request.generate(1)
        orders = engine.step((request, request.num_tokens - 1, 1, 0))
        published += [pages_of(order) for order in orders.publishes]
    return published


def test_nothing_is_published_as_a_request_ends(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2, extra_tokens=0)
    engine.start(request)
    engine.step((request, 0, 2 * PAGE_TOKENS, 0))
    assert generate_pages(engine, request, 2) == [[2], [3]]
    # With drafts in flight the hashes run ahead of what is really computed by then.
    request.generate(PAGE_TOKENS)
    assert engine.side.finished("r")
    orders = engine.step()
    assert (orders.publishes, orders.held) == ([], ["r"])


def test_a_chunk_of_a_prompt_is_published_however_few_pages_it_has(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 5)
    engine.start(request)
    engine.step((request, 0, 4 * PAGE_TOKENS, 0))
    assert [pages_of(o) for o in engine.step((request, 4 * PAGE_TOKENS, PAGE_TOKENS + 1, 0)).publishes] == [[4]]


def test_draft_tokens_never_fill_a_page(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2, extra_tokens=0)
    engine.start(request)
    assert [pages_of(o) for o in engine.step((request, 0, 2 * PAGE_TOKENS + 2, 3)).publishes] == [[0]]
    assert [pages_of(o) for o in engine.step((request, 2 * PAGE_TOKENS - 1, 3, 2)).publishes] == [[1]]


def test_pages_that_the_engine_had_are_offered_again_once_after_the_new_ones(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.start(request)
    new, had = engine.step((request, 3 * PAGE_TOKENS, PAGE_TOKENS + 1, 0)).publishes
    assert pages_of(new) == [3]
    assert pages_of(had) == [0, 1, 2]
    assert [new.blocks, had.blocks] == [
        PageOrder.build("r", each.chain, blocks, 1).blocks for each, blocks in ((new, [4]), (had, [1, 2, 3]))
    ]
    request.generate(PAGE_TOKENS)
    (order,) = engine.step((request, request.num_tokens - PAGE_TOKENS, PAGE_TOKENS, 0)).publishes
    assert pages_of(order) == [4]


def test_pages_that_the_engine_had_are_not_offered_after_a_reset(engine: Engine) -> None:
    """They might be of a request that ran on blocks from before."""
    engine.side.reset()
    request = FakeRequest.of_pages("r", 4)
    engine.start(request)
    (order,) = engine.step((request, 3 * PAGE_TOKENS, PAGE_TOKENS + 1, 0)).publishes
    assert pages_of(order) == [3]


def test_pages_after_a_failed_load_are_published_from_where_computing_begins(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    engine.step()
    engine.allocate(request)
    computed, loaded = engine.step((request, PAGE_TOKENS, 3 * PAGE_TOKENS + 1, 0)).publishes
    assert pages_of(computed) == [1, 2, 3]
    assert pages_of(loaded) == [0]


def test_blocks_are_held_exactly_when_copies_from_them_may_run(engine: Engine) -> None:
    published, nothing_full, preempted = (
        FakeRequest.of_pages(name, n, 3) for name, n in (("a", 2), ("b", 0), ("c", 2))
    )
    for request in (published, nothing_full, preempted):
        engine.start(request)
        engine.step((request, 0, request.num_tokens, 0))
    preempted.num_preemptions += 1
    assert engine.side.finished("a") is True
    assert engine.side.finished("b") is False
    assert engine.side.finished("c") is False, "its blocks were freed when it was preempted"
    assert engine.step().held == ["a"]
    assert engine.step().held == []


def test_an_aborted_request_with_a_load_under_way_is_not_held(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    assert len(engine.step().loads) == 1
    assert engine.side.finished("r") is False, "its report as received frees it; a second one would end the engine"
    assert engine.step().held == []


def test_a_preempted_request_that_loads_is_not_held_for_the_copies_of_before(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.start(request)
    assert len(engine.step((request, 0, request.num_tokens, 0)).publishes) == 1
    request.num_preemptions += 1
    engine.locator.answer = lambda chain: [1] * len(chain)
    engine.allocate(request, engine.match(request))
    assert len(engine.step(preempted=("r",)).loads) == 1
    assert engine.side.finished("r") is False
    assert engine.step().held == []
