"""The tier's side against vLLM's rules: what it promises, what it reports, and that it never waits. No vLLM in here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from kvpeer.core.chain import ChainSlice, loose_pages, namespace_digest
from kvpeer.engines.vllm.copies import LOAD_BATCH_PAGES
from kvpeer.engines.vllm.lanes import Lane
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.vllm.tally import Tally
from kvpeer.engines.vllm_tier.tier_side import Over, TierSide
from kvpeer.model import KEY_BYTES, Outcome

PAGE_TOKENS = 16
PAGE_BYTES = 4096
DEADLINE_S = 10.0
FIELDS = {"engine": "vllm", "weights": "test"}
NOWHERE, OWN_POOL, PEER = 0, 1, 2


def page_keys(n_pages: int, prompt: str = "p") -> list[bytes]:
    """Keys as vLLM makes them: a hash and four bytes of the KV group."""
    return [f"{prompt}{page}".encode().ljust(32, b".") + bytes(4) for page in range(n_pages)]


@dataclass
class Located:
    statuses: np.ndarray
    reason: str = ""
    offers: tuple[object, ...] = ()


@dataclass
class Published:
    n_written: int
    n_present: int = 0
    n_refused: int = 0


class ScriptedClient:
    """Answers and copies what the test says, when it says so."""

    def __init__(self) -> None:
        self.healthy = True
        self.status: Callable[[int], int] = lambda place: PEER
        self.may_answer, self.may_copy = threading.Event(), threading.Event()
        self.may_answer.set()
        self.may_copy.set()
        self.is_asked, self.is_copying = threading.Event(), threading.Event()
        self.asked: list[ChainSlice] = []
        self.fetched: dict[bytes, int] = {}
        self.published: dict[bytes, int] = {}
        self.outcome: Callable[[int], Outcome] = lambda row: Outcome.HIT
        self.error: Exception | None = None
        self.n_refused = 0
        self.n_resets = 0
        self.is_closed = False

    def locate(self, chain: ChainSlice, request: str, deadline_s: float) -> Located:
        self.asked.append(chain)
        self.is_asked.set()
        assert self.may_answer.wait(DEADLINE_S)
        return Located(np.array([self.status(place) for place in range(len(chain))], np.uint8))

    def fetch(
        self, chain: ChainSlice, blocks: np.ndarray, request: str, deadline_s: float, *, source: bytes = b""
    ) -> np.ndarray:
        assert 0 < deadline_s <= 5
        self._copy()
        self.fetched.update(zip(packed(chain), blocks.tolist(), strict=True))
        return np.array([self.outcome(row) for row in blocks.tolist()], np.uint8)

    def publish(
        self, chain: ChainSlice, blocks: np.ndarray, deadline_s: float, is_current: Callable[[], bool]
    ) -> Published:
        assert 0 < deadline_s <= 2
        self._copy()
        self.published.update(zip(packed(chain), blocks.tolist(), strict=True))
        return Published(len(chain) - self.n_refused, n_refused=self.n_refused)

    def _copy(self) -> None:
        self.is_copying.set()
        assert self.may_copy.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def reset(self, reason: str) -> None:
        self.n_resets += 1

    def close(self) -> None:
        self.is_closed = True
        self.may_answer.set()
        self.may_copy.set()


def packed(chain: ChainSlice) -> list[bytes]:
    return [chain.keys[at : at + KEY_BYTES] for at in range(0, len(chain.keys), KEY_BYTES)]


def names(keys: list[bytes], fields: dict[str, str] = FIELDS) -> list[bytes]:
    """The keys under which these pages are at the agent."""
    return packed(loose_pages(namespace_digest(fields), keys))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Drives a TierSide the way vLLM's tiering manager does."""

    def __init__(self, **settings: object) -> None:
        self.client = ScriptedClient()
        self.clock = Clock()
        self.tally = Tally()
        self.side = TierSide(
            Settings(**{"min_cached_token_delta": 1, **settings}),  # type: ignore[arg-type]
            PAGE_TOKENS,
            self.tally,
            clock=self.clock,
            nonce=lambda: "nonce",
        )
        self.side.attach(FIELDS, self.client, PAGE_BYTES)
        self.n_jobs = 0

    def step(self, keys: list[bytes], request: str = "r") -> list[bool | None]:
        verdicts = [self.side.find(key, request) for key in keys]
        self.side.end_step()
        return verdicts

    def found(self, keys: list[bytes], request: str = "r") -> list[bool | None]:
        """Asks at every step until everything is answered."""
        return eventually(lambda: self.step(keys, request), lambda verdicts: None not in verdicts)

    def submit(self, keys: list[bytes], *, is_load: bool, request: str = "r", first_row: int = 0) -> int:
        self.n_jobs += 1
        self.side.take_job(self.n_jobs, request, keys, range(first_row, first_row + len(keys)), is_load=is_load)
        self.side.begin(self.n_jobs)
        return self.n_jobs

    def collected(self, n_jobs: int = 1) -> list[Over]:
        """Collects at every step until so many jobs are over; one more step must have nothing to say."""
        over: list[Over] = []

        def collect() -> list[Over]:
            over.extend(self.side.collect())
            return over

        eventually(collect, lambda done: len(done) >= n_jobs)
        assert self.side.collect() == []
        return over

    def counted(self, metric: str) -> dict[str, float]:
        return (self.tally.take() or {"counts": {}})["counts"].get(metric, {})


def eventually(look: Callable[[], list], is_so: Callable[[list], bool]) -> list:
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.002)):
        seen = look()
        if is_so(seen):
            return seen
        pause.wait(0.002)
    raise AssertionError("not in time")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    engine.side.request_arrived("r")
    yield engine
    engine.side.close()


# ---- what is promised


@pytest.mark.parametrize("status", [OWN_POOL, PEER])
def test_a_page_is_unknown_until_the_lookup_is_answered_and_then_promised(engine: Engine, status: int) -> None:
    engine.client.status = lambda place: status
    engine.client.may_answer.clear()
    keys = page_keys(3)
    assert engine.step(keys) == [None] * 3
    assert engine.step(keys) == [None] * 3
    engine.client.may_answer.set()
    assert engine.found(keys) == [True] * 3
    assert len(engine.client.asked) == 1
    assert packed(engine.client.asked[0]) == names(keys)


def test_pages_behind_the_first_that_nobody_has_are_not_promised(engine: Engine) -> None:
    engine.client.status = lambda place: NOWHERE if place == 2 else PEER
    assert engine.found(page_keys(4)) == [True, True, False, False]


def test_keys_that_are_new_while_a_lookup_is_under_way_are_looked_up_afterwards(engine: Engine) -> None:
    keys = page_keys(4)
    engine.client.may_answer.clear()
    engine.step(keys[:2])
    assert engine.client.is_asked.wait(DEADLINE_S)
    engine.step(keys)
    engine.client.may_answer.set()
    assert engine.found(keys) == [True] * 4
    assert [packed(chain) for chain in engine.client.asked] == [names(keys[:2]), names(keys[2:])]


def test_a_lookup_that_is_not_answered_is_a_miss_by_its_deadline(engine: Engine) -> None:
    engine.client.may_answer.clear()
    keys = page_keys(2)
    assert engine.step(keys) == [None] * 2
    engine.clock.now += Settings().lookup_timeout_s
    assert engine.step(keys) == [False] * 2
    assert engine.counted("lookups") == {"timeout": 1}


def test_without_an_agent_everything_is_a_miss_at_once(engine: Engine) -> None:
    engine.client.healthy = False
    assert engine.step(page_keys(2)) == [False] * 2
    assert engine.client.asked == []


def test_requests_beyond_those_that_may_wait_are_computed_at_once() -> None:
    engine = Engine(deferred_requests_max=1)
    engine.client.may_answer.clear()
    for request in ("a", "b"):
        engine.side.request_arrived(request)
        engine.step(page_keys(1, request), request)
    assert engine.side.find(page_keys(1, "b")[0], "b") is False
    assert engine.side.find(page_keys(1, "a")[0], "a") is None
    engine.side.close()


def test_few_tokens_at_peers_are_not_worth_a_pull_and_those_in_the_own_pool_are() -> None:
    engine = Engine(min_cached_token_delta=3 * PAGE_TOKENS)
    for request in ("few", "own", "enough"):
        engine.side.request_arrived(request)
    assert engine.found(page_keys(2, "few"), "few") == [False] * 2
    assert engine.counted("declined_tokens") == {"below_floor": 2 * PAGE_TOKENS}
    assert engine.found(page_keys(3, "enough"), "enough") == [True] * 3
    engine.client.status = lambda place: OWN_POOL
    assert engine.found(page_keys(2, "own"), "own") == [True] * 2
    engine.side.close()


def test_loads_beyond_what_is_begun_soon_are_declined(engine: Engine) -> None:
    engine.client.may_copy.clear()
    for n in range(Lane.PULL.loads_max):
        engine.side.request_arrived(f"r{n}")
        keys = page_keys(1, f"r{n}")
        assert engine.found(keys, f"r{n}") == [True]
        engine.submit(keys, is_load=True, request=f"r{n}", first_row=n)
    assert engine.found(page_keys(1)) == [False]
    assert engine.counted("declined_tokens") == {"busy": PAGE_TOKENS}
    engine.client.may_copy.set()
    engine.collected(Lane.PULL.loads_max)
    engine.side.request_arrived("later")
    assert engine.found(page_keys(1, "later"), "later") == [True]


def test_a_request_that_must_not_be_shared_finds_and_publishes_nothing(engine: Engine) -> None:
    engine.side.unshare("r", "lora")
    assert engine.step(page_keys(1)) == [False]
    job = engine.submit(page_keys(1), is_load=False)
    assert engine.collected() == [Over(job, (), False)]
    assert engine.client.published == {}
    assert engine.counted("unshared_requests") == {"lora": 1}


# ---- jobs


def test_a_load_brings_its_pages_into_their_rows(engine: Engine) -> None:
    keys = page_keys(2 * LOAD_BATCH_PAGES + 1)
    assert all(engine.found(keys))
    job = engine.submit(keys, is_load=True, first_row=7)
    assert engine.collected() == [Over(job, keys, True)]
    assert engine.client.fetched == {name: 7 + n for n, name in enumerate(names(keys))}


@pytest.mark.parametrize("outcome", [Outcome.MISS, Outcome.CORRUPT, Outcome.STALE, Outcome.TIMEOUT, Outcome.REFUSED])
def test_a_page_that_did_not_arrive_is_not_promised_again_to_its_request(engine: Engine, outcome: Outcome) -> None:
    keys = page_keys(4)
    engine.found(keys)
    engine.client.outcome = lambda row: outcome if row == 2 else Outcome.HIT
    job = engine.submit(keys, is_load=True)
    assert engine.collected() == [Over(job, keys[:2], False)]
    # vLLM recomputes from there on, so that what lies behind it is of no use either.
    assert engine.step(keys) == [True, True, False, False]
    # Another request may have it: the peer may be back.
    engine.side.request_arrived("other")
    assert engine.found(keys, "other") == [True] * 4


def test_an_error_in_a_copy_is_a_page_that_did_not_arrive(engine: Engine) -> None:
    keys = page_keys(1)
    engine.found(keys)
    engine.client.error = RuntimeError("a bug")
    job = engine.submit(keys, is_load=True)
    assert engine.collected() == [Over(job, [], False)]
    assert engine.step(keys) == [False]


def test_rows_are_published_under_the_keys_of_their_pages_in_any_order(engine: Engine) -> None:
    keys = page_keys(5)[::-1]
    job = engine.submit(keys, is_load=False, first_row=3)
    assert engine.collected() == [Over(job, (), True)]
    assert engine.client.published == {name: 3 + n for n, name in enumerate(names(keys))}


def test_a_publish_that_found_no_room_is_reported_as_not_whole(engine: Engine) -> None:
    engine.client.n_refused = 1
    job = engine.submit(page_keys(2), is_load=False)
    assert engine.collected() == [Over(job, (), False)]


@pytest.mark.parametrize(("settings", "n_pages"), [({"publish": False}, 1), ({"publish_queue_pages_max": 2}, 3)])
def test_a_publish_that_is_not_begun_is_reported_too(settings: dict[str, object], n_pages: int) -> None:
    engine = Engine(**settings)
    engine.side.request_arrived("r")
    job = engine.submit(page_keys(n_pages), is_load=False)
    assert engine.collected() == [Over(job, (), False)]
    assert engine.client.published == {}
    engine.side.close()


def test_a_job_that_could_not_be_begun_is_reported(engine: Engine) -> None:
    engine.side.take_job(1, "r", page_keys(1), [0], is_load=True)
    engine.side.give_up(1)
    assert engine.collected() == [Over(1, (), False)]


def test_a_job_outlives_its_request_and_is_reported_once(engine: Engine) -> None:
    engine.client.may_copy.clear()
    keys = page_keys(2)
    engine.found(keys)
    jobs = [engine.submit(keys, is_load=True), engine.submit(keys, is_load=False, first_row=9)]
    engine.side.request_over("r")
    assert engine.side.collect() == []
    engine.client.may_copy.set()
    assert {over.job_id for over in engine.collected(2)} == set(jobs)


def test_before_it_is_attached_the_tier_misses_and_reports_every_job() -> None:
    side = TierSide(Settings(), PAGE_TOKENS, Tally(), clock=Clock(), nonce=str)
    side.request_arrived("r")
    assert side.find(page_keys(1)[0], "r") is False
    side.end_step()
    side.take_job(1, "r", page_keys(1), [0], is_load=False)
    side.begin(1)
    assert side.collect() == [Over(1, (), False)]
    side.drain()
    side.reset()
    side.close()


# ---- drain, reset, end


def test_a_drain_returns_when_nothing_touches_a_row_any_more(engine: Engine) -> None:
    keys = page_keys(1)
    engine.found(keys)
    engine.client.may_copy.clear()
    jobs = {engine.submit(keys, is_load=True), engine.submit(keys, is_load=False, first_row=1)}
    assert engine.client.is_copying.wait(DEADLINE_S)
    drained = threading.Thread(target=engine.side.drain)
    drained.start()
    drained.join(0.05)
    assert drained.is_alive()
    engine.client.may_copy.set()
    drained.join(DEADLINE_S)
    assert not drained.is_alive()
    assert {over.job_id for over in engine.side.collect()} == jobs


def test_after_a_reset_keys_are_others_and_requests_of_before_are_not_shared(engine: Engine) -> None:
    keys = page_keys(1)
    engine.found(keys)
    engine.side.reset()
    assert engine.client.n_resets == 1
    assert engine.step(keys) == [False]
    engine.submit(keys, is_load=False)
    assert not engine.collected()[0].is_whole
    engine.side.request_arrived("later")
    engine.submit(keys, is_load=False, request="later")
    assert engine.collected()[0].is_whole
    assert list(engine.client.published) == names(keys, {**FIELDS, "reset": "nonce"})


def test_the_end_cuts_off_the_agent_first_so_that_nothing_waits_for_it(engine: Engine) -> None:
    keys = page_keys(1)
    engine.found(keys)
    engine.client.may_copy.clear()
    job = engine.submit(keys, is_load=True)
    assert engine.client.is_copying.wait(DEADLINE_S)
    engine.side.close()
    assert engine.client.is_closed
    assert engine.step(keys) == [False]
    engine.side.drain()
    assert engine.collected() == [Over(job, (), False)]
    engine.side.close()
