"""Checks between settings, after each was checked alone. Nothing is changed here."""

from __future__ import annotations

import ipaddress
import os
import re

from kvpeer.agent.config.defaults import seeds_of
from kvpeer.agent.config.settings import EXTENTS_MAX, HUGEPAGE_BYTES, SEGMENTS_MAX, SOCKET_PATH_BYTES_MAX, AgentConfig
from kvpeer.agent.config.units import format_size
from kvpeer.model import ConfigError

__all__ = ["SECRET_BYTES_MIN", "check", "parse_secret"]

SECRET_BYTES_MIN = 16
"""128 bits: a derived authority is only as good as its secret, and whoever can guess it is any agent of the cluster."""

SECRET_BYTES_MAX = 128

_MEMORY_PAGE_BYTES = 4096
_FORGET_FACTOR = 10
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")


def check(config: AgentConfig) -> None:
    """Returns when the settings fit together.

    Raises:
        ConfigError: they do not; the message names the keys and the fix.
    """
    _check_addresses(config)
    _check_paths(config)
    _check_pool(config)
    _check_disk(config)
    _check_membership(config)
    _check_security(config)


def parse_secret(text: str, key: str) -> bytes:
    """The secret's bytes; white space around it (a newline at the end of a file) does not count. The text never appears
    in errors.

    Raises:
        ConfigError: it is not hexadecimal or shorter than 128 bits.
    """
    digits = text.strip()
    fix = "make one with  openssl rand -hex 32"
    if not _HEX.fullmatch(digits):
        raise ConfigError(f"{key} must be an even number of hexadecimal digits: {fix}")
    if not SECRET_BYTES_MIN <= len(digits) // 2 <= SECRET_BYTES_MAX:
        bounds = f"at least {SECRET_BYTES_MIN * 8} and at most {SECRET_BYTES_MAX * 8} bits"
        raise ConfigError(f"{key} has {len(digits) * 4} bits, but {bounds} are needed: {fix}")
    return bytes.fromhex(digits)


def _check_addresses(config: AgentConfig) -> None:
    agent, metrics = config.agent, config.metrics
    for key, host in (("agent.host", agent.host), ("agent.advertise_host", agent.advertise_host)):
        address = _numeric(host, key)
        if address.is_unspecified or address.is_multicast:
            raise ConfigError(
                f"{key} is {host}, which peers cannot reach: name one address of this host (the pod's IP)"
            )
    _numeric(metrics.host, "metrics.host")
    seeds_of(config)
    if agent.advertise_control_port and agent.advertise_control_port == agent.advertise_data_port:
        raise ConfigError(
            f"agent.advertise_control_port and agent.advertise_data_port are both {agent.advertise_data_port}: give "
            f"each its own port"
        )
    ports: dict[int, str] = {}
    taken = [("agent.control_port", agent.control_port), ("agent.data_port", agent.data_port)]
    if metrics.enabled:
        taken.append(("metrics.port", metrics.port))
    for key, port in taken:
        if port and port in ports:
            raise ConfigError(f"{ports[port]} and {key} are both {port}: give each its own port")
        ports[port] = key


def _numeric(host: str, key: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{key} is {host!r}, but must be a numeric address such as 10.0.0.7") from None


def _check_paths(config: AgentConfig) -> None:
    for key, path in (("agent.runtime_dir", config.agent.runtime_dir), ("agent.socket", config.agent.socket)):
        if not os.path.isabs(path):
            raise ConfigError(f"{key} is {path!r}, but must be an absolute path")
    n_bytes = len(os.fsencode(config.agent.socket))
    if n_bytes > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"agent.socket has {n_bytes} bytes, but a Unix socket's path has room for {SOCKET_PATH_BYTES_MAX}: "
            f"choose a shorter agent.runtime_dir"
        )


def _check_pool(config: AgentConfig) -> None:
    pool = config.pool
    step_bytes = max(HUGEPAGE_BYTES[pool.hugepages], _MEMORY_PAGE_BYTES)
    if pool.extent_bytes % step_bytes:
        raise ConfigError(
            f"pool.extent_size is {format_size(pool.extent_bytes)}, but must be a multiple of "
            f"{format_size(step_bytes)} (pool.hugepages is {pool.hugepages})"
        )
    n_extents = pool.size_bytes // pool.extent_bytes
    if not n_extents:
        raise ConfigError(
            f"pool.size is {format_size(pool.size_bytes)}, less than one pool.extent_size "
            f"({format_size(pool.extent_bytes)})"
        )
    if n_extents > EXTENTS_MAX:
        raise ConfigError(
            f"pool.size is {n_extents} extents, but at most {EXTENTS_MAX} can be named: raise pool.extent_size"
        )


def _check_disk(config: AgentConfig) -> None:
    disk = config.disk
    if not disk.path:
        return
    if not os.path.isabs(disk.path):
        raise ConfigError(f"disk.path is {disk.path!r}, but must be an absolute path")
    if disk.segment_bytes % _MEMORY_PAGE_BYTES:
        raise ConfigError(f"disk.segment_size is {disk.segment_bytes} bytes, but must be a multiple of 4Ki")
    if disk.size_bytes < disk.segment_bytes:
        raise ConfigError(
            f"disk.size is {format_size(disk.size_bytes)}, less than one disk.segment_size "
            f"({format_size(disk.segment_bytes)})"
        )
    if disk.segment_bytes <= config.pool.extent_bytes:
        raise ConfigError(
            f"disk.segment_size is {format_size(disk.segment_bytes)}, but must be larger than pool.extent_size "
            f"({format_size(config.pool.extent_bytes)}): a page may be as large as that"
        )
    n_segments = disk.size_bytes // disk.segment_bytes
    if n_segments > SEGMENTS_MAX:
        raise ConfigError(
            f"disk.size is {n_segments} segments, each of them an open file, but at most {SEGMENTS_MAX} can be used: "
            "raise disk.segment_size"
        )


def _check_membership(config: AgentConfig) -> None:
    membership = config.membership
    if membership.forget_s < _FORGET_FACTOR * membership.suspicion_s:
        raise ConfigError(
            f"membership.forget must be at least {_FORGET_FACTOR} times membership.suspicion: all must know of a death "
            f"before anybody forgets it"
        )


def _check_security(config: AgentConfig) -> None:
    security = config.security
    of_mode = {
        "shared_secret": {"secret", "secret_file"},
        "mutual_tls": {"cert_file", "key_file", "ca_file"},
        "insecure": set[str](),
    }
    every = ("secret", "secret_file", "cert_file", "key_file", "ca_file")
    given = {name for name in every if getattr(security, name)}
    foreign = sorted(given - of_mode[security.mode])
    if foreign:
        raise ConfigError(
            f"security.{foreign[0]} has no meaning with security.mode {security.mode}: remove it or change the mode"
        )
    if security.mode == "mutual_tls":
        missing = sorted(of_mode["mutual_tls"] - given)
        if missing:
            raise ConfigError(f"security.mode mutual_tls needs security.{missing[0]}")
    if {"secret", "secret_file"} <= given:
        raise ConfigError("security.secret and security.secret_file are both set: keep one")
    if security.secret:
        parse_secret(security.secret, "security.secret")
