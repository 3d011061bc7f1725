"""kvpeer as the system under test: an agent beside each engine, and `KVPeerStorage` in the engine."""

from __future__ import annotations

import time
from pathlib import Path

from kvpeer.bench.agents import AgentProcess, Cluster, served_after_s

from faults.protocol import Backend, Identity
from faults.system import Node, Shape, System

__all__ = ["KVPeer"]

STOP_S_MAX = 20.0


class KVPeerNode(Node):
    """Default settings but for the size of the pool."""

    def __init__(self, system: KVPeer, shape: Shape, identity: Identity, disk: Path | None) -> None:
        self._system, self._shape, self._identity = system, shape, identity
        size = f"{max(1, shape.pool_bytes >> 20)}Mi"
        self._settings = {"pool.size": size, "pool.extent_size": size}
        if disk is not None:
            self._settings |= {"disk.path": str(disk), "disk.size": "1Gi"}
        self._agent: AgentProcess
        self.start()

    def backend(self) -> Backend:
        return Backend("kvpeer.engines.sglang", "KVPeerStorage", {"agent_socket": self._agent.socket})

    def pids(self) -> list[int]:
        return [self.engine.pid, self._agent.process.pid]

    def n_members(self) -> int:
        suspects = self._agent.metric('kvpeer_membership_members{state="suspect"}')
        return 0 if suspects else int(self._agent.metric('kvpeer_membership_members{state="alive"}'))

    def stop(self) -> None:
        self.is_running = False
        self.engine.ask("detach")
        self.engine.kill()
        self._agent.process.terminate()
        self._agent.process.wait(STOP_S_MAX)

    def start(self) -> None:
        self._agent = self._system.agents.launch(self._settings)
        served_after_s(self._agent, time.perf_counter())
        self.engine = self._system.engine(self._shape, self._identity)
        self.attach()
        self.is_running = True

    def kill(self) -> None:
        super().kill()
        self._agent.process.wait(STOP_S_MAX)


class KVPeer(System):
    """See the module docstring."""

    name = "kvpeer"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        agents = folder / "agents"
        agents.mkdir(mode=0o700)
        self.agents = Cluster(agents)

    def make_node(self, shape: Shape, identity: Identity, disk: Path | None) -> Node:
        return KVPeerNode(self, shape, identity, disk)

    def close(self) -> None:
        super().close()
        self.agents.close()
