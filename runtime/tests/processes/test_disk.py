"""Real agents with a disk: evicted pages come back, kills tear nothing, and a broken disk is nobody's business."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes.agents import COMMAND, POLL_S, AgentProcess, Cluster, finds, publish_all
from processes.engine import PAGE_BYTES, Engine
from processes.handles import eventually

pytestmark = pytest.mark.process

N_SLOTS = 42  # of 96 KiB in the pool
SMALL_POOL = {"pool.size": "4Mi", "pool.extent_size": "4Mi", "pool.lease_ttl": "5ms"}
PAGES = range(20)
OTHERS = range(1000, 1000 + 2 * N_SLOTS)
"""They push everything else out of the pool."""


def disk_at(path: Path, size: str = "64Mi") -> dict[str, str]:
    return {
        **SMALL_POOL, "disk.path": str(path), "disk.size": size, "disk.segment_size": "8Mi", "disk.slow_after": "2s"
    }  # fmt: skip


def n_stored(agent: AgentProcess) -> float:
    return agent.metric("kvpeer_disk_pages")


def is_in(agent: AgentProcess, *conditions: str) -> None:
    eventually(
        lambda: any(agent.metric("kvpeer_disk_condition", condition=condition) for condition in conditions),
        poll_s=POLL_S,
    )


def publish(engine: Engine, numbers: range) -> None:
    """Chains of 20 pages, as the pool and the disk take them."""
    for first in range(numbers.start, numbers.stop, 20):
        publish_all(engine, range(first, min(first + 20, numbers.stop)))


def publish_evicted(agent: AgentProcess, engine: Engine, numbers: range = PAGES) -> None:
    """Publishes pages and pushes them out of the pool, after they were written to the disk."""
    before = n_stored(agent)
    publish(engine, numbers)
    eventually(lambda: n_stored(agent) >= before + len(numbers), poll_s=POLL_S)
    publish(engine, OTHERS)


def test_what_the_pool_evicted_is_read_from_the_disk_by_the_own_engine_and_by_a_peer(
    cluster: Cluster, tmp_path: Path
) -> None:
    a, b = cluster.launch("a", disk_at(tmp_path / "kv")), cluster.launch("b")
    for agent in (a, b):
        agent.wait_serving()
    cluster.wait_members()
    producer, reader = cluster.engine(a), cluster.engine(b)
    publish_evicted(a, producer)
    assert producer.locate(*PAGES) == [1] * len(PAGES)
    finds(reader, PAGES)
    assert reader.fetch(*PAGES) == ["HIT"] * len(PAGES)
    assert a.metric("kvpeer_disk_promoted_pages_total", outcome="hit", reader="peer") == len(PAGES)
    publish(producer, OTHERS)
    assert producer.fetch(*PAGES) == ["HIT"] * len(PAGES)
    eventually(lambda: a.metric("kvpeer_disk_read_bytes_total") >= len(PAGES) * PAGE_BYTES, poll_s=POLL_S)
    files = list((tmp_path / "kv").glob("*.pages"))
    assert {path.stat().st_size for path in files} == {8 << 20}


def test_after_a_restart_peers_and_the_own_engine_get_what_was_on_the_disk(cluster: Cluster, tmp_path: Path) -> None:
    a, b = cluster.launch("a", disk_at(tmp_path / "kv")).wait_serving(), cluster.launch("b").wait_serving()
    cluster.wait_members()
    producer = cluster.engine(a)
    publish(producer, PAGES)
    eventually(lambda: n_stored(a) == len(PAGES), poll_s=POLL_S)
    first_id = a.agent_id
    assert a.stop() == 0
    a.launch().wait_serving()
    assert a.agent_id != first_id
    cluster.wait_members()
    reader = cluster.engine(b)
    finds(reader, PAGES)
    assert reader.fetch(*PAGES) == ["HIT"] * len(PAGES), "before any engine came back to the producer"
    eventually(lambda: 0 not in producer.locate(*PAGES), poll_s=POLL_S)
    assert producer.fetch(*PAGES) == ["HIT"] * len(PAGES)


@pytest.mark.long
def test_an_agent_killed_while_it_writes_never_serves_a_torn_page(cluster: Cluster, tmp_path: Path) -> None:
    """Again and again: pages are published without a pause, the agent is killed, and all that the next run finds on
    the disk is fetched."""
    a = cluster.launch("a", disk_at(tmp_path / "kv", "32Mi")).wait_serving()
    n_read, n_torn = 0, 0.0
    for attempt in range(5):
        writing = _publishing(a, first=attempt * 10_000)
        eventually(lambda: a.metric("kvpeer_disk_written_bytes_total") > 40 * PAGE_BYTES, poll_s=POLL_S)
        a.kill()
        writing.kill()
        writing.communicate()
        a.launch().wait_serving()
        is_in(a, "ok")
        eventually(lambda: n_stored(a) > 0, poll_s=POLL_S)
        reader = cluster.engine(a)
        for first in range(attempt * 10_000, attempt * 10_000 + 600, 20):
            outcomes = reader.fetch(*range(first, first + 20))
            assert "WRONG" not in outcomes
            n_read += outcomes.count("HIT")
            if set(outcomes) == {"MISS"}:
                break  # that far it had not come
        n_torn += a.metric("kvpeer_disk_promoted_pages_total", outcome="stale", reader="own")
        assert a.metric("kvpeer_disk_corrupt_pages_total") == 0, "a torn page was never entered into the index"
    assert n_read > 100, "the disk was of use"
    print(f"{n_read} pages read after kills, {n_torn:.0f} rows whose page was not there")


PUBLISHER = """
import json, sys
from processes.engine import Engine
engine = Engine(**json.loads(sys.argv[1]))
number = int(sys.argv[2])
while True:
    engine.publish(*range(number, number + 10))
    number += 10
"""


def _publishing(agent: AgentProcess, first: int) -> subprocess.Popen[bytes]:
    runtime = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(runtime), str(runtime / "tests")])}
    command = [sys.executable, "-c", PUBLISHER, json.dumps({"socket": agent.socket}), str(first)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of its own with room for one segment."""
    path = tmp_path / "mounted"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", path], capture_output=True)
    if done.returncode:
        pytest.skip("mounting needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def is_serving_without_a_disk(agent: AgentProcess, engine: Engine, first: int) -> None:
    """Publishing and fetching from the pool go on, and the agent is healthy and alive."""
    numbers = range(first, first + 10)
    publish_all(engine, numbers)
    assert engine.fetch(*numbers) == ["HIT"] * 10
    assert agent.is_healthy
    assert "Traceback" not in agent.log


def test_a_full_disk_keeps_what_it_has_and_says_so(cluster: Cluster, small_disk: Path) -> None:
    a = cluster.launch("a", disk_at(small_disk / "kv")).wait_serving()
    engine = cluster.engine(a)
    publish(engine, range(0, 4 * N_SLOTS))
    is_in(a, "full")
    eventually(lambda: a.metric("kvpeer_disk_evicted_pages_total") + n_stored(a) > N_SLOTS, poll_s=POLL_S)
    is_serving_without_a_disk(a, engine, 5000)
    assert a.metric("kvpeer_disk_used_bytes") <= 8 << 20


def test_a_disk_without_any_room_is_no_disk_tier(cluster: Cluster, small_disk: Path) -> None:
    (small_disk / "others").write_bytes(bytes(10 << 20))
    a = cluster.launch("a", disk_at(small_disk / "kv")).wait_serving()
    is_in(a, "full")
    is_serving_without_a_disk(a, cluster.engine(a), 0)
    assert n_stored(a) == 0
    (small_disk / "others").unlink()
    is_in(a, "ok")


@pytest.mark.long
def test_a_disk_that_becomes_read_only_or_vanishes_is_given_up_and_taken_again(
    cluster: Cluster, small_disk: Path
) -> None:
    a = cluster.launch("a", disk_at(small_disk / "kv", "8Mi")).wait_serving()
    engine = cluster.engine(a)
    publish(engine, PAGES)
    eventually(lambda: n_stored(a) == len(PAGES), poll_s=POLL_S)
    (small_disk / "kv").rename(small_disk / "elsewhere")
    is_in(a, "vanished")
    is_serving_without_a_disk(a, engine, 5000)
    eventually(lambda: n_stored(a) == 0, poll_s=POLL_S)
    (small_disk / "kv").mkdir(exist_ok=True)
    is_in(a, "ok", "full")
    a.kill()  # its files are open for writing: only then can the file system become read-only
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    a.launch().wait_serving()
    is_in(a, "read_only")
    is_serving_without_a_disk(a, cluster.engine(a), 6000)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    is_in(a, "ok", "full")


SLOW_AGENT = """
import sys, time
from pathlib import Path
from kvpeer.cli.command import main
from kvpeer.storage.segment_files import SegmentFiles
sync = SegmentFiles.sync
def slow_sync(self, number):
    while Path(self._folder).with_suffix(".hangs").exists():
        time.sleep(0.01)
    sync(self, number)
SegmentFiles.sync = slow_sync
sys.exit(main(["agent"]))
"""


@pytest.mark.long
def test_a_disk_that_hangs_stalls_no_publish_and_no_stop(cluster: Cluster, tmp_path: Path) -> None:
    a = cluster.launch("a", disk_at(tmp_path / "kv"), (COMMAND[0], "-c", SLOW_AGENT)).wait_serving()
    engine = cluster.engine(a)
    is_in(a, "ok")
    (tmp_path / "kv.hangs").touch()
    publish(engine, PAGES)
    is_in(a, "slow")
    is_serving_without_a_disk(a, engine, 5000)
    (tmp_path / "kv.hangs").unlink()
    is_in(a, "ok")
    (tmp_path / "kv.hangs").touch()
    publish(engine, OTHERS)
    a.signal(signal.SIGTERM)
    assert a.process is not None
    assert a.process.wait(15) == 0


def test_two_agents_never_share_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    a, b = (cluster.launch(name, disk_at(tmp_path / "kv")) for name in ("a", "b"))
    for agent in (a, b):
        agent.wait_serving()
    eventually(
        lambda: (
            {a.metric("kvpeer_disk_condition", condition="ok"), b.metric("kvpeer_disk_condition", condition="ok")}
            == {0.0, 1.0}
        ),
        poll_s=POLL_S,
    )
    first, second = (a, b) if a.metric("kvpeer_disk_condition", condition="ok") else (b, a)
    is_in(second, "locked")
    first.kill()
    is_in(second, "ok")
