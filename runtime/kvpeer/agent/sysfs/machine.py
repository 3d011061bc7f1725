"""The whole machine, for the planner."""

from __future__ import annotations

from pathlib import Path

from kvpeer.agent.sysfs.gpus import read_gpus
from kvpeer.agent.sysfs.rdma import read_rdma
from kvpeer.agent.sysfs.tree import Tree, parse_numbers
from kvpeer.core.topology import Machine, Node

__all__ = ["read_machine"]

NODES_MAX = 1024
"""The kernel's own limit (MAX_NUMNODES)."""

_NODES = "sys/devices/system/node"
_STATUS = "proc/self/status"


def read_machine(root: Path = Path("/")) -> Machine:
    """What /sys, /proc and /dev below `root` say. Never raises; what could not be read is in `Machine.unread`.

    Blocks for some 10 ms on a host with many ports: each of their 256 addresses is a file.
    """
    tree = Tree(root)
    nodes = _nodes(tree)
    status = dict(tree.fields(_STATUS))
    devices, gpus = read_rdma(tree), read_gpus(tree)
    cpus = _allowed(tree, status, "Cpus_allowed_list")
    allowed = _allowed(tree, status, "Mems_allowed_list")
    netdevs = frozenset(tree.names("sys/class/net"))
    return Machine(
        nodes=nodes,
        devices=devices,
        gpus=gpus,
        cpus_allowed=frozenset().union(*(node.cpus for node in nodes)) if cpus is None else cpus,
        nodes_allowed=frozenset(node.number for node in nodes) if allowed is None else allowed,
        netdevs=netdevs,
        unread=tree.unread,
    )


def _nodes(tree: Tree) -> tuple[Node, ...]:
    names = [name for name in tree.names(_NODES) if name.startswith("node") and name[4:].isdecimal()]
    return tuple(_node(tree, f"{_NODES}/{name}", int(name[4:])) for name in names[:NODES_MAX])


def _node(tree: Tree, folder: str, number: int) -> Node:
    # "Node 0 MemTotal:  65842156 kB"
    meminfo = {name.split()[-1]: value for name, value in tree.fields(f"{folder}/meminfo") if name}
    total = meminfo.get("MemTotal", "").removesuffix("kB").strip()
    distances = (tree.text(f"{folder}/distance") or "").split()
    return Node(
        number,
        tree.numbers(f"{folder}/cpulist"),
        int(total) * 1024 if total.isdecimal() else 0,
        tuple(int(word) for word in distances if word.isdecimal()),
    )


def _allowed(tree: Tree, status: dict[str, str], field: str) -> frozenset[int] | None:
    """None where nothing is said: all of them."""
    if field not in status:
        return None
    try:
        return parse_numbers(status[field])
    except ValueError:
        tree.fault(_STATUS)
        return None
