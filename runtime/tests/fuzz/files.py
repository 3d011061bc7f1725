"""What is read from files and the environment: settings, addresses of other agents, secrets, certificates, and the
folder of the disk tier.

The first byte says which; of the others each is the content of one file.
"""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
from pathlib import Path

from kvpeer.agent.certificates import uris_of
from kvpeer.agent.config import load
from kvpeer.agent.config.checks import SECRET_BYTES_MIN, parse_secret
from kvpeer.agent.discovery import list_addresses, write_address
from kvpeer.agent.private_files import private_folder
from kvpeer.model import AgentId, ConfigError
from kvpeer.wire.messages import AgentInfo

from fuzz import disk
from fuzz.shapes import changed_pem, changed_text

__all__ = ["ADDRESS", "ENVIRONMENT", "INDEX", "PEM", "RECORD", "SECRET", "SETTINGS", "changed", "take"]

SETTINGS, ENVIRONMENT, ADDRESS, SECRET, PEM, RECORD, INDEX = range(7)

_CLUSTER = "fuzz"
_OWN_ID = AgentId(bytes(16))
_HOST = {"KVPEER_AGENT_HOST": "127.0.0.1", "XDG_RUNTIME_DIR": "/tmp"}  # so that nothing is asked of the machine

_TELLING_LENGTH = 16
"""A shorter text may stand in the error by chance."""

_folder = tempfile.TemporaryDirectory(prefix="kvpeer-fuzz-")
_runtime_dir = private_folder(Path(_folder.name) / "run")
for _part in ("peers", f"peers/{_CLUSTER}"):
    private_folder(_runtime_dir / _part)


def take(data: bytes) -> None:
    if not data:
        return
    kind, content = data[0], data[1:]
    if kind == SETTINGS:
        take_settings(content)
    elif kind == ENVIRONMENT:
        take_environment(content)
    elif kind == ADDRESS:
        take_address(content)
    elif kind == SECRET:
        take_secret(content)
    elif kind == PEM:
        take_pem(content)
    elif kind == RECORD:
        disk.take_record(content)
    elif kind == INDEX:
        disk.take_index(content)


def changed(data: bytes, rng: random.Random) -> bytes:
    """Another input that is as well formed as this one."""
    kind, content = data[:1], data[1:]
    if kind in (bytes([RECORD]), bytes([INDEX])):
        return kind + content  # libFuzzer's own changes of bytes do
    return kind + (changed_pem if kind == bytes([PEM]) else changed_text)(content, rng)


def take_settings(content: bytes) -> None:
    """A file gives a complete configuration or a ConfigError."""
    path = _runtime_dir / "agent.yaml"
    path.write_bytes(content)
    try:
        config = load(path, _HOST)
    except ConfigError:
        return
    assert config.pool.extent_bytes > 0


def take_environment(content: bytes) -> None:
    """Lines of NAME=value behind KVPEER_."""
    lines = (line.partition("=") for line in content.decode("utf-8", "surrogateescape").split("\n"))
    try:
        load(None, _HOST | {f"KVPEER_{name}": value for name, _, value in lines})
    except ConfigError:
        return


def take_address(content: bytes) -> None:
    """A broken file of one agent does not hide the others. PID and TICKS in it stand for this process."""
    path = _runtime_dir / "peers" / _CLUSTER / "00.json"
    path.write_bytes(content.replace(b"PID", b"%d" % os.getpid()).replace(b"TICKS", _own_ticks()))
    for address in list_addresses(_runtime_dir, _CLUSTER, _OWN_ID):
        assert isinstance(address.host, str)
        assert 0 <= address.control_port <= 65535


@functools.cache
def _own_ticks() -> bytes:
    path = write_address(_runtime_dir, "own", AgentInfo(bytes(16), "own", "127.0.0.1", 0, 0))
    return b"%d" % json.loads(path.read_bytes())["start_ticks"]


def take_secret(content: bytes) -> None:
    """A secret has its bytes, or an error that does not tell it."""
    text = content.decode("ascii", "replace")
    refusal = ""
    try:
        assert len(parse_secret(text, "security.secret")) >= SECRET_BYTES_MIN
    except ConfigError as error:
        refusal = str(error)
    assert len(text.strip()) < _TELLING_LENGTH or text.strip() not in refusal


def take_pem(content: bytes) -> None:
    try:
        assert all(isinstance(uri, str) for uri in uris_of(content))
    except ValueError:
        return
