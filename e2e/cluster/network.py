"""The network: one namespace that routes, one for each node, and what cuts them apart.

Pods of different nodes really talk over two links and a router, as they do between machines. The host has one link and
three routes; kube-proxy runs in the router, which gives the host (and the API server) the addresses of Services
without a rule of its own.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from cluster.addresses import (
    API_ADDRESS,
    NODES_RANGE,
    PODS_RANGE,
    PREFIX,
    ROUTER,
    ROUTER_ADDRESS,
    SERVICES_RANGE,
    node_address,
    node_gateway,
    node_name,
    pods_range,
)
from cluster.processes import run

__all__ = ["HOST", "make_node_network", "make_router", "partition", "reconnect", "remove_networks", "within"]

HOST = "host"
"""The control plane's place in `partition`."""

_HOST_LINK = f"{PREFIX}-host"
_PARTITIONS = f"{PREFIX}_partitions"


def within(place: str) -> list[str]:
    """Words before a command that bring it into the network of the router or of a node.

    Not `ip netns exec`, which mounts /sys anew: without the cgroups.
    """
    return ["nsenter", f"--net=/run/netns/{PREFIX}-{place}"]


def make_router() -> None:
    """The router's namespace, and the host's link to it."""
    run("ip", "netns", "add", f"{PREFIX}-{ROUTER}")
    link = _link_of(HOST)
    run("ip", "link", "add", _HOST_LINK, "type", "veth", "peer", "name", link, "netns", f"{PREFIX}-{ROUTER}")
    run("ip", "address", "add", f"{API_ADDRESS}/24", "dev", _HOST_LINK)
    run("ip", "link", "set", _HOST_LINK, "up")
    for addresses in (NODES_RANGE, PODS_RANGE, SERVICES_RANGE):
        run("ip", "route", "add", addresses, "via", ROUTER_ADDRESS, "dev", _HOST_LINK, "onlink")
    _in(ROUTER, "ip", "link", "set", "lo", "up")
    _in(ROUTER, "ip", "address", "add", f"{ROUTER_ADDRESS}/24", "dev", link)
    _in(ROUTER, "ip", "link", "set", link, "up")
    _in(ROUTER, "sysctl", "-qw", "net.ipv4.ip_forward=1")


def make_node_network(number: int) -> None:
    """A node's namespace, and its link to the router."""
    name, link = node_name(number), _link_of(node_name(number))
    run("ip", "netns", "add", f"{PREFIX}-{name}")
    _in(ROUTER, "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", f"{PREFIX}-{name}")
    _in(ROUTER, "ip", "address", "add", f"{node_gateway(number)}/24", "dev", link)
    _in(ROUTER, "ip", "link", "set", link, "up")
    _in(name, "ip", "link", "set", "lo", "up")
    _in(name, "ip", "address", "add", f"{node_address(number)}/24", "dev", "eth0")
    _in(name, "ip", "link", "set", "eth0", "up")
    _in(name, "ip", "route", "add", "default", "via", node_gateway(number))
    _in(name, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")
    _in(ROUTER, "ip", "route", "add", pods_range(number), "via", node_address(number))


def partition(one: str, other: str) -> None:
    """Nothing passes between two nodes, or a node and `HOST`, from now on. Other partitions stay."""
    _nft(f"add table inet {_PARTITIONS}")
    _nft(f"add chain inet {_PARTITIONS} cut {{ type filter hook forward priority -10; }}")
    for source, target in ((one, other), (other, one)):
        words = f"iifname {_link_of(source)} oifname {_link_of(target)} drop"
        _nft(f"add rule inet {_PARTITIONS} cut {words}")


def reconnect() -> None:
    """Ends all partitions."""
    with contextlib.suppress(RuntimeError):  # there were none
        _nft(f"delete table inet {_PARTITIONS}")


def remove_networks() -> None:
    """Removes every namespace and link of the cluster, whatever is left of it."""
    for line in run("ip", "netns", "list").splitlines():
        if line.startswith(f"{PREFIX}-"):
            run("ip", "netns", "delete", line.split()[0])
    if Path(f"/sys/class/net/{_HOST_LINK}").exists():
        with contextlib.suppress(RuntimeError):  # it may vanish with the router's end, which takes a moment
            run("ip", "link", "delete", _HOST_LINK)


def _link_of(place: str) -> str:
    """The router's end of a link."""
    return f"to-{place}"


def _in(place: str, *words: str) -> None:
    run(*within(place), *words)


def _nft(statement: str) -> None:
    run(*within(ROUTER), "nft", "-f", "-", text=f"{statement}\n")
