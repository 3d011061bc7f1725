"""Machines are read from files as the kernel shows them, and planned as expected. The expected texts are what
`kvpeer doctor` prints; after a change that is meant, `PYTHONPATH=.. python -m machines` in runtime/tests writes them
anew."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.agent.sysfs import Tree, read_machine, tree
from kvpeer.agent.sysfs.tree import parse_numbers
from kvpeer.core.topology import NODE_UNKNOWN, Machine, PlanRequest, PortState, number_list, plan
from machines import SHAPES, expand, shape_text
from machines.expected import expected_text


def read(folder: Path, text: str) -> Machine:
    return read_machine(expand(text, folder))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_recorded_machine_is_planned_as_expected(shape: str, tmp_path: Path) -> None:
    assert expected_text(read(tmp_path, shape_text(shape))) == shape_text(shape, ".plan")


def test_at_least_six_shapes_are_recorded() -> None:
    assert len(SHAPES) >= 6


def test_a_container_without_devices_sees_them_in_sysfs_and_plans_none(tmp_path: Path) -> None:
    machine = read(tmp_path, shape_text("dgx_h100").replace("dev/infiniband", "elsewhere"))
    made = plan(machine, PlanRequest())
    assert len(machine.devices) == 8
    assert not made.rails
    assert "no_device_in_container" in [problem.name.value for problem in made.problems]


def test_a_device_in_software_has_no_place(tmp_path: Path) -> None:
    text = """
        sys/class/infiniband/rxe0/parent = eth0
        sys/class/infiniband/rxe0/ports/1/state = 4: ACTIVE
        sys/class/infiniband/rxe0/ports/1/link_layer = Ethernet
        sys/class/infiniband/rxe0/ports/1/rate = 2.5 Gb/sec (1X SDR)
        sys/class/infiniband/rxe0/ports/1/gids/1 = 0000:0000:0000:0000:0000:ffff:0a63:0001
        sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1 = RoCE v2
        sys/class/infiniband_verbs/uverbs0/ibdev = rxe0
        dev/infiniband/uverbs0 = x
    """
    (device,) = read(tmp_path, text).devices
    assert (device.name, device.driver, device.pci_path, device.node) == ("rxe0", "", (), NODE_UNKNOWN)
    (port,) = device.ports
    assert (port.rate_gbps, [str(gid) for gid in port.gids]) == (2.5, ["::ffff:10.99.0.1"])


@pytest.mark.parametrize(
    ("was", "becomes", "unread"),
    [
        ("0-23 128", "0-x 128", "/sys/devices/system/node/node0/cpulist"),
        ("allowed 0-47", "allowed 0-47;", "/proc/self/status"),
        ("4:~ACTIVE 200", "4:~ACTIVE many", "/sys/class/infiniband/mlx5_0/ports/1/rate"),
        ("9a03:9bff:fe66:0001 v1", "9a03:9bff:fe66 v1", "/sys/class/infiniband/mlx5_0/ports/1/gids/0"),
        ("0000:31:00.0 0 mlx5_core", "0000:31:00.0 none mlx5_core", "/sys/class/infiniband/mlx5_0/device/numa_node"),
    ],
    ids=["cpus", "cpuset", "rate", "address", "node"],
)
def test_a_file_that_makes_no_sense_is_named_and_the_rest_is_planned(
    was: str, becomes: str, unread: str, tmp_path: Path
) -> None:
    text = shape_text("single_nic")
    assert was in text
    machine = read(tmp_path, text.replace(was, becomes))
    assert machine.unread == (unread,)
    made = plan(machine, PlanRequest())
    assert made.problems[0].name.value == "sysfs_unreadable"
    assert len(made.ranks) == 2


@pytest.fixture(scope="module", params=["single_nic", "gb200"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = expand(shape_text(request.param), tmp_path_factory.mktemp(request.param))
    return root, sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


_CONTENTS = st.one_of(
    st.binary(max_size=40),
    st.text("0123456789-, :abf", max_size=20).map(str.encode),
    st.sampled_from([b"", b"-1", b"\xd9\xa3", b"9" * 30, b"0-70000", b"fe80::1%eth0", b"::ffff:1.2.3.4", b"4: ACTIVE"]),
)


@given(st.data())
def test_whatever_a_file_holds_there_is_a_machine_and_a_plan(
    files: tuple[Path, list[Path]], data: st.DataObject
) -> None:
    root, paths = files
    path = data.draw(st.sampled_from(paths))
    before = path.read_bytes()
    path.write_bytes(data.draw(_CONTENTS))
    try:
        machine = read_machine(root)
        expected_text(machine)
        assert set(plan(machine, PlanRequest()).pool_nodes) <= {node.number for node in machine.host_nodes}
    finally:
        path.write_bytes(before)


def test_folders_where_files_should_be_are_named(tmp_path: Path) -> None:
    machine = read(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/rate/\nsys/class/infiniband/mlx5_0/ports/1/state/")
    assert set(machine.unread) == {f"/sys/class/infiniband/mlx5_0/ports/1/{name}" for name in ("rate", "state")}
    assert machine.devices[0].ports[0].state is PortState.DOWN


def test_a_root_without_anything_is_a_machine_without_anything(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.nodes, machine.devices, machine.gpus, machine.unread) == ((), (), (), ())
    assert plan(machine, PlanRequest()).ranks[0].rail is None


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.cpus_allowed >= os.sched_getaffinity(0)
    assert machine.host_nodes
    assert machine.unread == ()


def test_nothing_is_read_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "ENTRIES_MAX", 3)
    monkeypatch.setattr(tree, "FILE_BYTES_MAX", 10)
    for idx in range(5):
        (tmp_path / f"file{idx}").write_text("x" * 100)
    files = Tree(tmp_path)
    assert files.text("file0") == "x" * 10
    assert len(files.names("")) == 3
    assert files.unread == ("/",)
    for idx in range(200):
        files.fault(str(idx))
    assert len(files.unread) == tree.UNREAD_MAX


def test_a_link_that_leads_round_in_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").symlink_to("device")
    began_at = time.monotonic()
    (device,) = read_machine(tmp_path).devices
    assert device.pci_path == ()
    assert time.monotonic() - began_at < 5


@given(st.frozensets(st.integers(0, 300)))
def test_lists_of_numbers_are_read_as_the_kernel_writes_them(numbers: frozenset[int]) -> None:
    assert parse_numbers(number_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["1-", "-1", "5-3", "a", "0-999999999", "1,,x", "1 2"])
def test_lists_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_numbers(text)
