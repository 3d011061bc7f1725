"""What the agent keeps of members that ended."""

from __future__ import annotations

from pathlib import Path

from link_nodes import until
from whole_agents import WholeAgent, with_agents

QUICK = {
    "membership.probe_interval": "50ms",
    "membership.probe_timeout": "50ms",
    "membership.indirect_timeout": "50ms",
    "membership.suspicion": "100ms",
    "membership.dead_probe_interval": "100ms",
}


def test_a_member_that_died_is_probed_and_nothing_is_kept_of_it_in_between(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent, dies: WholeAgent) -> None:
        await dies.agent._tasks.cancel(1.0)
        await dies.agent._links.close(1.0)
        await until(lambda: agent.n_members == 1)
        n_failures = agent.count("kvpeer_links_dial_failures_total")
        for more in (1, 2):
            await until(lambda more=more: agent.count("kvpeer_links_dial_failures_total") >= n_failures + more)
            await until(lambda: dies.id not in agent.agent._links._peers)

    with_agents(tmp_path, "agent dies", scenario, agent=QUICK, dies=QUICK)
