"""What a client is told: which agent to use, and what its process holds of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SOCKET_VARIABLE", "ClientSettings", "Registration"]

SOCKET_VARIABLE = "KVPEER_SOCKET"
"""Environment variable with the socket of a running agent; set by whoever runs one beside the engine."""


@dataclass(frozen=True)
class Registration:
    """One engine process. `namespace` is the digest of what must be equal for pages to be shared, `description` what
    it was made of. The process holds bytes [part_offset, part_offset + part_bytes) of each page; a scheduler has part
    = -1 and no bytes."""

    name: str
    namespace: bytes
    description: dict[str, str]
    page_bytes: int
    n_parts: int
    part: int
    part_offset: int
    part_bytes: int


@dataclass(frozen=True)
class ClientSettings:
    """socket: the agent's Unix socket; empty for an agent that the clients of `engine` start for themselves and share.

    engine: names the engine among those of this user on this host; all its processes give the same.
    start_timeout_s: how long `Client.connect` waits for its agent, and an embedded agent may take to start; after it
    the engine serves without an agent, while connecting goes on in the background.
    agent_command: starts the embedded agent instead of this package's own command line; it gets the environment below.
    agent_environment: settings of the embedded agent (KVPEER_<GROUP>_<KEY>) beyond the process's own environment.
    """

    socket: str = ""
    engine: str = "default"
    start_timeout_s: float = 10.0
    agent_command: tuple[str, ...] = ()
    agent_environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], engine: str, socket: str = "") -> ClientSettings:
        """Settings with the socket that was configured, else the environment's, else an embedded agent for `engine`."""
        return cls(socket=socket or environment.get(SOCKET_VARIABLE, ""), engine=engine)
