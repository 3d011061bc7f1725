"""kvpeer beside other systems: who is held against whom, that wrong bytes are noticed, and that nobody is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kvpeer.bench import Budget
from kvpeer.bench.peers.catalogue import CANDIDATES, chosen
from kvpeer.bench.peers.compare import PAGE_BYTES, SHAPES, comparisons, run
from kvpeer.bench.peers.pages import PageMemory
from kvpeer.bench.peers.perftest import read_bandwidth
from kvpeer.bench.peers.processes import RunningSystem
from kvpeer.bench.peers.rdma import missing_rdma
from kvpeer.bench.peers.report import Report, bandwidths, matrix
from kvpeer.bench.peers.system import Serving, SystemFailedError, Way
from kvpeer.model import ConfigError

RUNTIME = Path(__file__).parents[2]

WAYS = {candidate.name: candidate.way for candidate in CANDIDATES}


# ---- what is compared


@pytest.mark.parametrize("way", [Way.TCP, Way.RDMA], ids=lambda way: way.value)
def test_kvpeer_is_held_against_every_other_system_of_its_way_in_every_shape(way):
    own = f"kvpeer.{ {Way.TCP: 'tcp', Way.RDMA: 'verbs'}[way] }"
    others = {name for name, of in WAYS.items() if of is way and not name.startswith("kvpeer.")}
    rows = [row for row in comparisons(PAGE_BYTES[0], WAYS) if row.name.startswith(f"peers.{own}")]
    for shape in SHAPES:
        beside = {row.reference_name for row in rows if row.name.startswith(f"peers.{own}{shape.suffix}.beside.")}
        assert beside == others
    assert all(Budget.parse(row.budget).subject == "ratio" for row in rows if row.budget)


def test_several_readers_are_held_against_one():
    together = {row.name: row.budget for row in comparisons(PAGE_BYTES[0], WAYS) if row.name.endswith(".together")}
    assert together["peers.kvpeer.tcp.together"] == "ratio >= 1"
    assert together["peers.kvpeer.tcp.4_processes.together"] == "ratio >= 1"


def test_a_name_that_is_no_systems_is_said_with_the_names_that_are():
    with pytest.raises(ConfigError, match=r"--only kvpeer\.carrier_pigeon: there are memcpy, .*kvpeer\.verbs"):
        chosen(["kvpeer.carrier_pigeon"])


# ---- who ran


@dataclass
class Made:
    """A candidate whose turns are made up. failing_turn: the one in which it fails."""

    name: str
    way: Way = Way.TCP
    reason: str | None = None
    failing_turn: int | None = None

    def missing(self) -> str | None:
        return self.reason

    def start(self, page_bytes: int) -> Made:
        if self.failing_turn == 0:
            raise SystemFailedError(self.name, "does not start")
        return self

    def bandwidth(self, n_processes: int, n_threads: int) -> Callable[[], float]:
        return self._turn

    def _turn(self) -> float:
        if self.failing_turn is not None:
            self.failing_turn -= 1
            if self.failing_turn <= 0:
                raise SystemFailedError(self.name, "broke")
        return 1.0

    def close(self) -> None:
        pass


def measured(*candidates: Made) -> Report:
    return run(candidates, lambda _: None, is_quick=True)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Made("other.tcp", reason="not installed"), "not installed"),
        (Made("other.tcp", failing_turn=0), "does not start"),
        (Made("other.tcp", failing_turn=5), "broke"),
        (Made("other.tcp", failing_turn=20), "broke"),
    ],
    ids=["absent", "not starting", "failing with the first pages", "failing with the second pages"],
)
def test_a_system_that_cannot_run_is_told_with_the_reason_and_the_others_are_measured(other, reason):
    report = measured(Made("kvpeer.tcp"), other)
    assert [(system.name, system.reason) for system in report.not_run] == [("other.tcp", reason)]
    assert set(bandwidths(report.rows)) == {"kvpeer.tcp"}
    assert not any("other" in row.name for row in report.rows)
    assert len(bandwidths(report.rows)["kvpeer.tcp"]) == len(PAGE_BYTES) * len(SHAPES)
    assert f"other.tcp: not run: {reason}" in matrix(report)


def test_the_table_has_a_line_for_each_system_and_a_column_for_each_shape():
    head, _, *lines = matrix(measured(Made("kvpeer.tcp"), Made("other.tcp"))).splitlines()
    assert head.count("|") == 2 + len(PAGE_BYTES) * len(SHAPES)
    assert [line.split(" | ")[0] for line in lines if line] == ["| kvpeer.tcp", "| other.tcp"]
    assert lines[0].count("1.00 (1.00-1.00)") == len(PAGE_BYTES) * len(SHAPES)


# ---- bytes


def test_a_page_that_was_not_written_since_it_was_spoilt_is_wrong():
    memory = PageMemory(1 << 20)
    memory.fill()
    pages = np.arange(4, dtype=np.int64)
    assert memory.n_wrong(pages, pages) == 0
    memory.spoil(pages[:2])
    assert memory.n_wrong(pages, pages) == 2
    assert memory.n_wrong(pages, pages[::-1]) == 4


@dataclass(frozen=True)
class Lazy:
    """Says that it read, and did not."""

    name: str = "lazy"
    way: Way = Way.MEMORY

    @contextmanager
    def serve(self, memory: PageMemory):
        yield Serving(None)

    def connect(self, serving: object, memory: PageMemory, number: int) -> Lazy:
        return self

    def move(self, thread: int, pages: object, slots: object) -> Callable[[], None]:
        return lambda: None


class Dying(Lazy):
    """Ends its process."""

    def connect(self, serving: object, memory: PageMemory, number: int) -> Lazy:
        os.write(2, b"some log\nthis is why\n")
        os._exit(7)


@pytest.mark.parametrize(
    ("system", "reason"),
    [(Lazy(), "32 of 32 pages have wrong bytes"), (Dying(), r"a process ended with 7 \(this is why\)")],
    ids=["wrong bytes", "dies"],
)
def test_a_system_that_brings_wrong_bytes_or_dies_does_not_run(system, reason):
    with pytest.raises(SystemFailedError, match=reason):
        RunningSystem(system, PAGE_BYTES[1])


def test_the_average_is_taken_from_what_ib_read_bw_prints():
    printed = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 131072     1000             97.10              96.00              0.091
---------------------------------------------------------------------------------------
"""
    assert read_bandwidth(printed) == 12.0
    with pytest.raises(SystemFailedError, match="printed no bandwidth: Couldn't"):
        read_bandwidth("Couldn't connect")


# ---- the command


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(RUNTIME)}
    command = [sys.executable, "-m", "kvpeer.cli", "bench", "peers", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.skipif(missing_rdma() is None, reason="there is an RDMA device")
def test_without_an_rdma_device_its_systems_are_listed_as_not_run(tmp_path):
    file = tmp_path / "report.json"
    done = bench("--quick", "--json", str(file), *(f"--only={name}" for name, way in WAYS.items() if way is Way.RDMA))
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert {system.name for system in report.not_run} == {name for name, way in WAYS.items() if way is Way.RDMA}
    assert "kvpeer.verbs: not run: no RDMA device" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_quick_run_measures_what_is_there_and_writes_what_it_prints(tmp_path):
    file, names = tmp_path / "report.json", ("kvpeer.shm", "kvpeer.tcp")
    done = bench("--quick", "--json", str(file), *(f"--only={name}" for name in names))
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    by_system = bandwidths(report.rows)
    assert tuple(by_system) == names
    assert all(row.value > 0 for rows in by_system.values() for row in rows.values())
    assert report.not_run == []
    assert matrix(report) in done.stdout
