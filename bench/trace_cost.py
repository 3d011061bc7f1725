"""What a trace costs, in processor time of the thread that pays: `PYTHONPATH=runtime python bench/trace_cost.py`.

The agent's half is paid for each question and fetch on its event loop, the engine's for each decision on the engine's
thread; what is sent and taken in comes in batches, beside both. docs/status.md has what came out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpeer.core.pairs import PairLedger
from kvpeer.core.policy import Action, Candidate, Decision, Located, RequestFacts
from kvpeer.core.reasons import DecisionReason
from kvpeer.core.sources import Offer
from kvpeer.core.traces import TraceRing
from kvpeer.engines.traces import NO_LOOKUP, DecisionTraces
from kvpeer.model import KEY_BYTES, AgentId
from kvpeer.wire.codec import decode_client, encode
from kvpeer.wire.messages import TRACES_MAX, RequestTrace, Traced

ROUNDS = 7
CALLS = 5000
BATCHES = 50
N_PAGES = 32
PAGE_BYTES = 128 << 10

KEYS = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(N_PAGES))
NAMESPACE = b"n" * 32
PRODUCER = AgentId(b"p" * 16)
PULLED = [28, 0, 0, 0, 0, 0]


def best_us(call: Callable[[int], object], n_calls: int = CALLS) -> float:
    """Of ROUNDS rounds, the best one's time a call."""
    took_s = []
    for _ in range(ROUNDS):
        began_at = time.thread_time()
        for number in range(n_calls):
            call(number)
        took_s.append((time.thread_time() - began_at) / n_calls)
    return min(took_s) * 1e6


def decide(traces: DecisionTraces, number: int) -> None:
    facts = RequestFacts(f"r{number}", 512, 16, PAGE_BYTES)
    decision = Decision(Action.PULL, 496, 1.0, DecisionReason.PULL, PRODUCER)
    traces.decided(facts, 0, Located(0, 496), [Candidate(PRODUCER, 496)], decision, NO_LOOKUP)
    traces.loaded(facts.request, 496, 0.1, is_void=False)
    traces.over(facts.request)


def main() -> None:
    ring, pairs, told = TraceRing(), PairLedger(), list[RequestTrace]()
    offers, traces, n_bytes = (
        [Offer(PRODUCER, N_PAGES, 0)],
        DecisionTraces(lambda trace, at: told.append(trace)),
        28 << 17,
    )
    rows = {
        "agent, a question about 32 pages": best_us(
            lambda n: ring.located(f"r{n}", NAMESPACE, KEYS, [0, 4, 28], "", offers, 1.0, 1.1)
        ),
        "agent, a fetch of them": best_us(lambda n: ring.fetched(f"r{n}", NAMESPACE, KEYS, 4, PULLED, 1.0, 1.1)),
        "agent, what moved from a producer": best_us(
            lambda n: ring.moved(f"r{n}", NAMESPACE, KEYS, PRODUCER, "tcp", PULLED, n_bytes, "", 1.0, 1.1)
        ),
        "agent, how reading from it goes": best_us(
            lambda n: pairs.fetched(PRODUCER, "tcp", PULLED, n_bytes, "", 0.01, 1.1)
        ),
        "engine, a decision and its outcome": best_us(lambda n: decide(traces, n)),
    }
    batch = Traced(told[:TRACES_MAX], 0)
    body = encode(batch)
    rows["engine, to send one of 256"] = best_us(lambda n: encode(batch), BATCHES) / TRACES_MAX
    rows["agent, to take one of 256 in"] = (
        best_us(lambda n: ring.told(NAMESPACE, decode_client(body).traces, 0, 1.0), BATCHES) / TRACES_MAX  # type: ignore[union-attr]
    )
    for name, took_us in rows.items():
        print(f"{name:36} {took_us:6.2f} us")
    print(f"{'bytes of one on the socket':36} {len(body) / TRACES_MAX:6.0f}")


if __name__ == "__main__":
    main()
