"""A real vLLM engine in the modes Shadow and On: it learns what pulls and prefills cost, counts what pulls save, and
does not go on with pulls that do harm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_TOKENS = 20 * PAGE_TOKENS + 5
N_PULLS = 24


@dataclass
class Engines:
    producer: Server
    shadow: Server
    learning: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """`shadow` and `learning` decide by what they measure."""
    measured = {"KVPEER_CONNECTOR_MEASURED_COSTS": "on"}
    engines = Engines(
        producer=fleet.start("producer"),
        shadow=fleet.start("shadow", extra={"mode": "shadow"}, environment=measured),
        learning=fleet.start("learning", environment=measured),
    )
    for server in (engines.producer, engines.shadow, engines.learning):
        server.wait_ready()
    return engines


def test_shadow_pulls_nothing_and_counts_what_it_would_have_saved(engines: Engines) -> None:
    producer, shadow = engines.producer, engines.shadow
    tokens = [prompt(f"shadow {n}", N_TOKENS) for n in range(4)]
    expected = [producer.complete(each) for each in tokens]
    producer.published()
    assert [shadow.complete(each) for each in tokens] == expected
    shadow.settled()
    assert shadow.cached_tokens("p2p") == 0
    eventually(lambda: shadow.metric("kvpeer_policy_decisions_total", reason="shadow") == 4, "decisions are counted")
    assert shadow.metric("kvpeer_policy_shadow_effect_seconds_total") > 0
    assert shadow.metric("kvpeer_policy_measured_seconds_total", what="step") > 0


def test_an_engine_learns_whether_pulls_pay_and_every_answer_stays_right(engines: Engines) -> None:
    producer, learning = engines.producer, engines.learning
    for n in range(N_PULLS):
        tokens = prompt(f"learning {n}", N_TOKENS)
        expected = producer.complete(tokens)
        producer.settled()
        if n == 0:
            producer.published()
        assert learning.complete(tokens) == expected
    learning.settled()
    decided = {
        reason: learning.metric("kvpeer_policy_decisions_total", reason=reason)
        for reason in ("pull", "not_worth_it", "pair_guarded", "probe", "control", "nothing_found")
    }
    pulled_s = learning.metric("kvpeer_policy_measured_seconds_total", what="pull")
    saved_s = learning.metric("kvpeer_policy_pull_effect_seconds_total", effect="saved")
    lost_s = learning.metric("kvpeer_policy_pull_effect_seconds_total", effect="lost")
    print(f"decisions {decided}, pulled {pulled_s:.3f} s, saved {saved_s:.3f} s, lost {lost_s:.3f} s")
    assert decided["pull"] >= 1
    assert pulled_s > 0
    assert learning.metric("kvpeer_vllm_errors_total") == 0
    unjudged = learning.metric("kvpeer_policy_unjudged_pulls_total")
    assert saved_s + lost_s > 0 or unjudged > 0
    if lost_s > saved_s:
        assert decided["not_worth_it"] + decided["pair_guarded"] > 0, "pulls that harm are not made for ever"
