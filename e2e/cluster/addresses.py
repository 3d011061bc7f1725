"""Names and addresses of the cluster. One cluster at a time on a machine: they are the same for all.

host -- 10.213.0.2 -- router 10.213.0.1 -- 10.213.N.1 / 10.213.N.2 -- node N -- bridge 10.214.N.1 -- its pods
"""

from __future__ import annotations

__all__ = [
    "API_ADDRESS",
    "API_PORT",
    "API_SERVICE_ADDRESS",
    "API_URL",
    "DNS_ADDRESS",
    "NODES_MAX",
    "NODES_RANGE",
    "PODS_RANGE",
    "PREFIX",
    "ROUTER",
    "ROUTER_ADDRESS",
    "SERVICES_RANGE",
    "node_address",
    "node_gateway",
    "node_name",
    "node_number",
    "pods_range",
]

PREFIX = "kvpeer"
"""Of network namespaces, links and cgroups: what `down` removes."""

NODES_MAX = 9
NODES_RANGE, PODS_RANGE, SERVICES_RANGE = "10.213.0.0/16", "10.214.0.0/16", "10.215.0.0/16"
API_ADDRESS, ROUTER_ADDRESS = "10.213.0.2", "10.213.0.1"
API_PORT = 6443
API_URL = f"https://{API_ADDRESS}:{API_PORT}"
API_SERVICE_ADDRESS, DNS_ADDRESS = "10.215.0.1", "10.215.0.10"
ROUTER = "router"


def node_name(number: int) -> str:
    """n1, n2, ..."""
    return f"n{number}"


def node_number(name: str) -> int:
    """Of a node's name. Raises ValueError."""
    if not name.startswith("n") or not name[1:].isdigit():
        raise ValueError(f"no node is named {name!r}: they are n1, n2, ...")
    return int(name[1:])


def node_address(number: int) -> str:
    return f"10.213.{number}.2"


def node_gateway(number: int) -> str:
    return f"10.213.{number}.1"


def pods_range(number: int) -> str:
    """Addresses of the node's pods."""
    return f"10.214.{number}.0/24"
