"""Scenarios: which proxies there are and what they inject, read from YAML or JSON. Every fault of a file is a
ConfigError that names the key."""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvpeer.chaos.faults import Direction, Fault, FaultKind
from kvpeer.model import ConfigError

__all__ = ["Address", "Route", "Scenario", "parse_address", "parse_faults", "parse_scenario", "read_scenario"]

SCENARIO_BYTES_MAX = 1 << 20
"""A scenario of every route and fault that is allowed has less; more is another file."""

ROUTES_MAX = 64
"""Two an agent: as many agents as a staging cluster on one host has."""

FAULTS_MAX = 32
"""Of one route. Each is looked at for every read, so a limit keeps the proxy fast."""

SEED_MAX = 2**32 - 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

T = TypeVar("T")

Reader = Callable[[Any, str], Any]
"""Makes a value of what a file holds; the second argument says where, for errors."""


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address and a port; port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Route:
    """One proxy: listens at `listen`, forwards to `to`, injects `faults`.

    Raises:
        ConfigError: there is no port to forward to.
    """

    name: str
    listen: Address
    to: Address
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.to.port:
            raise ConfigError(f"to is {self.to}, but must name the port that the agent listens on")


@dataclass(frozen=True, slots=True)
class Scenario:
    """All proxies of one process. `seed`: None to have one drawn."""

    routes: tuple[Route, ...]
    seed: int | None = None


def read_scenario(path: str) -> Scenario:
    """The scenario in a file: JSON if its name ends in .json, else YAML.

    Raises:
        ConfigError: it cannot be read, or is no scenario.
    """
    try:
        with open(path, "rb") as stream:
            text = stream.read(SCENARIO_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {path}: {error.strerror}") from error
    if len(text) > SCENARIO_BYTES_MAX:
        raise ConfigError(f"{path}: more than {SCENARIO_BYTES_MAX} bytes; this is no scenario")
    tree = _json(text, path) if Path(path).suffix == ".json" else _yaml(text, path)
    try:
        return parse_scenario(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_scenario(tree: Any) -> Scenario:
    """The scenario that plain lists, mappings, texts and numbers describe.

    Raises:
        ConfigError: something is unknown, missing or wrong; the message names the key and the fix.
    """
    values = _struct(tree, "", {"seed": _seed, "routes": _routes})
    if "routes" not in values:
        raise ConfigError("routes is missing: a scenario needs at least one")
    return Scenario(**values)


def parse_faults(tree: Any, where: str = "faults") -> tuple[Fault, ...]:
    """The faults of one route; see `parse_scenario`."""
    items = _list(tree, where, FAULTS_MAX)
    return tuple(_fault(item, f"{where}[{idx}]") for idx, item in enumerate(items))


def parse_address(text: Any, where: str) -> Address:
    """The address of `10.0.0.7:7400` or `[fd00::7]:7400`.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = str(text).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = ""
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{where} is {text!r}, but must be a numeric address and a port such as 10.0.0.7:7400")
    return Address(host, int(port))


# ---- values of keys


def _routes(tree: Any, where: str) -> tuple[Route, ...]:
    routes = tuple(_route(item, f"{where}[{idx}]") for idx, item in enumerate(_list(tree, where, ROUTES_MAX)))
    if not routes:
        raise ConfigError(f"{where} is empty: a scenario needs at least one")
    names = [route.name for route in routes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: two are named {twice!r}; give each its own name")
    return routes


def _route(tree: Any, where: str) -> Route:
    values = _struct(tree, where, {"name": _name, "listen": parse_address, "to": parse_address, "faults": parse_faults})
    missing = next((key for key in ("name", "listen", "to") if key not in values), None)
    if missing is not None:
        raise ConfigError(f"{where}.{missing} is missing")
    return _built(Route, values, where)


def _fault(tree: Any, where: str) -> Fault:
    readers: dict[str, Reader] = {
        "kind": _choice(FaultKind),
        "direction": _choice(Direction),
        "after_bytes": _whole,
        **dict.fromkeys(("probability", "delay_ms", "jitter_ms", "from_s", "until_s"), _number),
    }
    values = _struct(tree, where, readers)
    if "kind" not in values:
        raise ConfigError(f"{where}.kind is missing: one of {', '.join(kind.value for kind in FaultKind)}")
    return _built(Fault, values, where)


def _choice(kind: type[FaultKind] | type[Direction]) -> Reader:
    def read(value: Any, where: str) -> FaultKind | Direction:
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise ConfigError(f"{where} is {value!r}, but must be one of {allowed}") from None

    return read


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}, but must be a number")
    return float(value)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} is {value!r}, but must be a whole number")
    return value


def _seed(value: Any, where: str) -> int:
    seed = _whole(value, where)
    if not 0 <= seed <= SEED_MAX:
        raise ConfigError(f"{where} is {seed}, but must be from 0 to {SEED_MAX}")
    return seed


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{where} is {value!r}, but must be a text of letters, digits, '.', '_' and '-'")
    return value


# ---- shapes


def _built(make: Callable[..., T], values: dict[str, Any], where: str) -> T:
    try:
        return make(**values)
    except ConfigError as error:  # it begins with the name of a key
        raise ConfigError(f"{where}.{error}") from error


def _list(tree: Any, where: str, items_max: int) -> list[Any]:
    if not isinstance(tree, list):
        raise ConfigError(f"{where} must be a list, not {tree!r}")
    if len(tree) > items_max:
        raise ConfigError(f"{where} has {len(tree)} items, but at most {items_max} are allowed")
    return tree


def _struct(tree: Any, where: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The values of a mapping's keys, each read by its reader."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where or 'the scenario'} must hold `key: value` lines, not {tree!r}")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in readers:
            near = difflib.get_close_matches(str(key), readers, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(readers)}"
            raise ConfigError(f"unknown key {path}; {hint}")
        values[str(key)] = readers[key](value, path)
    return values


def _json(text: bytes, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _yaml(text: bytes, path: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path} is YAML, which needs a package: run  pip install 'kvpeer[chaos]'  or write it as JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
