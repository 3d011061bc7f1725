"""Every key of the agent's configuration, as a list: what readers, printers and the reference page iterate over."""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from kvpeer.agent.config.settings import AgentConfig
from kvpeer.agent.config.units import format_duration, format_size

__all__ = ["ENV_PREFIX", "Key", "allowed", "config_keys", "effective", "written"]

ENV_PREFIX = "KVPEER_"


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """One setting; there is one object for each. `annotation` is what a plain value is converted to (with its limits),
    `type` the same without them."""

    group: str
    name: str
    attribute: str
    annotation: Any
    type: inspect.Type
    default: Any
    description: str
    unit: str
    is_secret: bool

    @property
    def path(self) -> str:
        """How the key is named in the file and in errors."""
        return f"{self.group}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"{ENV_PREFIX}{self.group}_{self.name}".upper()


@functools.cache
def config_keys() -> tuple[Key, ...]:
    """All keys, in the order of their declaration."""
    keys: list[Key] = []
    for group in msgspec.structs.fields(AgentConfig):
        struct = type(group.default)
        annotations = typing.get_type_hints(struct, include_extras=True)
        for setting in msgspec.structs.fields(struct):
            annotation = annotations[setting.name]
            described = inspect.type_info(annotation)
            if not isinstance(described, inspect.Metadata):
                raise TypeError(f"{group.name}.{setting.name} has no description")
            extra = described.extra or {}
            keys.append(
                Key(
                    group=group.name,
                    name=setting.encode_name,
                    attribute=setting.name,
                    annotation=annotation,
                    type=described.type,
                    default=setting.default,
                    description=str((described.extra_json_schema or {})["description"]),
                    unit=str(extra.get("unit", "")),
                    is_secret=bool(extra.get("secret")),
                )
            )
    return tuple(keys)


def allowed(key: Key) -> str:
    """The values that the key takes, in words."""
    kind = key.type
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(sorted(map(str, kind.values)))}"
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        noun = {"size": "a size", "duration": "a duration"}.get(key.unit, "a whole number")
        return f"{noun} from {written(key, kind.ge)} to {written(key, kind.le)}"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list of at most {kind.max_length} texts"
    if isinstance(kind, inspect.StrType) and kind.pattern:
        return f"a text that matches {kind.pattern}"
    return "a text"


def written(key: Key, value: Any) -> str:
    """A value of the key as one writes it in the file."""
    if key.unit == "size":
        return format_size(int(value))
    if key.unit == "duration":
        return format_duration(float(value))
    return msgspec.json.encode(value).decode() if isinstance(value, (str, tuple, bool)) else str(value)


def effective(config: AgentConfig) -> str:
    """The whole configuration as a file that could be loaded again, except that secrets are masked."""
    lines: list[str] = []
    for key in config_keys():
        if f"{key.group}:" not in lines:
            lines.append(f"{key.group}:")
        value = getattr(getattr(config, key.group), key.attribute)
        text = '"***"' if key.is_secret and value else written(key, value)
        lines.append(f"  {key.name}: {text}")
    return "\n".join(lines) + "\n"
