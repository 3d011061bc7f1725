"""What the kernel is told of memory and threads, what it did, and what an agent makes of a refusal."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpeer.agent.config import load
from kvpeer.agent.numa import bind_memory, pages_by_node, refused_calls
from kvpeer.agent.placement import Placement
from kvpeer.core.topology import Plan
from kvpeer.metrics import build
from kvpeer.native import Pool
from machines import expand, shape_text
from prometheus_client import CollectorRegistry
from whole_agents import WholeAgent, with_agents

MIB = 1 << 20
NODE = int(min(name.name[4:] for name in Path("/sys/devices/system/node").glob("node[0-9]*")))
"""One that this machine has; tests do not depend on there being more."""

ELSEWHERE = 900
"""One that it does not have."""


needs_the_calls = pytest.mark.skipif(
    bool({"mbind", "move_pages"} & refused_calls()), reason="the container of these tests refuses them"
)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(4 * MIB, MIB, b"p" * 16) as pool:
        yield pool


def planned(nodes: tuple[int, ...] = (), cpus: tuple[int, ...] = ()) -> Plan:
    return Plan((), (), nodes, cpus, ())


def names(placement: Placement) -> list[str]:
    return [problem.name.value for problem in placement.problems]


def samples(placement: Placement) -> dict[str, float]:
    registry = CollectorRegistry()
    placement.observe(build(registry))
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.value and sample.name.startswith(("kvpeer_topology", "kvpeer_pool_numa")):
                found[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return found


@needs_the_calls
def test_the_pool_is_bound_and_its_pages_are_counted_where_they_came_to_lie(pool: Pool) -> None:
    placement = Placement(planned((NODE,)), is_on=True)
    placement.bind_pool(pool, 0)
    for extent in (0, 2):
        pool.touch_extent(extent)
        placement.extent_opened(extent)
    assert f"prefer:{NODE}" in policy_of(pool.payload_address)
    assert samples(placement) == {f"kvpeer_pool_numa_pages {NODE}": 2 * MIB / mmap.PAGESIZE}
    assert names(placement) == []


@needs_the_calls
def test_memory_of_several_nodes_is_asked_for_in_turn(pool: Pool) -> None:
    bind_memory(pool.payload_address, pool.payload_bytes, [NODE, ELSEWHERE])  # the kernel drops what it does not have
    assert f"interleave:{NODE}" in policy_of(pool.payload_address)


@needs_the_calls
def test_pages_that_were_never_touched_are_on_no_node(pool: Pool) -> None:
    assert sum(pages_by_node(pool.payload_address, MIB, mmap.PAGESIZE).values()) == 0
    pool.payload_view()[5 * mmap.PAGESIZE] = 1
    assert sum(pages_by_node(pool.payload_address, MIB, mmap.PAGESIZE).values()) == 1


@needs_the_calls
def test_a_pool_that_came_to_lie_elsewhere_is_a_problem_named_once(pool: Pool) -> None:
    placement = Placement(planned((ELSEWHERE,)), is_on=True)
    placement.bind_pool(pool, 0)
    for extent in (0, 1):
        pool.touch_extent(extent)
        placement.extent_opened(extent)
    # This kernel has no such node: it refuses to bind, and the pages are where the thread was.
    assert names(placement) == ["mbind_refused", "pool_on_other_node"]
    assert samples(placement) == {
        "kvpeer_topology_problems mbind_refused": 1,
        "kvpeer_topology_problems pool_on_other_node": 1,
        f"kvpeer_pool_numa_pages {NODE}": 2 * MIB / mmap.PAGESIZE,
    }


@needs_the_calls
def test_nothing_is_bound_when_it_is_switched_off_and_pages_are_counted_still(pool: Pool) -> None:
    placement = Placement(planned((NODE,), (0,)), is_on=False)
    placement.bind_pool(pool, 0)
    placement.pin_threads()
    pool.touch_extent(0)
    placement.extent_opened(0)
    assert "default" in policy_of(pool.payload_address)
    assert samples(placement) == {f"kvpeer_pool_numa_pages {NODE}": MIB / mmap.PAGESIZE}


def policy_of(address: int) -> str:
    """What the kernel says of a mapping of this process."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == address:
            return line.split()[1]
    raise AssertionError(f"{address:x} is not mapped")


def run_python(code: str, refused: str = "") -> str:
    """What the code prints in a process of its own, which cannot make the refused calls."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", code]
    if refused:
        command = [sys.executable, str(here / "seccomp.py"), refused, *command]
    path = os.pathsep.join([str(here.parents[1]), str(here), str(here.parent)])
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


PINNED = """
import os, threading
from kvpeer.agent.placement import Placement
from kvpeer.core.topology import Plan
from kvpeer.native import DataServer, Pool, ServerLimits
placement = Placement(Plan((), (), (), (min(os.sched_getaffinity(0)),), ()), is_on=True)
before = set(os.listdir("/proc/self/task"))
placement.pin_threads()
pool = Pool(1 << 20, 1 << 20, b"p" * 16)
server = DataServer(pool, "127.0.0.1", 0, ServerLimits(8, 8, 1000, 1000, 1000))
started = set(os.listdir("/proc/self/task")) - before
print(len(started), {len(os.sched_getaffinity(int(task))) for task in {*started, str(os.getpid())}})
print([problem.name.value for problem in placement.problems])
server.close()
"""


def test_threads_that_serve_inherit_the_cpus_of_the_plan() -> None:
    threads, found = run_python(PINNED).splitlines()
    assert (threads, found) == ("1 {1}", "[]")


REFUSED = """
from kvpeer.agent.numa import refused_calls
from kvpeer.agent.placement import Placement
from kvpeer.core.topology import Plan
from kvpeer.native import Pool
import os
print(sorted(refused_calls()))
placement = Placement(Plan((), (), (0,), (0,), ()), is_on=True)
placement.pin_threads()
pool = Pool(1 << 20, 1 << 20, b"p" * 16)
placement.bind_pool(pool, 0)
pool.touch_extent(0)
placement.extent_opened(0)
placement.extent_opened(0)
print([problem.name.value for problem in placement.problems])
"""


@needs_the_calls
@pytest.mark.parametrize(
    ("calls", "problems"),
    [
        ("mbind", ["mbind_refused"]),
        ("move_pages", ["move_pages_refused"]),
        ("sched_setaffinity", ["affinity_refused"]),
        ("mbind,move_pages,sched_setaffinity", ["affinity_refused", "mbind_refused", "move_pages_refused"]),
    ],
)
def test_what_seccomp_refuses_is_found_out_named_once_and_stops_nothing(calls: str, problems: list[str]) -> None:
    assert run_python(REFUSED, calls) == f"{sorted(calls.split(','))}\n{problems}\n"


def test_this_machine_refuses_what_it_refuses_without_a_filter() -> None:
    assert refused_calls() <= {"mbind", "move_pages", "sched_setaffinity"}


def test_the_settings_reach_the_planner(tmp_path: Path) -> None:
    root = expand(shape_text("dgx_h100"), tmp_path)
    env = {"DEVICES": "mlx5_6", "GPUS": "0000:9d:00.0", "RANKS": "2"}
    config = load(None, {f"KVPEER_TOPOLOGY_{key}": value for key, value in env.items()})
    made = Placement.of_machine(config, root).plan
    assert [rank.rail.device.name for rank in made.ranks if rank.rail] == ["mlx5_6", "mlx5_6"]


def test_the_log_says_what_was_planned_and_what_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvpeer.agent.placement")
    config = load(None, {"KVPEER_POOL_SIZE": "16Ti", "KVPEER_POOL_EXTENT_SIZE": "1Gi"})
    placement = Placement.of_machine(config, expand(shape_text("nic_down"), tmp_path))
    placement.log()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "rank 0: mlx5_0 port 1, gid 0 fe80::c42:a103:0:1, node 0"
    assert "the pool goes to nodes 0-1, threads to cpus 0-127" in lines
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = [line.partition(":")[0] for line in warnings]  # and what the machine of the test does not allow
    assert found[:2] == ["port_down", "no_subnet_manager"]
    assert "memory_limit_low" in found


@needs_the_calls
def test_an_agent_shows_where_its_pool_lies(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1)
        await agent.pool.ready()
        agent.agent._observer.observe()
        pages = agent.count("kvpeer_pool_numa_pages", node=str(NODE))
        assert pages >= MIB / mmap.PAGESIZE

    with_agents(tmp_path, "agent", scenario)
