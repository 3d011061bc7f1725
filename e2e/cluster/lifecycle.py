"""The cluster as a whole: up, down, nodes lost and found, images."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster import control_plane, images, network, nodes
from cluster.addresses import NODES_MAX, node_name, node_number
from cluster.binaries import build, missing
from cluster.cgroups import remove_cgroups
from cluster.folders import cache_folder, state_folder
from cluster.keys import kubeconfig, make_keys
from cluster.processes import await_true, names, running, stop

__all__ = ["cut_power", "down", "freeze", "is_up", "load_images", "node_numbers", "restore_power", "thaw", "up"]

READY_DEADLINE_S = 120.0
_COMMANDS = {
    "runc": "runc",
    "nft": "nftables",
    "conntrack": "conntrack",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Programs that come from packages, with their packages' names in Debian."""


def up(n_nodes: int) -> None:
    """Brings up a cluster that had none before; builds its programs where they are missing. Needs root.

    Raises SystemExit naming what is missing, or that one is up already.
    """
    _require(n_nodes)
    build()
    with _one_at_a_time():
        _remove_state()
        state_folder().mkdir(parents=True, exist_ok=True)
        numbers = list(range(1, n_nodes + 1))
        _nodes_file().write_text(json.dumps(numbers))
        began = time.monotonic()
        make_keys(n_nodes)
        control_plane.start_api()
        network.make_router()
        for number in numbers:
            network.make_node_network(number)
        _each(nodes.start_node, numbers)
        images.load([images.pause_archive()], numbers)
        control_plane.await_api()
        _say(began, "the API server answers")
        control_plane.start_controllers()
        _each(nodes.start_kubelet, numbers)
        control_plane.start_names()
        await_true(lambda: _ready_nodes() == len(numbers), "all nodes are ready", READY_DEADLINE_S)
        _say(began, "the nodes are ready")
        # Pods are refused until there is one, which takes longer than the nodes.
        await_true(lambda: bool(control_plane.kubectl("get", "serviceaccount", "default")), "pods", READY_DEADLINE_S)
        _say(began, f"the cluster is up: export KUBECONFIG={kubeconfig()} PATH={cache_folder() / 'bin'}:$PATH")


def down(wipe: bool = False) -> None:
    """Ends all processes of the cluster and takes away networks, cgroups and state; wipe: images on the nodes too.
    Finds nothing to do where there is nothing."""
    with _one_at_a_time():
        _remove_state()
        if wipe:
            shutil.rmtree(state_folder(), ignore_errors=True)


def is_up() -> bool:
    return running("apiserver") is not None


def node_numbers() -> list[int]:
    """Of all nodes, with power or without. Raises SystemExit without a cluster."""
    if not is_up():
        raise SystemExit("no cluster is up: make cluster-up")
    numbers: list[int] = json.loads(_nodes_file().read_text())
    return numbers


def load_images(targets: Sequence[str]) -> None:
    """All nodes get images: archives by path, what buildah built by name."""
    files = [Path(each).resolve() if each.endswith(".tar") else images.archive(each) for each in targets]
    images.load(files, [each for each in node_numbers() if running(f"{node_name(each)}-init")])


def cut_power(name: str) -> None:
    """The node's processes vanish. The API server notices after 8 s."""
    nodes.cut_power(node_number(name))


def restore_power(name: str) -> None:
    """The node starts again, with the images that it had, and joins."""
    nodes.start_node(node_number(name))
    nodes.start_kubelet(node_number(name))


def freeze(name: str) -> None:
    """The node's processes stop where they are; its connections stay open."""
    nodes.freeze(node_number(name), is_frozen=True)


def thaw(name: str) -> None:
    """They go on."""
    nodes.freeze(node_number(name), is_frozen=False)


def _require(n_nodes: int) -> None:
    if not 1 <= n_nodes <= NODES_MAX:
        raise SystemExit(f"a cluster has 1 to {NODES_MAX} nodes, not {n_nodes}")
    if os.geteuid() != 0:
        raise SystemExit("namespaces and mounts need root")
    packages = [package for command, package in _COMMANDS.items() if shutil.which(command) is None]
    if packages:
        raise SystemExit(f"missing: apt-get install {' '.join(packages)}")
    if is_up():
        raise SystemExit("a cluster is up: make cluster-down first")
    if missing():
        print(f"to be built, once: {', '.join(missing())}", flush=True)


def _remove_state() -> None:
    left = names()
    for name in left:
        if name.endswith("-init"):
            nodes.cut_power(node_number(name.removesuffix("-init")))
    for name in left:
        stop(name, signal.SIGKILL)  # nothing of what they hold is wanted any more
    network.remove_networks()
    remove_cgroups()
    for each in ("etcd", "keys", "logs"):
        shutil.rmtree(state_folder() / each, ignore_errors=True)


def _ready_nodes() -> int:
    path = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
    return control_plane.kubectl("get", "nodes", "-o", f"jsonpath={path}").split().count("True")


def _each(action: Callable[[int], None], numbers: list[int]) -> None:
    with ThreadPoolExecutor(max_workers=len(numbers)) as at_once:
        list(at_once.map(action, numbers))


def _nodes_file() -> Path:
    return state_folder() / "nodes.json"


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of those who bring a cluster up or down on this machine. Raises SystemExit if another one does."""
    with (cache_folder() / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit("another process brings the cluster up or down") from None
        yield
