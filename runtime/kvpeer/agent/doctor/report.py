"""A machine, its plan and its problems as text for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvpeer.core.topology import (
    NODE_UNKNOWN,
    HostFacts,
    Machine,
    Plan,
    Port,
    Problem,
    Rail,
    RankPlan,
    RdmaDevice,
    Severity,
    number_list,
)

__all__ = ["as_values", "facts_text", "plan_text", "problems_text"]


def plan_text(machine: Machine, plan: Plan) -> str:
    """The topology and the plan."""
    lines = ["NUMA nodes"]
    for node in machine.nodes:
        cpus = f"cpus {number_list(node.cpus)}" if node.cpus else "no cpus"
        lines.append(f"  node {node.number}  {cpus}  {node.memory_bytes / (1 << 30):.0f} GiB")
    own = f"cpus {number_list(machine.cpus_allowed)}, memory of nodes {number_list(machine.nodes_allowed)}"
    lines += [f"  this container: {own}", "RDMA devices", *_device_lines(machine), "GPUs"]
    lines += [
        f"  {gpu.address}  {_node(gpu.node)}{'' if gpu.is_visible else '  not in this container'}"
        for gpu in machine.gpus
    ] or ["  none"]
    lines += ["plan", *(f"  {_rank_line(rank)}" for rank in plan.ranks)]
    lines.append(f"  rails: {', '.join(rail.name for rail in plan.rails) or 'none, pages go by tcp'}")
    lines.append(
        f"  pool: {f'nodes {number_list(plan.pool_nodes)}' if plan.pool_nodes else 'wherever the kernel puts it'}"
    )
    lines.append(f"  threads: {f'cpus {number_list(plan.cpus)}' if plan.cpus else 'wherever they may run'}")
    return "\n".join(lines) + "\n"


def problems_text(problems: Iterable[Problem]) -> str:
    """Problems and then notes, each with its fix."""
    ordered = sorted(problems, key=lambda problem: problem.severity is Severity.NOTE)
    lines = [
        f"{problem.severity.value} {problem.name.value}: {', '.join(problem.subjects)}\n"
        f"  {problem.meaning}\n"
        f"  fix: {problem.fix}\n"
        for problem in ordered
    ]
    return "".join(lines) or "no problems\n"


def facts_text(facts: HostFacts) -> str:
    """What the host and the container allow."""
    hugepages = ", ".join(f"{n} of {size >> 20} MiB" for size, n in facts.hugepages if n)
    rows = {
        "memory": f"{_gib(facts.memory_bytes, 'unknown')}, {_gib(facts.memory_left_bytes, 'unknown')} of it left",
        "lockable memory": "any (IPC_LOCK)" if facts.has_ipc_lock else _gib(facts.memlock_bytes, "any"),
        "shared memory": _gib(facts.shm_bytes, "none"),
        "sealed memory files": "yes" if facts.is_memfd_sealable else "refused",
        "reserved huge pages": hugepages or "none",
        "seccomp": facts.seccomp,
        "refused calls": ", ".join(sorted(facts.refused)) or "none",
    }
    return "host\n" + "".join(f"  {name}: {value}\n" for name, value in rows.items())


def as_values(machine: Machine, plan: Plan, problems: Iterable[Problem], facts: HostFacts | None) -> dict[str, Any]:
    """All of it, of texts, numbers, lists and dicts. docs/topology.md describes it."""
    return {
        "nodes": [
            {"node": node.number, "cpus": number_list(node.cpus), "memory_bytes": node.memory_bytes}
            for node in machine.nodes
        ],
        "cpus_allowed": number_list(machine.cpus_allowed),
        "nodes_allowed": sorted(machine.nodes_allowed),
        "devices": [_device_values(device) for device in machine.devices],
        "gpus": [{"address": gpu.address, "node": gpu.node, "is_visible": gpu.is_visible} for gpu in machine.gpus],
        "plan": {
            "rails": [_rail_values(rail) for rail in plan.rails],
            "ranks": [_rank_values(rank) for rank in plan.ranks],
            "pool_nodes": list(plan.pool_nodes),
            "cpus": number_list(plan.cpus),
        },
        "host": None if facts is None else _facts_values(facts),
        "problems": [
            {
                "name": problem.name.value,
                "severity": problem.severity.value,
                "subjects": list(problem.subjects),
                "meaning": problem.meaning,
                "fix": problem.fix,
            }
            for problem in problems
        ],
    }


def _device_lines(machine: Machine) -> Iterator[str]:
    seen = [device for device in machine.devices if device.is_visible]
    for device in seen:
        kind = ", virtual function" if device.is_virtual_function else ""
        yield f"  {device.name}  {_node(device.node)}  {device.driver or 'software'}{kind}"
        yield from (f"    {_port_line(port)}" for port in device.ports)
    others = [device.name for device in machine.devices if not device.is_visible]
    if others:
        yield f"  not in this container: {', '.join(others)}"
    if not machine.devices:
        yield "  none"


def _port_line(port: Port) -> str:
    mtu = f"  mtu {port.mtu_bytes}" if port.mtu_bytes else ""
    n_gids = f"{len(port.gids)} address{'es' if len(port.gids) != 1 else ''}"
    return f"port {port.number}  {port.link_layer.value}  {port.rate_gbps:g} Gb/s  {port.state.value}{mtu}  {n_gids}"


def _rank_line(rank: RankPlan) -> str:
    parts = [f"rank {rank.rank}", _node(rank.node)]
    if rank.gpu is not None:
        parts.append(f"gpu {rank.gpu.address}")
    if rank.rail is not None:
        gid = rank.rail.gid
        parts.append(f"nic {rank.rail.name}, gid {gid.index} {gid} ({gid.kind.value})")
    if rank.gpu is not None and rank.rail is not None:
        parts.append(f"near: {rank.proximity.name.lower()}")
    return "  ".join(parts)


def _rank_values(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node,
        "gpu": rank.gpu and rank.gpu.address,
        "nic": rank.rail and rank.rail.device.name,
        "port": rank.rail and rank.rail.port.number,
        "gid_index": rank.rail and rank.rail.gid.index,
        "proximity": rank.proximity.name.lower(),
    }


def _rail_values(rail: Rail) -> dict[str, Any]:
    return {
        "nic": rail.device.name,
        "port": rail.port.number,
        "link_layer": rail.port.link_layer.value,
        "rate_gbps": rail.port.rate_gbps,
        "node": rail.device.node,
        "gid_index": rail.gid.index,
        "gid": str(rail.gid),
        "gid_kind": rail.gid.kind.value,
    }


def _device_values(device: RdmaDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "driver": device.driver,
        "node": device.node,
        "pci": device.pci_path[-1] if device.pci_path else None,
        "is_visible": device.is_visible,
        "is_openable": device.is_openable,
        "is_virtual_function": device.is_virtual_function,
        "ports": [
            {
                "port": port.number,
                "state": port.state.value,
                "link_layer": port.link_layer.value,
                "rate_gbps": port.rate_gbps,
                "gids": {str(gid.index): f"{gid} ({gid.kind.value})" for gid in port.gids},
            }
            for port in device.ports
        ],
    }


def _facts_values(facts: HostFacts) -> dict[str, Any]:
    return {
        "memory_bytes": facts.memory_bytes,
        "memory_left_bytes": facts.memory_left_bytes,
        "memlock_bytes": facts.memlock_bytes,
        "has_ipc_lock": facts.has_ipc_lock,
        "shm_bytes": facts.shm_bytes,
        "is_memfd_sealable": facts.is_memfd_sealable,
        "refused": sorted(facts.refused),
        "hugepages": {str(size): n for size, n in facts.hugepages},
        "seccomp": facts.seccomp,
    }


def _node(node: int) -> str:
    return "node unknown" if node == NODE_UNKNOWN else f"node {node}"


def _gib(n_bytes: int | None, otherwise: str) -> str:
    return otherwise if n_bytes is None else f"{n_bytes / (1 << 30):.2f} GiB"
