"""Two real engines on two nodes share pages, installed from nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cluster.control_plane import kubectl
from engines.harness import PAGE_TOKENS, eventually, prompt, say

from scenarios.installation import helm, install
from scenarios.kube import apply, await_condition, get
from scenarios.pods import ENGINE_PORT, EnginePod, engine_pod, policy, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

PROMPT_TOKENS = 20 * PAGE_TOKENS
FINDABLE_DEADLINE_S = 120.0
TOLD_DEADLINE_S = 60.0
"""Of which the operator needs two or three; the rest is for a machine that is busy with engines."""


@pytest.fixture(scope="module")
def engines(chat: str) -> Iterator[list[EnginePod]]:
    """Two engines, on two nodes."""
    apply(engine_pod("a", "n1"), engine_pod("b", "n2"), namespace=chat)
    pods = [wait_ready(name, chat) for name in ("a", "b")]
    yield pods
    for each in pods:
        kubectl("delete", "pod", each.name, "-n", chat, "--wait=false")


def findable(pods: list[EnginePod]) -> None:
    """Returns when every page that is in a pool is in the directory, at both agents."""

    def counts() -> list[tuple[float, float, float]]:
        names = ("kvpeer_pool_pages", "kvpeer_directory_holders", "kvpeer_membership_members")
        states = ({"state": "committed"}, {}, {"state": "alive"})
        return [
            (
                each.agent_metric(names[0], **states[0]),
                each.agent_metric(names[1]),
                each.agent_metric(names[2], **states[2]),
            )
            for each in pods
        ]

    def is_so() -> bool:
        agents = counts()
        n_pages = sum(each[0] for each in agents)
        return n_pages > 0 and sum(each[1] for each in agents) == n_pages * len(pods)

    eventually(is_so, "every page in a pool is in the directory", FINDABLE_DEADLINE_S, 1.5, counts)


@pytest.mark.core
def test_what_one_engine_computed_another_pulls(engines: list[EnginePod], chat: str) -> None:
    first, second = engines
    tokens = prompt("shared", PROMPT_TOKENS)
    expected = first.complete(tokens)
    findable(engines)
    assert second.complete(tokens) == expected
    pulled = second.pulled_tokens()
    assert pulled >= PROMPT_TOKENS - 2 * PAGE_TOKENS, f"{pulled}\n{second.log()}\n{second.log('kvpeer-agent')}"
    assert first.pulled_tokens() == 0


@pytest.mark.core
@pytest.mark.parametrize(
    ("mode", "reason"), [("Off", "mode_off"), ("Shadow", "shadow"), ("", "mode_off"), ("On", "pull")], ids=str
)
def test_a_policy_that_changes_reaches_engines_that_run(
    engines: list[EnginePod], chat: str, mode: str, reason: str
) -> None:
    """The next decision of an engine is made by it, within seconds and without a restart. No mode: it is deleted."""
    first, second = engines
    if mode:
        apply(policy(mode=mode), namespace=chat)
    else:
        kubectl("delete", "p2p", "chat", "-n", chat)
    changed_at = time.monotonic()
    eventually(lambda: all(_knows(each, mode) for each in engines), "the agents are told", TOLD_DEADLINE_S)
    say(f"{mode or 'no policy'}: both agents know after {time.monotonic() - changed_at:.1f} s")
    tokens = prompt(f"under {mode or 'no policy'}", PROMPT_TOKENS)
    expected = first.complete(tokens)
    findable(engines)
    decided, pulled = second.n_decisions(reason), second.pulled_tokens()
    assert second.complete(tokens) == expected
    eventually(lambda: second.n_decisions(reason) == decided + 1, f"it was decided by {reason}", 30)
    assert (second.pulled_tokens() > pulled) == (mode == "On")
    assert _restarts(first) == _restarts(second) == 0


def test_helm_test_sees_that_two_engines_share(engines: list[EnginePod]) -> None:
    addresses = ",".join(f"http://{each.address}:{ENGINE_PORT}" for each in engines)
    install("--set", f"test.engines={{{addresses}}}")
    assert "Phase:          Succeeded" in helm("test", "kvpeer", "--timeout", "300s")


def test_the_cluster_says_that_its_agents_run(engines: list[EnginePod], chat: str) -> None:
    found = await_condition("pcc", "chat", chat, "Ready")
    assert found["status"]["members"] == {"expected": 2, "ready": 2, "outdated": 0, "skipped": 0}
    line = kubectl("get", "pcc", "chat", "-n", chat).splitlines()[1].split()
    assert line[:4] == ["chat", "True", "2", "2"]


def test_the_agent_runs_without_rights(engines: list[EnginePod], chat: str) -> None:
    said = _in_agent(engines[0], "id -u; touch /x 2>&1 || true")
    assert said.splitlines()[0] == "65532"
    assert "Read-only file system" in said


def test_an_agent_that_dies_is_started_again_and_its_engine_serves(engines: list[EnginePod], chat: str) -> None:
    first, second = engines
    tokens = prompt("after the death", PROMPT_TOKENS)
    before = _agent_process(first)
    _in_agent(first, f"kill -9 {before}")
    expected = first.complete(tokens)
    eventually(first.has_agent, "the agent runs again", 60)
    assert _agent_process(first) != before
    eventually(lambda: first.agent_metric("kvpeer_membership_members", state="alive") == 2, "it is a member", 90)
    assert second.complete(tokens) == expected
    assert _restarts(first) == 0


def _knows(pod: EnginePod, mode: str) -> bool:
    """Whether the policy that its agent was told last has this mode."""
    lines = [line for line in pod.log("kvpeer-agent", n_lines=-1).splitlines() if "KVPEER_CONNECTOR_MODE" in line]
    wanted = "policy (none)" if not mode else f"'KVPEER_CONNECTOR_MODE': '{mode.lower()}'"
    return bool(lines) and wanted in lines[-1]


def _in_agent(pod: EnginePod, script: str) -> str:
    return kubectl("exec", pod.name, "-n", pod.namespace, "-c", "kvpeer-agent", "--", "sh", "-c", script)


def _agent_process(pod: EnginePod) -> int:
    """Its id in the agent's container."""
    return int(_in_agent(pod, "grep -l '^kvpeer$' /proc/[0-9]*/comm").split("/")[2])


def _restarts(pod: EnginePod) -> int:
    status = (get("pod", pod.name, pod.namespace) or {})["status"]
    return sum(each["restartCount"] for each in [*status["initContainerStatuses"], *status["containerStatuses"]])
