"""Reads the agent's settings: defaults < YAML file < environment. Every fault is a ConfigError that names the key and
the fix."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from kvpeer.agent.config.checks import check
from kvpeer.agent.config.defaults import complete
from kvpeer.agent.config.keys import ENV_PREFIX, Key, allowed, config_keys
from kvpeer.agent.config.settings import AgentConfig
from kvpeer.agent.config.units import parse_duration, parse_size
from kvpeer.model import ConfigError

__all__ = ["load"]

FILE_BYTES_MAX = 1 << 20
"""A file with every key and comments has a few KiB; more is another file."""

_TYPO_SIMILARITY = 0.85
"""How near a foreign KVPEER_ variable must be to one of ours to be taken for a typo. Other programs own variables with
this prefix too (the engine adapters do), so anything less similar is left alone."""

_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

_WHOLE = re.compile(r"\d{1,19}")
"""As long as any number in 64 bits."""

_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def load(file: str | os.PathLike[str] | None, env: Mapping[str, str]) -> AgentConfig:
    """The complete and checked configuration: no value is left empty to be guessed later. Reads the file; may ask the
    kernel for a route (nothing is sent).

    Raises:
        ConfigError: anything is wrong; the message names the key and the fix.
    """
    values = _from_file(file) if file is not None else {}
    values.update(_from_env(env))
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        groups.setdefault(key.group, {})[key.attribute] = value
    defaults = AgentConfig()
    config = AgentConfig(
        **{name: msgspec.structs.replace(getattr(defaults, name), **changed) for name, changed in groups.items()}
    )
    config = complete(config, env)
    check(config)
    return config


def _from_file(file: str | os.PathLike[str]) -> dict[Key, Any]:
    keys = {(key.group, key.name): key for key in config_keys()}
    groups = {key.group for key in config_keys()}
    values: dict[Key, Any] = {}
    for group, settings in _read_yaml(file).items():
        if group not in groups:
            near = difflib.get_close_matches(str(group), groups, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(groups))}"
            raise ConfigError(f"{os.fspath(file)}: unknown group {group!r}{hint}")
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise ConfigError(f"{os.fspath(file)}: {group} must hold `key: value` lines, not {settings!r}")
        for name, raw in settings.items():
            if (group, name) not in keys:
                raise ConfigError(f"{os.fspath(file)}: unknown key {group}.{name}{_nearest_key(group, str(name))}")
            key = keys[group, name]
            values[key] = _value(key, raw, key.path)
    return values


def _read_yaml(file: str | os.PathLike[str]) -> dict[Any, Any]:
    import yaml  # a tenth of an agent's start, which those that are set by environment variables need not pay

    path = os.fspath(file)
    try:
        with open(file, "rb") as stream:
            text = stream.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes; this is no configuration of an agent")
        tree = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold groups such as `pool:` with `key: value` lines below")
    return tree


def _from_env(env: Mapping[str, str]) -> dict[Key, Any]:
    keys = {key.variable: key for key in config_keys()}
    group_prefixes = tuple({f"{ENV_PREFIX}{key.group}_".upper() for key in keys.values()})
    values: dict[Key, Any] = {}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or _is_service_link(variable, raw):
            continue
        if variable in keys:
            key = keys[variable]
            values[key] = _value(key, _plain(key, raw), variable)
        elif variable.startswith(group_prefixes) or difflib.get_close_matches(variable, keys, 1, _TYPO_SIMILARITY):
            near = difflib.get_close_matches(variable, keys, 1, 0.0)
            raise ConfigError(f"unknown variable {variable}; did you mean {near[0]}?")
    return values


def _is_service_link(variable: str, value: str) -> bool:
    """Kubernetes sets such variables in every container of a namespace with a Service named kvpeer-<something>."""
    return bool(_SERVICE_LINK.search(variable) or _SERVICE_URL.match(value))


def _plain(key: Key, text: str) -> Any:
    """What the text of a variable would be in the file; a text that is no such value stays, and is refused by its
    type."""
    if isinstance(key.type, inspect.VarTupleType):
        return [item.strip() for item in text.split(",") if item.strip()]
    if isinstance(key.type, inspect.BoolType):
        return _TRUTH.get(text.strip().lower(), text)
    if isinstance(key.type, inspect.IntType) and not key.unit and _WHOLE.fullmatch(text.strip()):
        return int(text)
    return text


def _value(key: Key, raw: Any, where: str) -> Any:
    shown = "***" if key.is_secret else repr(raw)
    try:
        if isinstance(raw, str) and key.unit:
            raw = parse_size(raw) if key.unit == "size" else parse_duration(raw)
        elif key.unit == "duration":
            raise ConfigError(f"{where} is {shown}, without a unit: write for example {raw}s. {key.description}")
        return msgspec.convert(raw, key.annotation)
    except msgspec.ValidationError:
        raise ConfigError(f"{where} is {shown}, but must be {allowed(key)}. {key.description}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _nearest_key(group: str, name: str) -> str:
    """The end of an error about an unknown key: a near name in its group, else in any group, else all names of the
    group."""
    in_group = {key.name: key.path for key in config_keys() if key.group == group}
    anywhere = {key.name: key.path for key in config_keys()}
    for names in (in_group, anywhere):
        near = difflib.get_close_matches(name, names, 1)
        if near:
            return f"; did you mean {names[near[0]]}?"
    return f"; there are {', '.join(in_group.values())}"
