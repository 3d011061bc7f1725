"""Options of an engine adapter: a frozen dataclass filled from defaults < the engine's extra config < environment.

One option a field; the field's name is the key, its default gives the type (bool, int, float or str). Numbers are
greater than 0 and finite.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvpeer.model import ConfigError

__all__ = ["read_options"]

_Options = TypeVar("_Options")

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def read_options(
    kind: type[_Options],
    extra_config: Mapping[str, Any],
    extra_config_name: str,
    environment: Mapping[str, str],
    prefix: str,
) -> _Options:
    """Returns the effective options. prefix: of the variables of the environment that are read, NAME as
    PREFIX + NAME in capitals.

    Raises:
        ConfigError: a key is unknown (the message names the nearest one) or a value does not fit.
    """
    known = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for key, value in extra_config.items():
        _refuse_unknown(key, key, known, extra_config_name)
        given[key] = value
    for variable, text in environment.items():
        if variable.startswith(prefix):
            key = variable[len(prefix) :].lower()
            _refuse_unknown(variable, key, known, "the environment")
            given[key] = text
    return kind(**{key: _convert(key, value, type(known[key])) for key, value in given.items()})


def _refuse_unknown(shown: str, key: str, known: Mapping[str, Any], where: str) -> None:
    if key in known:
        return
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    raise ConfigError(f"unknown setting {shown!r} in {where}: did you mean {nearest[0]!r}?")


def _convert(key: str, value: Any, kind: type) -> Any:
    try:
        converted = _boolean(value) if kind is bool else kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} is {value!r}: it must be of type {kind.__name__}") from error
    if isinstance(value, bool) and kind is not bool:
        raise ConfigError(f"{key} is {value!r}: it must be of type {kind.__name__}")
    if kind in (int, float) and not 0 < converted < math.inf:
        raise ConfigError(f"{key} is {value!r}: it must be greater than 0 and finite")
    return converted


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE
