"""What an engine tells of its decisions: once each, in bounded batches, and never at the engine's expense."""

from __future__ import annotations

import logging
import threading

import pytest
from kvpeer.core.policy import Candidate, Load, Located, Mode, PolicySettings, RequestFacts
from kvpeer.engines.policy import EnginePolicy
from kvpeer.engines.traces import OPEN_MAX, WAITING_MAX, DecisionTraces, Lookup, TraceSender
from kvpeer.engines.vllm.tally import Tally
from kvpeer.wire.messages import TRACES_MAX, RequestTrace, Traced

PAGE_TOKENS = 16
PRODUCER = b"p" * 16


class Engine:
    """A policy whose traces are kept."""

    def __init__(self, **settings: object) -> None:
        self.told: list[RequestTrace] = []
        self.now = 100.0
        traces = DecisionTraces(lambda trace, at: self.told.append(trace), lambda: self.now)
        chosen = PolicySettings(**{"mode": Mode.ON, "min_cached_token_delta": 64, **settings})  # type: ignore[arg-type]
        self.policy = EnginePolicy(chosen, Tally(), lambda: self.now, logging.getLogger("tests"), traces=traces)

    def decide(self, request: str, n_pages: int, n_tokens: int = 512) -> None:
        facts = RequestFacts(request, n_tokens, PAGE_TOKENS, 4096)
        located = Located(16, 16 + n_pages * PAGE_TOKENS)
        candidates = [Candidate(PRODUCER, located.reachable_tokens)] if n_pages else []
        lookup = Lookup(0.002, "" if n_pages else "miss")
        decision = self.policy.decide(facts, 16, located, candidates, Load(), lookup=lookup)
        if decision.n_tokens:
            self.policy.begun(facts, decision)


def test_a_request_that_is_computed_is_told_at_its_decision_and_once() -> None:
    engine = Engine()
    engine.decide("r", 2)
    engine.decide("r", 2)
    (trace,) = engine.told
    assert (trace.request, trace.outcome, trace.reason) == ("r", "computed", "decision.below_floor")
    assert (trace.local_tokens, trace.resident_tokens, trace.reachable_tokens, trace.holders) == (16, 16, 48, PRODUCER)
    assert trace.lookup_us == 2000
    engine.policy.forget("r")
    assert len(engine.told) == 1


def test_a_request_whose_agent_found_pages_later_is_told_again() -> None:
    engine = Engine()
    engine.decide("r", 0)
    engine.decide("r", 8)
    engine.policy.forget("r")
    assert [(trace.reason, trace.outcome) for trace in engine.told] == [
        ("decision.nothing_found", "computed"),
        ("decision.pull", "ordered"),
    ]
    assert engine.told[0].lookup_reason == "miss"


@pytest.mark.parametrize(
    ("n_tokens", "is_void", "outcome"),
    [(128, False, "loaded"), (64, False, "partly_loaded"), (0, False, "not_loaded"), (0, True, "given_up")],
)
def test_a_pull_is_told_when_it_is_over_with_what_came_of_it(n_tokens: int, is_void: bool, outcome: str) -> None:
    engine = Engine()
    engine.decide("r", 8)
    assert engine.told == []
    engine.policy.reported("r", n_tokens, 0.25, is_void=is_void)
    engine.policy.ended(["r"])
    engine.policy.forget("r")
    (trace,) = engine.told
    assert (trace.outcome, trace.loaded_tokens, trace.load_us) == (outcome, n_tokens, 250_000)
    assert trace.source == PRODUCER


def test_a_request_that_nobody_is_asked_about_is_told_once() -> None:
    engine = Engine()
    for _ in range(3):
        engine.policy.traces.unasked("r", 100, PAGE_TOKENS, "lora")
    assert [(trace.reason, trace.prompt_tokens) for trace in engine.told] == [("request.lora", 100)]


def test_no_more_requests_are_remembered_than_may_be() -> None:
    engine = Engine(pulls_per_source_max=2 * OPEN_MAX)
    for number in range(OPEN_MAX + 5):
        engine.decide(f"r{number}", 8)
    assert [trace.request for trace in engine.told] == [f"r{number}" for number in range(5)]


class Agent:
    """Takes messages when it may; a sender whose thread does nothing until it is asked to flush."""

    def __init__(self) -> None:
        self.sent: list[Traced] = []
        self.may_take = True

    def take(self, message: Traced) -> bool:
        if self.may_take:
            self.sent.append(message)
        return self.may_take


def trace_of(request: str) -> RequestTrace:
    kept: list[RequestTrace] = []
    DecisionTraces(lambda trace, at: kept.append(trace)).unasked(request, 10, PAGE_TOKENS, "lora")
    return kept[0]


def test_traces_are_sent_in_batches_with_their_age() -> None:
    agent = Agent()
    sender = TraceSender(agent.take, lambda: 107.0)
    sender.close()
    for number in range(TRACES_MAX + 1):
        sender.add(trace_of(f"r{number}"), 100.0)
    sender.flush()
    assert [len(message.traces) for message in agent.sent] == [TRACES_MAX, 1]
    assert agent.sent[0].traces[0].age_us == 7_000_000


def test_what_finds_no_room_or_no_agent_is_dropped_and_counted() -> None:
    agent = Agent()
    sender = TraceSender(agent.take)
    sender.close()
    trace = trace_of("r")
    for _ in range(WAITING_MAX + 3):
        sender.add(trace, 0.0)
    agent.may_take = False
    sender.flush()
    agent.may_take = True
    sender.flush()
    n_sent = sum(len(message.traces) for message in agent.sent)
    assert n_sent + sum(message.n_dropped for message in agent.sent) == WAITING_MAX + 3
    assert agent.sent[0].n_dropped == 3 + TRACES_MAX


def test_a_sender_sends_by_itself() -> None:
    taken = threading.Event()
    sender = TraceSender(lambda message: taken.set() is None)
    sender.add(trace_of("r"), 0.0)
    assert taken.wait(20)
    sender.close()
