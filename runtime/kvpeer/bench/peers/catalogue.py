"""All systems, in the order in which they take turns and are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpeer.bench.peers.bare import memcpy, sockets
from kvpeer.bench.peers.compare import Candidate, Running
from kvpeer.bench.peers.kvpeer_shm import KvPeerShm
from kvpeer.bench.peers.kvpeer_tcp import KvPeerTcp
from kvpeer.bench.peers.kvpeer_verbs import KvPeerVerbs
from kvpeer.bench.peers.mooncake import Mooncake
from kvpeer.bench.peers.nixl import Nixl
from kvpeer.bench.peers.peercache import PeerCache
from kvpeer.bench.peers.perftest import IbReadBw
from kvpeer.bench.peers.processes import RunningSystem
from kvpeer.bench.peers.system import System, Way
from kvpeer.model import ConfigError, Verify

__all__ = ["CANDIDATES", "chosen"]


@dataclass(frozen=True, slots=True)
class _Served:
    """A system in processes of ours."""

    system: System

    @property
    def name(self) -> str:
        return self.system.name

    @property
    def way(self) -> Way:
        return self.system.way

    def missing(self) -> str | None:
        return self.system.missing()

    def start(self, page_bytes: int) -> Running:
        return RunningSystem(self.system, page_bytes)


CANDIDATES: tuple[Candidate, ...] = (
    _Served(memcpy()),
    _Served(KvPeerShm()),
    _Served(sockets()),
    _Served(KvPeerTcp()),
    _Served(KvPeerTcp("kvpeer.tcp.generation", Verify.GENERATION)),
    _Served(PeerCache(Way.TCP)),
    _Served(Mooncake(Way.TCP)),
    _Served(Nixl()),
    IbReadBw(),
    _Served(KvPeerVerbs()),
    _Served(PeerCache(Way.RDMA)),
    _Served(Mooncake(Way.RDMA)),
)


def chosen(names: Sequence[str]) -> tuple[Candidate, ...]:
    """Returns the candidates of these names; all of them for none.

    Raises:
        ConfigError: a name is none of theirs.
    """
    known = [candidate.name for candidate in CANDIDATES]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: there are {', '.join(known)}")
    return tuple(candidate for candidate in CANDIDATES if not names or candidate.name in names)
