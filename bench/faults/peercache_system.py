"""PeerCache as the system under test: `PeerCacheStore` in each engine, TCP transport, its default mode (p2p).

What is set, and why: `protocol` tcp, because there is no RDMA device; host names and ports of this host;
`global_segment_size`, the room for pages; `interface_v1`, its recommended interface; and no disk tier but in the fault
that is about it. Everything else is its default, discovery embedded in the first node included.
"""

from __future__ import annotations

import importlib.metadata
import socket
from pathlib import Path
from typing import Any

from faults.protocol import Backend, Identity
from faults.system import Node, Shape, System

__all__ = ["PeerCache"]

HOST = "127.0.0.1"


class PeerCacheNode(Node):
    """See the module docstring."""

    def __init__(self, system: PeerCache, shape: Shape, identity: Identity, disk: Path | None) -> None:
        self._system, self._shape, self._identity = system, shape, identity
        self._extra_config: dict[str, Any] = {
            "discovery_addr": f"{HOST}:{system.discovery_port}",
            "protocol": "tcp",
            "interface_v1": 1,
            "local_hostname": HOST,
            "control_bind_host": HOST,
            "meta_bind_host": HOST,
            "rdma_bind_host": HOST,
            "metrics_bind_host": HOST,
            "metrics_port": _free_port(),
            # Divided by tp_size there.
            "global_segment_size": shape.pool_bytes * identity.tp_size,
            "disk_enabled": disk is not None,
        }
        if disk is not None:
            # By default the node gets a new name at each start, and with it a new folder.
            self._extra_config |= {"disk_path": str(disk), "disk_size": "1gb", "node_id": "fixed"}
        self.start()

    def backend(self) -> Backend:
        return Backend("peercache.store", "PeerCacheStore", self._extra_config)

    def pids(self) -> list[int]:
        return [self.engine.pid]

    def n_members(self) -> int:
        return int(self.engine.ask("of_storage", "runtime.ring"))

    def stop(self) -> None:
        self.is_running = False
        self.engine.ask("detach")
        self.engine.kill()

    def start(self) -> None:
        self.engine = self._system.engine(self._shape, self._identity)
        self.attach()
        self.is_running = True


class PeerCache(System):
    """See the module docstring."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.name = f"PeerCache {importlib.metadata.version('peercache')}"
        self.discovery_port = _free_port()

    def make_node(self, shape: Shape, identity: Identity, disk: Path | None) -> Node:
        return PeerCacheNode(self, shape, identity, disk)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])
