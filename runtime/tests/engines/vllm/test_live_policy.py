"""What the scheduler side makes of a policy that is told while the engine runs."""

from __future__ import annotations

from kvpeer.wire.messages import PolicyTold
from requests_of_vllm import PAGE_TOKENS, FakeRequest
from scheduler_of_vllm import Engine


def test_a_policy_that_is_told_changes_the_next_decision_of_a_running_engine(engine: Engine) -> None:
    engine.locator.answer = lambda chain: [2, 2, 2, 2]
    told = [{}, {"MODE": "off"}, {"MODE": "shadow"}, {"MODE": "on"}, {"MIN_CACHED_TOKEN_DELTA": str(5 * PAGE_TOKENS)}]
    offered = []
    for revision, variables in enumerate(told):
        prefixed = {f"KVPEER_CONNECTOR_{name}": value for name, value in variables.items()}
        engine.locator.policy = PolicyTold(revision, "p", prefixed)
        request = FakeRequest.of_pages(f"r{revision}", 4)
        engine.side.request_arrived(request)
        offered.append(engine.match(request) // PAGE_TOKENS)
    assert offered == [4, 0, 0, 4, 0]
    assert set(engine.counts()["decisions"]) == {"pull", "mode_off", "shadow", "below_floor"}


def test_a_policy_that_is_told_ends_publishing_with_the_next_step(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2)
    engine.start(request)
    engine.locator.policy = PolicyTold(1, "p", {"KVPEER_CONNECTOR_PUBLISH": "false"})
    assert engine.step((request, 0, 2 * PAGE_TOKENS, 0)).publishes == []


def test_a_policy_that_does_not_fit_changes_nothing(engine: Engine) -> None:
    engine.locator.answer = lambda chain: [2, 2, 2, 2]
    engine.locator.policy = PolicyTold(1, "p", {"KVPEER_CONNECTOR_MODE": "off", "KVPEER_CONNECTOR_PUBLISH": "perhaps"})
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.match(request) == 4 * PAGE_TOKENS


def test_only_what_may_change_while_an_engine_runs_is_taken_from_a_policy(engine: Engine) -> None:
    before = engine.side.settings
    variables = {"KVPEER_CONNECTOR_NAMESPACE_SALT": "x", "KVPEER_SGLANG_MODE": "off", "KVPEER_CONNECTOR_NEW": "1"}
    engine.locator.policy = PolicyTold(1, "p", variables)
    engine.step()
    assert engine.side.settings == before
