"""The ring of traces: what is kept of a request, its limits, and what an explanation makes of it."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import count

import pytest
from kvpeer.core.advice import ADVICE, advice
from kvpeer.core.explanation import explanation
from kvpeer.core.reasons import DecisionReason, MissReason, UnaskedReason
from kvpeer.core.sources import Offer
from kvpeer.core.traces import Trace, TraceLimits, TraceRing
from kvpeer.model import KEY_BYTES, AgentId, Outcome
from kvpeer.wire.messages import RequestTrace

NAMESPACE = b"n" * 32
PRODUCER = AgentId(b"p" * 16)


def keys(n: int, first: int = 0) -> bytes:
    return b"".join(number.to_bytes(4, "big") + b"secret of key"[: KEY_BYTES - 4] for number in range(first, first + n))


def verdict(request: str, reason: str = "decision.pull", outcome: str = "loaded", **fields: object) -> RequestTrace:
    values: dict[str, object] = {
        "request": request, "prompt_tokens": 512, "page_tokens": 16, "page_bytes": 4096, "local_tokens": 0,
        "resident_tokens": 64, "reachable_tokens": 496, "holders": bytes(PRODUCER),
        "reaches": (496).to_bytes(4, "little"),
        "lookup_us": 900, "lookup_reason": "", "reason": reason, "n_tokens": 496, "wait_us": 2_000_000,
        "source": bytes(PRODUCER), "pull_us": 10_000, "pull_deviation_us": 1000, "prefill_us": 200_000,
        "are_costs_known": True, "outcome": outcome, "loaded_tokens": 496, "load_us": 12_000, "age_us": 500_000,
    }  # fmt: skip
    return RequestTrace(**{**values, **fields})  # type: ignore[arg-type]


def pulled(ring: TraceRing, request: str, now: float = 10.0) -> Trace:
    """A request of 31 pages, 4 of the own pool and 27 of a peer."""
    ring.located(request, NAMESPACE, keys(31), [0, 4, 27], "", [Offer(PRODUCER, 31, 0)], now, now + 0.001)
    counts = [27, 0, 0, 0, 0, 0]
    ring.moved(request, NAMESPACE, keys(31), PRODUCER, "tcp", counts, 27 * 4096, "", now + 0.002, now + 0.005)
    ring.fetched(request, NAMESPACE, keys(31), 4, counts, now + 0.002, now + 0.006)
    ring.told(NAMESPACE, [verdict(request)], 0, now + 0.51)
    trace = ring.get(request)
    assert trace is not None
    return trace


def test_both_halves_of_a_request_meet_in_one_trace() -> None:
    ring = TraceRing()
    answer = explanation(pulled(ring, "r"), "full", 20.0)
    assert len(ring) == 1
    assert answer["summary"] == "loaded: 496 of 496 wanted tokens in 0.012 s, 27 pages from peers"
    assert (answer["asked"]["own_pool_tokens"], answer["asked"]["peer_tokens"]) == (64, 432)
    assert answer["holders"] == [{"agent": PRODUCER.hex(), "reaches_tokens": 496}]
    assert answer["decision"]["estimates"] == {
        "pull_s": 0.01, "pull_deviation_s": 0.001, "prefill_s": 0.2, "are_known": True,
    }  # fmt: skip
    assert [step["step"] for step in answer["steps"]] == ["locate", "fetch", "pull", "decide"]
    assert answer["moved"][0]["bytes"] == 27 * 4096
    assert answer["verified"] == {
        "mode": "full", "hit": 31, "miss": 0, "stale": 0, "corrupt": 0, "timeout": 0, "refused": 0,
    }  # fmt: skip
    assert answer["reasons"] == []


def test_every_reason_of_the_closed_lists_has_advice() -> None:
    expected = {f"locate.{reason.value}" for reason in MissReason}
    expected |= {f"decision.{reason.value}" for reason in DecisionReason}
    expected |= {f"pull.{reason.value}" for reason in UnaskedReason}
    expected |= {f"page.{outcome.name.lower()}" for outcome in Outcome if outcome is not Outcome.HIT}
    assert expected <= ADVICE.keys()
    assert {name for name in ADVICE if name.partition(".")[0] not in ("request", "lookup")} == expected
    assert all(text.meaning.endswith(".") for text in ADVICE.values())
    assert "does not know" in advice("page.of_the_future").meaning


@pytest.mark.parametrize(
    ("reason", "lookup_reason", "expected"),
    [
        ("decision.nothing_found", "miss", ["decision.nothing_found", "locate.miss"]),
        ("decision.nothing_found", "timeout", ["decision.nothing_found", "lookup.timeout"]),
        ("decision.below_floor", "", ["decision.below_floor"]),
        ("request.lora", "", ["request.lora"]),
    ],
)
def test_an_explanation_names_why_nothing_was_loaded(reason: str, lookup_reason: str, expected: list[str]) -> None:
    ring = TraceRing()
    ring.told(NAMESPACE, [verdict("r", reason, "computed", lookup_reason=lookup_reason)], 0, 10.0)
    trace = ring.get("r")
    assert trace is not None
    answer = explanation(trace, "full", 10.0)
    assert [found["reason"] for found in answer["reasons"]] == expected
    assert all(found["meaning"] for found in answer["reasons"])


def test_an_explanation_counts_the_pages_that_did_not_come_by_why() -> None:
    ring = TraceRing()
    ring.fetched("r", NAMESPACE, keys(9), 1, [2, 0, 3, 1, 2, 0], 10.0, 10.1)
    ring.unasked("r", NAMESPACE, keys(9), [("no_room", 2)], 10.1)
    trace = ring.get("r")
    assert trace is not None
    reasons = {found["reason"]: found["pages"] for found in explanation(trace, "full", 11.0)["reasons"]}
    assert reasons == {"pull.no_room": 2, "page.stale": 3, "page.corrupt": 1, "page.timeout": 2}


def test_a_trace_has_no_more_of_a_key_than_four_bytes() -> None:
    ring = TraceRing()
    trace = pulled(ring, "r")
    assert trace.key_hashes == b"".join(number.to_bytes(4, "big") for number in range(31))
    assert "secret" not in repr(trace)
    assert [found.request for found in ring.of_key((30).to_bytes(4, "big"))] == ["r"]
    assert ring.of_key((31).to_bytes(4, "big")) == []


def test_questions_of_an_engine_that_names_no_request_are_kept_together_by_their_first_page() -> None:
    ring = TraceRing()
    ring.located("", NAMESPACE, keys(4, first=7), [4, 0, 0], "miss", [], 1.0, 1.1)
    ring.fetched("", NAMESPACE, keys(2, first=7), 0, [0, 2, 0, 0, 0, 0], 2.0, 2.1)
    ring.located("", NAMESPACE, keys(4, first=9), [4, 0, 0], "miss", [], 3.0, 3.1)
    assert [trace.request for trace in ring] == ["@00000009", "@00000007"]


def test_the_oldest_traces_go_at_either_limit() -> None:
    ring = TraceRing(TraceLimits(traces_max=3, bytes_max=1 << 20))
    for number in range(5):
        pulled(ring, f"r{number}")
    assert [trace.request for trace in ring] == ["r4", "r3", "r2"]
    assert ring.n_evicted == 2
    small = TraceRing(TraceLimits(traces_max=1000, bytes_max=10_000))
    for number in range(100):
        pulled(small, f"r{number}")
    assert 1 <= len(small) < 10
    assert small.n_bytes <= 10_000
    assert small.n_bytes == sum(trace.n_bytes for trace in small)


def test_a_ring_takes_no_more_memory_than_it_says() -> None:
    names, limits = (f"request-{number:032d}" for number in count()), TraceLimits(traces_max=100_000, bytes_max=2 << 20)
    pulled(TraceRing(limits), "warm")
    gc.collect()
    tracemalloc.start()
    try:
        ring = TraceRing(limits)
        for number in range(1500):
            name = next(names)
            ring.located(name, NAMESPACE, keys(300, number), [0, 4, 296], "", [Offer(PRODUCER, 31, 0)], 1.0, 1.5)
            for rank in range(3):
                moved = bytes([rank]) * 16
                ring.moved(name, NAMESPACE, keys(3), moved, "tcp", [9, 0, 0, 0, 0, 0], 4096, f"e{number}", 1.0, 2.0)
            ring.fetched(name, NAMESPACE, keys(3), 4, [27, 0, 0, 0, 0, 0], 1.0, 2.0)
            ring.told(NAMESPACE, [verdict(name)], 0, 9.0 + number)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ring.n_evicted > 0
    assert taken <= ring.n_bytes <= limits.bytes_max
    assert taken > ring.n_bytes / 3, "the costs that are named are far above the real ones"
