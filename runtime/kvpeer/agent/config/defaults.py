"""Fills in the settings whose default depends on the machine: names, folders, and the address to listen on."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from kvpeer.agent.config.settings import AgentConfig
from kvpeer.folders import user_folder
from kvpeer.model import ConfigError

__all__ = ["Seed", "complete", "parse_seed", "seeds_of"]

_ROUTE_PROBE_PORT = 9  # discard; nothing is ever sent to it
_OUTSIDE = "192.0.2.1"  # reserved for documentation: its route is the default route
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Seed:
    """An agent to ask for members. `host` is a numeric address or a DNS name."""

    host: str
    port: int

    @property
    def is_numeric(self) -> bool:
        """Whether no name has to be resolved."""
        return _is_numeric(self.host)


def complete(config: AgentConfig, env: Mapping[str, str]) -> AgentConfig:
    """The same configuration with nothing left empty except what stays off by being empty (secrets, certificate files).

    Raises:
        ConfigError: a seed cannot be read.
    """
    agent = config.agent
    runtime_dir = agent.runtime_dir or str(user_folder(env))
    host = agent.host or _default_host(seeds_of(config))
    agent = replace(
        agent,
        name=agent.name or socket.gethostname(),
        runtime_dir=runtime_dir,
        socket=agent.socket or str(Path(runtime_dir) / "agent.sock"),
        host=host,
        advertise_host=agent.advertise_host or host,
    )
    metrics = replace(config.metrics, host=config.metrics.host or agent.host)
    return replace(config, agent=agent, metrics=metrics)


def seeds_of(config: AgentConfig) -> tuple[Seed, ...]:
    """The configured seeds; one without a port has the own control port.

    Raises:
        ConfigError: a seed cannot be read.
    """
    return tuple(parse_seed(text, config.agent.control_port) for text in config.agent.seeds)


def parse_seed(text: str, default_port: int) -> Seed:
    """The seed of `address:port`, `[address]:port`, `name:port` or `name`.

    Raises:
        ConfigError: the text is none of these, or no port is known for it.
    """
    host, separator, port_text = text.rpartition(":")
    if not separator or _is_numeric(text):  # a name, or an IPv6 address, alone
        host, port_text = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port_text.isdecimal() or not 0 <= int(port_text) <= 65535 or any(c in host for c in " /,@[]"):
        raise ConfigError(f"agent.seeds: {text!r} is not address:port, name:port or name")
    if not int(port_text):
        raise ConfigError(f"agent.seeds: {text!r} has no port: write {text}:<port>, or set agent.control_port")
    return Seed(host, int(port_text))


def _default_host(seeds: tuple[Seed, ...]) -> str:
    if not seeds:
        return _LOOPBACK
    towards = next((seed.host for seed in seeds if seed.is_numeric), _OUTSIDE)
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, _ROUTE_PROBE_PORT))  # chooses a route, sends nothing
        except OSError:
            return _LOOPBACK
        return str(probe.getsockname()[0])


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
