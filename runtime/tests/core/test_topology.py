"""The planner's promises, on machines that are made up, not read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.core.topology import (
    FIXES,
    NODE_UNKNOWN,
    Gid,
    GidKind,
    Gpu,
    HostFacts,
    LinkLayer,
    Machine,
    Node,
    Plan,
    PlanRequest,
    PoolNeeds,
    Port,
    PortState,
    ProblemName,
    Proximity,
    RdmaDevice,
    Severity,
    judge,
    natural,
    plan,
)

V4 = "::ffff:10.0.0."
LOCAL = "fe80::9a03:9bff:fe66:"


def gid(index: int, address: str, kind: GidKind = GidKind.ROCE_V2, netdev: str = "eth1") -> Gid:
    return Gid(index, IPv6Address(address), kind, netdev)


def roce(*gids: Gid, state: PortState = PortState.ACTIVE, rate: float = 200, mtu: int = 9000, number: int = 1) -> Port:
    return Port(number, state, LinkLayer.ETHERNET, rate, gids or (gid(3, V4 + "1"),), mtu)


def infiniband(rate: float = 400, state: PortState = PortState.ACTIVE) -> Port:
    return Port(1, state, LinkLayer.INFINIBAND, rate, (gid(0, LOCAL + "1", GidKind.INFINIBAND, ""),))


def nic(name: str, *ports: Port, node: int = 0, path: tuple[str, ...] = (), **changes: object) -> RdmaDevice:
    device = RdmaDevice(name, "mlx5_core", path, node, "uverbs0", True, True, False, ports or (roce(),))
    return dataclasses.replace(device, **changes)


def gpu(number: int, node: int = 0, path: tuple[str, ...] = (), is_visible: bool = True) -> Gpu:
    return Gpu(f"0000:{number:02x}:00.0", path, node, is_visible)


NODES = (Node(0, frozenset(range(8)), 1 << 38, (10, 21)), Node(1, frozenset(range(8, 16)), 1 << 38, (21, 10)))


def machine(*devices: RdmaDevice, gpus: tuple[Gpu, ...] = (), **changes: object) -> Machine:
    whole = Machine(NODES, devices, gpus, frozenset(range(16)), frozenset({0, 1}), frozenset({"eth1"}))
    return dataclasses.replace(whole, **changes)


def planned(whole: Machine, **request: object) -> Plan:
    return plan(whole, PlanRequest(**request))  # type: ignore[arg-type]


def named(made: Plan) -> dict[str, tuple[str, ...]]:
    return {problem.name.value: problem.subjects for problem in made.problems}


def nics(made: Plan) -> list[str]:
    return [rank.rail.device.name if rank.rail else "" for rank in made.ranks]


# ---- addresses


@pytest.mark.parametrize(
    ("gids", "index", "problem"),
    [
        ([gid(0, LOCAL + "1"), gid(1, "2001:db8::1"), gid(2, V4 + "1")], 2, None),
        ([gid(0, LOCAL + "1"), gid(1, "2001:db8::1")], 1, None),
        ([gid(0, V4 + "1", GidKind.ROCE_V1), gid(1, "2001:db8::1")], 1, None),
        ([gid(1, V4 + "1"), gid(5, V4 + "2")], 1, None),
        ([gid(1, V4 + "1", netdev="elsewhere"), gid(5, "2001:db8::1")], 5, None),
        ([gid(1, V4 + "1", netdev="elsewhere")], 1, None),
        ([gid(1, V4 + "1", netdev=""), gid(5, V4 + "2")], 1, None),
        ([gid(0, LOCAL + "1", GidKind.ROCE_V1), gid(1, V4 + "1", GidKind.ROCE_V1)], 1, "roce_v1_only"),
    ],
    ids=["IPv4", "IPv6", "v2 before IPv4", "lowest", "own namespace", "foreign if alone", "no interface", "v1 only"],
)
def test_a_roce_port_uses_the_address_that_reaches_farthest(gids: list[Gid], index: int, problem: str | None) -> None:
    made = planned(machine(nic("a", roce(*gids))))
    assert [rail.gid.index for rail in made.rails] == [index]
    assert list(named(made)) == ([problem] if problem else [])


def test_a_link_local_roce_address_is_never_used_and_on_infiniband_it_is_the_usual_one() -> None:
    made = planned(machine(nic("a", roce(gid(0, LOCAL + "1"), gid(1, LOCAL + "1", GidKind.ROCE_V1)))))
    assert (made.rails, named(made)) == ((), {"gid_link_local_only": ("a port 1",)})
    made = planned(machine(nic("a", infiniband())))
    assert ([rail.gid.index for rail in made.rails], named(made)) == ([0], {})


# ---- ports


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        (nic("a", is_visible=False), "device_not_in_container"),
        (nic("a", is_openable=False), "device_refused"),
        (nic("a", driver="efa"), "efa_needs_nixl"),
        (nic("a", roce(state=PortState.DOWN)), "port_down"),
        (nic("a", infiniband(state=PortState.INITIALIZING)), "no_subnet_manager"),
        (nic("a", roce(state=PortState.INITIALIZING)), "port_down"),
        (nic("a", dataclasses.replace(roce(), gids=())), "gid_missing"),
        (nic("a", dataclasses.replace(infiniband(), gids=())), "gid_missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_nic_that_cannot_be_used_is_named_and_another_one_serves(device: RdmaDevice, problem: str) -> None:
    made = planned(machine(device, nic("b")))
    assert nics(made) == ["b"]
    subject = "a" if problem in ("device_not_in_container", "device_refused", "efa_needs_nixl") else "a port 1"
    assert named(made) == {problem: (subject,)}
    assert nics(planned(machine(device))) == [""]


def test_a_second_port_without_a_link_is_no_problem() -> None:
    made = planned(machine(nic("a", roce(), roce(state=PortState.DOWN, number=2))))
    assert (named(made), made.is_sound) == ({"other_port_down": ("a port 2",)}, True)


def test_two_usable_ports_of_a_device_are_two_rails() -> None:
    made = planned(machine(nic("a", roce(), roce(number=2))), n_ranks=2)
    assert [rank.rail.name for rank in made.ranks if rank.rail] == ["a port 1", "a port 2"]


def test_a_port_of_less_than_half_the_rate_is_left_out_and_one_of_half_is_not() -> None:
    made = planned(machine(nic("a", roce(rate=400)), nic("b", roce(rate=200)), nic("c", roce(rate=100))))
    assert [rail.device.name for rail in made.rails] == ["a", "b"]
    assert named(made) == {"slow_nic_left_out": ("c port 1",)}


def test_only_the_fabric_with_more_bandwidth_in_sum_is_used() -> None:
    three = [nic(name, roce(rate=200)) for name in "abc"]
    made = planned(machine(*three, nic("d", infiniband(400))))
    assert ([rail.device.name for rail in made.rails], named(made)) == (
        ["a", "b", "c"],
        {"other_fabric_left_out": ("d port 1",)},
    )
    made = planned(machine(*three[:2], nic("d", infiniband(400))))
    assert [rail.device.name for rail in made.rails] == ["d"]


def test_ports_of_roce_v1_are_left_out_where_others_have_v2() -> None:
    old = roce(gid(1, V4 + "1", GidKind.ROCE_V1), rate=400)
    made = planned(machine(nic("a", old), nic("b", roce(rate=200))))
    assert [rail.device.name for rail in made.rails] == ["b"]
    assert named(made) == {"roce_v1_only": ("a port 1",), "other_fabric_left_out": ("a port 1",)}


def test_a_small_mtu_is_noted_on_roce_alone() -> None:
    assert named(planned(machine(nic("a", roce(mtu=4199))))) == {"mtu_small": ("a port 1",)}
    assert named(planned(machine(nic("a", roce(mtu=4200))))) == {}
    assert named(planned(machine(nic("a", roce(mtu=0))))) == {}


def test_devices_that_are_named_are_the_only_ones() -> None:
    whole = machine(nic("a"), nic("b", is_visible=False), nic("c"))
    made = planned(whole, devices=("c", "x"))
    assert ([rail.device.name for rail in made.rails], named(made)) == (["c"], {"device_unknown": ("x",)})


def test_a_container_without_any_of_the_devices_is_told_apart_from_one_with_some() -> None:
    hidden = nic("a", is_visible=False)
    none = planned(machine(hidden))
    assert named(none) == {"no_device_in_container": ("container",), "device_not_in_container": ("a",)}
    assert none.is_sound
    assert not planned(machine(hidden), requires_rdma=True).is_sound
    some = planned(machine(hidden, nic("b")), requires_rdma=True)
    assert (named(some), some.is_sound) == ({"device_not_in_container": ("a",)}, True)


@pytest.mark.parametrize("devices", [(), (nic("a", driver="efa"),)], ids=["no RDMA", "EFA"])
def test_a_machine_that_cannot_do_rdma_is_sound_unless_rdma_is_required(devices: tuple[RdmaDevice, ...]) -> None:
    assert planned(machine(*devices)).is_sound
    assert not planned(machine(*devices), requires_rdma=True).is_sound


# ---- ranks


def test_a_rank_gets_the_nic_below_its_own_switch_before_one_on_its_node_before_another_node() -> None:
    switch, other = ("pci0000:10", "0000:10:01.0", "0000:11:00.0"), ("pci0000:20", "0000:20:01.0")
    far, near, nearest = nic("a", node=1, path=("pci0000:90", "x")), nic("b", path=other), nic("c", path=(*switch, "n"))
    port, root = nic("e", path=("pci0000:10", "0000:10:01.0")), nic("d", path=("pci0000:10", "0000:10:02.0"))
    one = gpu(1, path=(*switch, "g"))
    order = [
        ("c", Proximity.BRIDGE),
        ("e", Proximity.BRIDGE),
        ("d", Proximity.ROOT),
        ("b", Proximity.NODE),
        ("a", Proximity.OTHER_NODE),
    ]
    left = [far, near, root, port, nearest]
    for name, proximity in order:
        (rank,) = planned(machine(*left, gpus=(one,))).ranks
        assert rank.rail is not None
        assert (rank.rail.device.name, rank.proximity) == (name, proximity)
        left = [device for device in left if device.name != name]


def test_nics_are_shared_evenly_even_where_one_is_nearer_to_all() -> None:
    gpus = tuple(gpu(number, 0) for number in range(4))
    made = planned(machine(nic("a", node=0), nic("b", node=1), nic("c", node=1), gpus=gpus))
    assert nics(made) == ["a", "a", "b", "c"]


def test_ranks_are_the_gpus_of_the_container_in_the_order_of_their_addresses() -> None:
    whole = machine(nic("a"), gpus=(gpu(0x60), gpu(0x9D, 1), gpu(0x1B), gpu(0x20, is_visible=False)))
    addresses = [rank.gpu.address for rank in planned(whole).ranks if rank.gpu]
    assert addresses == ["0000:1b:00.0", "0000:60:00.0", "0000:9d:00.0"]


def test_gpus_that_are_named_are_the_ranks_in_that_order_whatever_is_visible() -> None:
    whole = machine(nic("a"), gpus=(gpu(0x1B, is_visible=False), gpu(0x9D, 1, is_visible=False)))
    made = planned(whole, gpus=("0000:9D:00.0", "0000:1b:00.0", "0000:ff:00.0"))
    assert [rank.gpu.address for rank in made.ranks if rank.gpu] == ["0000:9d:00.0", "0000:1b:00.0"]
    assert named(made)["gpu_unknown"] == ("0000:ff:00.0",)
    assert made.pool_nodes == (0, 1)


def test_a_rank_without_a_gpu_gets_a_nic_near_the_cpus_of_the_container() -> None:
    whole = machine(nic("a", node=0), nic("b", node=1), cpus_allowed=frozenset({9}))
    assert nics(planned(whole)) == ["b"]


def test_a_nic_on_another_node_is_noted_by_rank() -> None:
    whole = machine(nic("a", node=0), gpus=(gpu(1, 0), gpu(2, 1)))
    made = planned(whole)
    assert (named(made), made.is_sound) == ({"nic_on_other_node": ("rank 1",)}, True)


# ---- pool and threads


def test_the_pool_lies_on_the_nodes_of_all_ranks_and_its_threads_run_there() -> None:
    both = planned(machine(nic("a", node=0), gpus=(gpu(1, 0), gpu(2, 1))))
    assert (both.pool_nodes, both.cpus) == ((0, 1), tuple(range(16)))
    one = planned(machine(nic("a", node=0), gpus=(gpu(2, 1),)))
    assert (one.pool_nodes, one.cpus) == ((1,), tuple(range(8, 16)))


def test_without_gpus_the_pool_lies_on_the_nodes_of_the_rails() -> None:
    made = planned(machine(nic("a", node=1)))
    assert (made.pool_nodes, made.cpus) == ((1,), tuple(range(8, 16)))


def test_nothing_is_bound_where_there_is_nothing_to_choose() -> None:
    for whole in (
        machine(nic("a"), nodes=NODES[:1]),
        machine(),
        machine(nic("a", node=NODE_UNKNOWN)),
        machine(nic("a"), nodes=()),
    ):
        made = planned(whole)
        assert (made.pool_nodes, made.cpus) == ((), ())


def test_memory_of_gpus_is_no_place_for_the_pool() -> None:
    nodes = (*NODES, Node(2, frozenset(), 1 << 37))
    assert planned(machine(nic("a", node=2), nodes=nodes)).pool_nodes == ()


def test_threads_stay_within_the_cpuset_and_none_near_is_a_problem() -> None:
    made = planned(machine(nic("a"), cpus_allowed=frozenset({3, 4, 9})))
    assert (made.cpus, named(made)) == ((3, 4), {})
    made = planned(machine(nic("a"), cpus_allowed=frozenset({9})))
    assert (made.cpus, named(made)) == ((), {"no_cpu_near": ("node 0",)})


def test_a_node_that_the_cpuset_forbids_is_left_out_and_named() -> None:
    made = planned(machine(nic("a"), gpus=(gpu(1, 0), gpu(2, 1)), nodes_allowed=frozenset({1})))
    assert (made.pool_nodes, made.cpus) == ((1,), tuple(range(8, 16)))
    assert named(made)["memory_node_forbidden"] == ("node 0",)


# ---- whatever the machine is like

_GIDS = st.lists(
    st.builds(
        gid,
        st.integers(0, 15),
        st.sampled_from([LOCAL + "1", V4 + "1", "2001:db8::1"]),
        st.sampled_from(list(GidKind)),
        st.sampled_from(["", "eth1", "elsewhere"]),
    ),
    max_size=3,
    unique_by=lambda each: each.index,
)
_PORTS = st.builds(
    lambda state, layer, rate, gids: Port(1, state, layer, rate, tuple(gids), 9000),
    st.sampled_from([PortState.ACTIVE, *PortState]),
    st.sampled_from(LinkLayer),
    st.sampled_from([0.0, 100.0, 200.0, 400.0]),
    _GIDS,
)
_PATHS = st.sampled_from([(), ("pci0000:10", "x", "y"), ("pci0000:10", "x", "z"), ("pci0000:20", "x")])
_NICS = st.builds(
    lambda port, node, path, seen, opens, driver: nic(
        "", port, node=node, path=path, is_visible=seen, is_openable=opens, driver=driver
    ),
    _PORTS,
    st.integers(-1, 2),
    _PATHS,
    st.sampled_from([True, True, False]),
    st.sampled_from([True, True, False]),
    st.sampled_from(["mlx5_core", "mlx5_core", "efa"]),
)
_MACHINES = st.builds(
    lambda devices, gpus, cpus, nodes: machine(
        *(dataclasses.replace(device, name=f"nic{idx}") for idx, device in enumerate(devices)),
        gpus=tuple(gpu(idx, node, path, seen) for idx, (node, path, seen) in enumerate(gpus)),
        cpus_allowed=cpus,
        nodes_allowed=nodes,
    ),
    st.lists(_NICS, max_size=6),
    st.lists(st.tuples(st.integers(-1, 2), _PATHS, st.booleans()), max_size=9),
    st.frozensets(st.integers(0, 15)),
    st.frozensets(st.integers(0, 1)),
)


@given(_MACHINES, st.integers(0, 9))
def test_every_rank_has_a_rail_if_any_is_usable_and_they_are_shared_evenly(whole: Machine, n_ranks: int) -> None:
    made = planned(whole, n_ranks=n_ranks)
    served = Counter(rank.rail.name for rank in made.ranks if rank.rail is not None)
    n_of_each = [served[rail.name] for rail in made.rails]
    assert sum(n_of_each) == (len(made.ranks) if made.rails else 0)
    assert max(n_of_each, default=0) - min(n_of_each, default=0) <= 1
    assert [rank.rank for rank in made.ranks] == list(range(len(made.ranks)))


@given(_MACHINES)
def test_no_rail_is_down_out_of_reach_or_without_a_routable_address(whole: Machine) -> None:
    made = planned(whole)
    for rail in made.rails:
        assert rail.device.is_visible
        assert rail.device.is_openable
        assert rail.device.driver != "efa"
        assert rail.port.state is PortState.ACTIVE
        assert rail.gid in rail.port.gids
        assert rail.port.link_layer is LinkLayer.INFINIBAND or not rail.gid.address.is_link_local
    assert len({rail.gid.kind for rail in made.rails}) <= 1
    if not made.rails:
        assert made.problems, "no rail and nothing is said"


@given(_MACHINES, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_in_which_things_are_found(whole: Machine, rng: object) -> None:
    def shuffled(values: tuple[object, ...]) -> tuple[object, ...]:
        order = list(values)
        rng.shuffle(order)  # type: ignore[attr-defined]
        return tuple(order)

    again = dataclasses.replace(whole, devices=shuffled(whole.devices), gpus=shuffled(whole.gpus))
    one, other = planned(whole), planned(again)
    assert (one.rails, one.ranks, one.pool_nodes, one.cpus) == (other.rails, other.ranks, other.pool_nodes, other.cpus)
    assert {problem.name: sorted(problem.subjects) for problem in one.problems} == {
        problem.name: sorted(problem.subjects) for problem in other.problems
    }


@given(_MACHINES)
def test_memory_and_threads_stay_within_the_cpuset(whole: Machine) -> None:
    made = planned(whole)
    assert set(made.pool_nodes) <= whole.nodes_allowed
    assert set(made.cpus) <= whole.cpus_allowed
    assert list(made.pool_nodes) == sorted(set(made.pool_nodes))


# ---- host and container

GIB = 1 << 30
FINE = HostFacts(
    memlock_bytes=8 << 20,
    has_ipc_lock=True,
    memory_bytes=100 * GIB,
    memory_left_bytes=0,
    shm_bytes=16 * GIB,
    is_memfd_sealable=True,
    refused=frozenset(),
    hugepages=((2 << 20, 10),),
    seccomp="off",
)
WITH_RDMA = planned(machine(nic("a")))
WITHOUT = planned(machine())


@pytest.mark.parametrize(
    ("changes", "pool", "made", "problem"),
    [
        ({}, PoolNeeds(64 * GIB, 0), WITH_RDMA, None),
        ({"has_ipc_lock": False}, PoolNeeds(64 * GIB, 0), WITH_RDMA, "memlock_low"),
        ({"has_ipc_lock": False, "memlock_bytes": None}, PoolNeeds(64 * GIB, 0), WITH_RDMA, None),
        ({"has_ipc_lock": False}, PoolNeeds(64 * GIB, 0), WITHOUT, None),
        ({"memory_bytes": 63 * GIB}, PoolNeeds(64 * GIB, 0), WITHOUT, "memory_limit_low"),
        ({"memory_bytes": 64 * GIB}, PoolNeeds(64 * GIB, 0), WITHOUT, None),
        ({"memory_bytes": 64 * GIB}, PoolNeeds(64 * GIB, 0, headroom_bytes=1), WITHOUT, "memory_limit_low"),
        ({"memory_bytes": 0}, PoolNeeds(20 << 20, 2 << 20), WITHOUT, None),
        ({}, PoolNeeds(22 << 20, 2 << 20), WITHOUT, "hugepages_short"),
        ({}, PoolNeeds(GIB, GIB), WITHOUT, "hugepages_short"),
        ({"is_memfd_sealable": False}, PoolNeeds(GIB, 0), WITHOUT, "memfd_unsealable"),
        ({"refused": frozenset({"mbind"})}, PoolNeeds(GIB, 0), WITH_RDMA, "mbind_refused"),
        ({"refused": frozenset({"mbind"})}, PoolNeeds(GIB, 0), WITHOUT, None),
        ({"refused": frozenset({"mbind"})}, PoolNeeds(GIB, 0, is_placed=False), WITH_RDMA, None),
        ({"refused": frozenset({"move_pages"})}, PoolNeeds(GIB, 0), WITH_RDMA, "move_pages_refused"),
        ({"refused": frozenset({"sched_setaffinity"})}, PoolNeeds(GIB, 0), WITH_RDMA, "affinity_refused"),
        ({"shm_bytes": 64 << 20}, PoolNeeds(GIB, 0), WITHOUT, "shm_small"),
        ({"shm_bytes": None}, PoolNeeds(GIB, 0), WITHOUT, None),
    ],
)
def test_what_the_host_denies_is_named_where_it_matters(
    changes: dict[str, object], pool: PoolNeeds, made: Plan, problem: str | None
) -> None:
    found = judge(dataclasses.replace(FINE, **changes), pool, made)
    assert [each.name.value for each in found] == ([problem] if problem else [])


# ---- the list of problems


def test_every_problem_has_a_meaning_and_a_fix_and_no_name_is_forgotten() -> None:
    assert set(FIXES) == set(ProblemName)
    for fix in FIXES.values():
        assert fix.meaning.endswith(".")
        assert fix.fix.endswith(".")
        assert fix.severity in Severity


def test_names_are_sorted_as_people_count() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "mlx5_bond_0", "rxe0"], key=natural) == [
        "mlx5_2",
        "mlx5_10",
        "mlx5_bond_0",
        "rxe0",
    ]
