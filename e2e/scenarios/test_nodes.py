"""Nodes that are lost, cut off and found again, with real agents. Their engines only sleep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import lifecycle, network
from cluster.control_plane import kubectl
from engines.harness import eventually

from scenarios.kube import apply, await_condition, get
from scenarios.pods import EnginePod, fake_pod, wait_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NODES = ("n1", "n2", "n3")
NOTICED_DEADLINE_S = 60.0
"""An agent suspects, asks others, and waits for an answer before it takes one for dead; on a busy machine longer."""
LASTING_S = 10.0


@pytest.fixture(scope="module")
def agents(chat: str) -> Iterator[dict[str, EnginePod]]:
    """One on each node, by the node's name; all of them know each other."""
    apply(*(fake_pod(f"on-{node}", node) for node in NODES), namespace=chat)
    pods = {node: wait_ready(f"on-{node}", chat, deadline_s=120) for node in NODES}
    _await_alive(pods, dict.fromkeys(NODES, 3))
    yield pods
    network.reconnect()
    for each in pods.values():
        kubectl("delete", "pod", each.name, "-n", chat, "--wait=false")


def test_a_link_between_two_nodes_that_is_cut_makes_no_agent_dead(agents: dict[str, EnginePod]) -> None:
    """The third one asks for them."""
    network.partition("n1", "n2")
    try:
        _await_alive(agents, dict.fromkeys(NODES, 3), lasting_s=LASTING_S)
    finally:
        network.reconnect()


def test_a_node_that_is_cut_off_is_taken_for_dead_and_found_again(agents: dict[str, EnginePod]) -> None:
    network.partition("n1", "n2")
    network.partition("n1", "n3")
    try:
        _await_alive(agents, {"n1": 1, "n2": 2, "n3": 2})
    finally:
        network.reconnect()
    _await_alive(agents, dict.fromkeys(NODES, 3))


def test_a_node_that_is_frozen_is_left_out_and_goes_on_as_the_same_member(
    agents: dict[str, EnginePod], chat: str
) -> None:
    before = _runs(agents["n3"])
    lifecycle.freeze("n3")
    try:
        others = {node: agents[node] for node in ("n1", "n2")}
        _await_alive(others, dict.fromkeys(others, 2))
    finally:
        lifecycle.thaw("n3")
    _await_alive(agents, dict.fromkeys(NODES, 3))
    assert _runs(agents["n3"]) == before
    await_condition("node", "n3", "", "Ready", deadline_s=60)


def test_a_node_without_power_is_left_out_and_comes_back(agents: dict[str, EnginePod], chat: str) -> None:
    lifecycle.cut_power("n3")
    try:
        others = {node: agents[node] for node in ("n1", "n2")}
        _await_alive(others, dict.fromkeys(others, 2))
        await_condition("node", "n3", "", "Ready", status="Unknown", deadline_s=60)
    finally:
        lifecycle.restore_power("n3")
    await_condition("node", "n3", "", "Ready", deadline_s=60)
    # The same pod is started anew, at another address and as another member.
    back = {**agents, "n3": wait_again(agents["n3"])}
    _await_alive(back, dict.fromkeys(NODES, 3))
    await_condition("pcc", "chat", chat, "Ready")


def wait_again(pod: EnginePod) -> EnginePod:
    """The pod, once its containers run again after the node was off."""

    def runs_again() -> bool:
        found = get("pod", pod.name, pod.namespace) or {"status": {}}
        states = found["status"].get("containerStatuses") or ()
        return any(each["restartCount"] > 0 and each["ready"] for each in states)

    eventually(runs_again, f"{pod.name} runs again", 120)
    found = get("pod", pod.name, pod.namespace)
    assert found is not None
    return EnginePod(pod.name, pod.namespace, found["status"]["podIP"])


def _await_alive(pods: dict[str, EnginePod], wanted: dict[str, int], lasting_s: float = 0.0) -> None:
    """Each agent takes so many for alive, itself included."""

    def alive() -> dict[str, float]:
        return {node: _alive(pod) for node, pod in pods.items()}

    eventually(lambda: alive() == wanted, f"members alive: {wanted}", NOTICED_DEADLINE_S, lasting_s, alive)


def _runs(pod: EnginePod) -> list[str]:
    """The agents that ran in the pod, by the lines that each writes at its start."""
    return [line for line in pod.log("kvpeer-agent", n_lines=-1).splitlines() if " of cluster " in line]


def _alive(pod: EnginePod) -> float:
    try:
        return pod.agent_metric("kvpeer_membership_members", state="alive")
    except OSError:
        return 0  # it does not listen yet
