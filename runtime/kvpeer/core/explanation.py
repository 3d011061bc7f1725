"""One trace as an answer to "why did this request not hit?": plain values for people and programs, with advice.

docs/status.md has the fields. Agents are named by their ids in hex; who renders it knows their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvpeer.core.advice import ADVICE, advice
from kvpeer.core.traces import KEY_HASH_BYTES, LocateStep, Move, Trace
from kvpeer.model import AGENT_ID_BYTES, Outcome
from kvpeer.wire.messages import RequestTrace

__all__ = ["explanation", "summary"]

KEYS_SHOWN_MAX = 8
"""Short hashes of pages in an answer: the first ones, enough to ask about one."""

DIGITS = 6
"""Of seconds: microseconds."""


def explanation(trace: Trace, verify: str, now: float) -> dict[str, Any]:
    """Everything that is known of a request. verify: how this agent has pages verified. now: of the trace's clock."""
    verdict = trace.verdict
    return {
        "request": trace.request,
        "namespace": trace.namespace.hex(),
        "age_s": round(now - trace.began_at, 3),
        "summary": summary(trace),
        "asked": _asked(trace),
        "holders": _holders(trace),
        "decision": None if verdict is None else _decision(verdict),
        "steps": _steps(trace),
        "moved": [_moved(who, transport, move) for (who, transport), move in trace.moves.items()],
        "verified": {"mode": verify, **_outcomes(trace.outcomes)},
        "outcome": None if verdict is None else _outcome(verdict),
        "reasons": [
            {"reason": name, "pages": n, "meaning": advice(name).meaning, "fix": advice(name).fix}
            for name, n in _reasons(trace)
        ],
    }


def summary(trace: Trace) -> str:
    """One sentence."""
    verdict, n_peer_pages = trace.verdict, sum(move.outcomes[Outcome.HIT] for move in trace.moves.values())
    if verdict is None:
        n_pages = trace.outcomes[Outcome.HIT]
        return (
            f"{n_pages} pages were fetched, {n_peer_pages} pulled from peers; the engine said nothing of its decision"
        )
    if verdict.outcome == "computed":
        return f"computed: {_sentence(verdict.reason)}"
    if verdict.outcome == "ordered" and trace.n_fetches:
        return f"{trace.outcomes[Outcome.HIT]} pages were fetched, {n_peer_pages} of them pulled from peers"
    if verdict.outcome == "ordered":
        return f"a load of {verdict.n_tokens} tokens is under way, or was never begun"
    took = f"{verdict.loaded_tokens} of {verdict.n_tokens} wanted tokens in {verdict.load_us / 1e6:.3f} s"
    return f"{verdict.outcome.replace('_', ' ')}: {took}, {n_peer_pages} pages from peers"


def _sentence(reason: str) -> str:
    meaning = advice(reason).meaning.rstrip(".")
    return meaning[:1].lower() + meaning[1:]


def _asked(trace: Trace) -> dict[str, Any]:
    verdict, hashes = trace.verdict, trace.key_hashes
    shown = range(0, min(len(hashes), KEYS_SHOWN_MAX * KEY_HASH_BYTES), KEY_HASH_BYTES)
    asked: dict[str, Any] = {
        "pages": len(hashes) // KEY_HASH_BYTES,
        "keys": [hashes[at : at + KEY_HASH_BYTES].hex() for at in shown],
    }
    if verdict is not None:
        asked |= {
            "prompt_tokens": verdict.prompt_tokens,
            "page_tokens": verdict.page_tokens,
            "engine_tokens": verdict.local_tokens,
            "own_pool_tokens": max(0, verdict.resident_tokens - verdict.local_tokens),
            "peer_tokens": max(0, verdict.reachable_tokens - max(verdict.resident_tokens, verdict.local_tokens)),
        }
    return asked


def _holders(trace: Trace) -> list[dict[str, Any]]:
    """Who offered how much: in tokens of the prompt as the engine judged it, else in pages of what was asked."""
    verdict = trace.verdict
    if verdict is not None and verdict.holders:
        reaches = np.frombuffer(verdict.reaches[: len(verdict.reaches) // 4 * 4], dtype="<u4").tolist()
        holders = [verdict.holders[at : at + AGENT_ID_BYTES] for at in range(0, len(verdict.holders), AGENT_ID_BYTES)]
        return [{"agent": who.hex(), "reaches_tokens": n} for who, n in zip(holders, reaches, strict=False) if who]
    offers = trace.locates[-1].offers if trace.locates else ()
    return [{"agent": who.hex(), "reaches_pages": n} for who, n in offers]


def _decision(verdict: RequestTrace) -> dict[str, Any]:
    estimates = None
    if verdict.pull_us or verdict.prefill_us:
        estimates = {
            "pull_s": verdict.pull_us / 1e6,
            "pull_deviation_s": verdict.pull_deviation_us / 1e6,
            "prefill_s": verdict.prefill_us / 1e6,
            "are_known": verdict.are_costs_known,
        }
    return {
        "reason": verdict.reason,
        "meaning": advice(verdict.reason).meaning,
        "wanted_tokens": verdict.n_tokens,
        "wait_s": verdict.wait_us / 1e6,
        "source": verdict.source.hex(),
        "estimates": estimates,
    }


def _outcome(verdict: RequestTrace) -> dict[str, Any]:
    return {
        "result": verdict.outcome,
        "loaded_tokens": verdict.loaded_tokens,
        "load_s": verdict.load_us / 1e6,
    }


def _steps(trace: Trace) -> list[dict[str, Any]]:
    """What happened when, by seconds from the trace's beginning, in order."""
    began_at = trace.began_at
    steps = [_located(step, began_at) for step in trace.locates]
    if trace.verdict is not None:
        steps.append({"step": "decide", "at_s": _s(trace.verdict_at - began_at), "seconds": 0.0})
    if trace.n_fetches:
        steps.append(
            {
                "step": "fetch", "at_s": _s(trace.fetch_began_at - began_at), "calls": trace.n_fetches,
                "seconds": _s(trace.fetch_ended_at - trace.fetch_began_at), "busy_s": _s(trace.fetch_s),
            }
        )  # fmt: skip
    steps += [
        {
            "step": "pull", "at_s": _s(move.began_at - began_at), "seconds": _s(move.ended_at - move.began_at),
            "agent": who.hex(), "transport": transport, "calls": move.n_fetches, "busy_s": _s(move.seconds),
        }
        for (who, transport), move in trace.moves.items()
    ]  # fmt: skip
    return sorted(steps, key=lambda step: float(step["at_s"]))


def _located(step: LocateStep, began_at: float) -> dict[str, Any]:
    return {
        "step": "locate", "at_s": _s(step.began_at - began_at), "seconds": _s(step.seconds),
        "own_pool": step.n_own_pool, "peers": step.n_peer, "missing": step.n_missing, "reason": step.reason,
    }  # fmt: skip


def _moved(producer: bytes, transport: str, move: Move) -> dict[str, Any]:
    return {
        "agent": producer.hex(), "transport": transport, "bytes": move.n_bytes, "seconds": _s(move.seconds),
        "error": move.error, **_outcomes(move.outcomes),
    }  # fmt: skip


def _outcomes(counts: Iterable[int]) -> dict[str, int]:
    return {outcome.name.lower(): n for outcome, n in zip(Outcome, counts, strict=True)}


def _reasons(trace: Trace) -> list[tuple[str, int]]:
    """Why pages are missing, by name, with how many (0: of all)."""
    named: dict[str, int] = {}
    verdict = trace.verdict
    if verdict is not None and verdict.outcome != "loaded":
        named[verdict.reason] = 0
    if verdict is not None and verdict.lookup_reason:
        is_lookup = f"lookup.{verdict.lookup_reason}" in ADVICE
        named[f"{'lookup' if is_lookup else 'locate'}.{verdict.lookup_reason}"] = 0
    for step in trace.locates:
        if step.n_missing and step.reason:
            named[f"locate.{step.reason}"] = max(step.n_missing, named.get(f"locate.{step.reason}", 0))
    named |= {f"pull.{reason}": n for reason, n in trace.unasked.items()}
    for outcome, n in zip(Outcome, trace.outcomes, strict=True):
        if n and outcome is not Outcome.HIT:
            named[f"page.{outcome.name.lower()}"] = n
    return list(named.items())


def _s(seconds: float) -> float:
    return round(seconds, DIGITS)
