"""What a cluster promises about its view, in virtual time under seeds: detection, no false deaths, healing."""

from __future__ import annotations

import pytest
from kvpeer.core.membership import MembershipSettings
from simulated.membership_cluster import Cluster, Node

pytestmark = pytest.mark.long

N = 64
KILLED_KNOWN_S = 2.0
FROZEN_KNOWN_S = 5.0
LOSSES = [0.01, 0.02, 0.05]


def settled(n: int, seed: int, loss: float, settings: MembershipSettings | None = None) -> Cluster:
    cluster = Cluster(n, seed, loss, settings)
    assert cluster.run(10.0, cluster.agrees) is not None, f"seed {seed}: the agents did not find each other"
    cluster.run(2.0)
    return cluster


def deaths_seen(cluster: Cluster) -> set[bytes]:
    return {agent_id for node in cluster.nodes.values() for _, agent_id in node.ended}


def id_of(node: Node) -> bytes:
    return node.info.agent_id


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("n_links", [N - 1, 3, 0])
def test_a_killed_agent_is_known_dead_to_all_in_two_seconds_and_nobody_else_is(seed: int, loss: float, n_links: int):
    cluster = settled(N, seed, loss)
    killed, *others = cluster.rng.sample(cluster.running(), N)
    cluster.kill(killed, others[:n_links])
    took = cluster.run(10.0, lambda: cluster.forgot(killed))
    # Who holds no link learns from gossip, or from the refused connection of its next ping.
    assert took is not None
    assert took <= KILLED_KNOWN_S, f"seed {seed}"
    cluster.run(5.0)
    assert deaths_seen(cluster) == {id_of(killed)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", LOSSES)
def test_a_frozen_agent_is_known_dead_to_all_in_five_seconds(seed: int, loss: float):
    cluster = settled(N, seed, loss)
    frozen = cluster.rng.choice(cluster.running())
    cluster.freeze(frozen)
    took = cluster.run(10.0, lambda: cluster.forgot(frozen))
    assert took is not None
    assert took <= FROZEN_KNOWN_S, f"seed {seed}"
    assert deaths_seen(cluster) == {id_of(frozen)}


@pytest.mark.parametrize("seed", range(2))
def test_a_thawed_agent_comes_back_and_buries_nobody(seed: int):
    cluster = settled(N, seed, 0.02)
    frozen = cluster.rng.choice(cluster.running())
    cluster.freeze(frozen)
    cluster.run(20.0)
    assert cluster.forgot(frozen)
    cluster.thaw(frozen)
    assert cluster.run(5.0, cluster.agrees) is not None, f"seed {seed}"
    cluster.run(10.0)
    assert cluster.agrees()
    assert deaths_seen(cluster) == {id_of(frozen)}


def test_an_agent_that_stalls_for_a_moment_buries_nobody_and_is_not_buried():
    cluster = settled(16, 7, 0.0)
    stalled = cluster.running()[5]
    for _ in range(20):
        cluster.freeze(stalled)
        cluster.run(1.0)
        cluster.thaw(stalled)
        cluster.run(1.0)
    assert deaths_seen(cluster) == set()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("loss", "duration_s"), [(0.05, 60.0), (0.02, 600.0)])
def test_no_false_death_under_loss(loss: float, duration_s: float):
    cluster = settled(N, 1, loss)
    cluster.run(duration_s)
    assert deaths_seen(cluster) == set()
    assert cluster.agrees()
    assert sum(node.machine.n_refutations for node in cluster.running()) > 0, "the loss was too kind to prove anything"


def test_an_idle_agent_sends_few_messages():
    cluster = settled(N, 2, 0.0)
    before = cluster.n_sent
    cluster.run(20.0)
    assert (cluster.n_sent - before) / 20.0 / N < 15.0


@pytest.mark.parametrize("seed", range(2))
def test_links_that_break_between_live_agents_kill_nobody(seed: int):
    cluster = settled(N, seed, 0.05)
    for _ in range(100):
        holder, other = cluster.rng.sample(cluster.running(), 2)
        cluster.act(holder, holder.machine.evidence_of_death(other.machine.agent_id, cluster.now))
        cluster.run(0.1)
    cluster.run(5.0)
    assert deaths_seen(cluster) == set()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "duration_s", [3.0, 30.0, 400.0], ids=["while suspected", "while remembered", "longer than the dead are remembered"]
)
def test_a_partition_that_heals_reconverges_by_itself(seed: int, duration_s: float):
    cluster = settled(24, seed, 0.02)
    for place, node in enumerate(cluster.nodes.values()):
        node.side = place % 2
    cluster.run(duration_s)
    if duration_s > FROZEN_KNOWN_S:
        assert all(len(node.alive) == 12 for node in cluster.running()), "the partition went unnoticed"
    for node in cluster.nodes.values():
        node.side = 0
    assert cluster.run(30.0, cluster.agrees) is not None, f"seed {seed}"
    n_seen = sum(len(node.ended) for node in cluster.nodes.values())
    cluster.run(30.0)
    assert cluster.agrees()
    assert sum(len(node.ended) for node in cluster.nodes.values()) == n_seen, "somebody was buried after the healing"


def test_an_isolated_agent_rejoins_after_everybody_has_forgotten_it():
    settings = MembershipSettings(forget_s=20.0)
    cluster = settled(8, 3, 0.02, settings)
    isolated = cluster.running()[6]
    isolated.side = 1
    cluster.run(120.0)
    assert isolated.alive == {id_of(isolated)}
    assert isolated.info not in [update.info for update in cluster.running()[0].machine.view()]
    isolated.side = 0
    assert cluster.run(settings.seed_interval_s * 2, cluster.agrees) is not None


def test_a_dead_agent_never_comes_back_by_old_rumours():
    cluster = settled(16, 4, 0.02)
    killed, sleeper = cluster.running()[5:7]
    cluster.freeze(sleeper)  # it will wake with a view in which `killed` is alive
    cluster.run(1.0)
    cluster.kill(killed, cluster.running())
    cluster.run(cluster.settings.forget_s + 20.0)
    awake = cluster.running()
    cluster.thaw(sleeper)
    for _ in range(600):
        cluster.run(0.1)
        assert all(id_of(killed) not in node.alive for node in awake)
    assert cluster.agrees()


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_agents_that_start_together_find_each_other(loss: float):
    cluster = Cluster(N, 11, loss)
    took = cluster.run(10.0, cluster.agrees)
    assert took is not None
    assert took < 5.0


def test_a_restarted_agent_replaces_its_predecessor_at_once():
    cluster = settled(16, 5, 0.02)
    old = cluster.running()[8]
    old.is_running = False  # nobody held a link
    cluster.start(old.info.control_port - 7000)
    assert cluster.run(1.0, cluster.agrees) is not None


def test_an_agent_that_leaves_is_gone_at_once_and_for_good():
    cluster = settled(N, 6, 0.05)
    leaver = cluster.running()[10]
    cluster.act(leaver, leaver.machine.leave(cluster.now))
    took = cluster.run(2.0, lambda: all(id_of(leaver) not in n.alive for n in cluster.running() if n is not leaver))
    assert took is not None
    assert took < 1.0
    leaver.is_running = False
    cluster.run(30.0)
    assert cluster.agrees()


def test_a_draining_agent_is_seen_draining_by_all_and_stays_alive():
    cluster = settled(N, 6, 0.05)
    drained = cluster.running()[10]
    cluster.act(drained, drained.machine.drain(cluster.now))
    took = cluster.run(2.0, lambda: all(n.draining == (drained.machine.agent_id,) for n in cluster.running()))
    assert took is not None
    assert took < 1.0
    assert cluster.agrees()
