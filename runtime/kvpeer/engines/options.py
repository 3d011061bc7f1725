"""Options of an engine adapter: a frozen dataclass filled from defaults < the engine's extra config < environment.

One option a field; the field's name is the key, its default gives the type (bool, int, float or str). Numbers are
greater than 0 and finite. A field whose metadata has `words` takes these as well.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from kvpeer.core.policy import Calibration
from kvpeer.model import ConfigError

__all__ = ["AUTO", "CalibratedCosts", "calibration", "floor_tokens", "read_options"]

AUTO = "auto"
"""A `min_cached_token_delta` that measured costs decide."""

_Options = TypeVar("_Options")

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


class CalibratedCosts(Protocol):
    """The options of a calibration, the same in each adapter; 0 where it was not given."""

    @property
    def calibrated_pull_s(self) -> float: ...
    @property
    def calibrated_pull_s_per_byte(self) -> float: ...
    @property
    def calibrated_prefill_s_per_token(self) -> float: ...
    @property
    def calibrated_prefill_s_per_pair(self) -> float: ...


def calibration(options: CalibratedCosts) -> Calibration:
    """Returns what pulls and prefills are assumed to cost at the start.

    Raises:
        ConfigError: some of a calibration's costs are given and others are not.
    """
    given = {
        "pull_floor_s": options.calibrated_pull_s,
        "pull_s_per_byte": options.calibrated_pull_s_per_byte,
        "prefill_s_per_token": options.calibrated_prefill_s_per_token,
        "prefill_s_per_pair": options.calibrated_prefill_s_per_pair,
    }
    if not any(given.values()):
        return Calibration()
    if not all(given.values()):
        raise ConfigError(
            "of calibrated_pull_s, calibrated_pull_s_per_byte, calibrated_prefill_s_per_token and "
            "calibrated_prefill_s_per_pair only some are given: give all four, or none"
        )
    return Calibration(**given, is_calibrated=True)


def floor_tokens(min_cached_token_delta: int | str) -> int | None:
    """Returns the floor in tokens; None for `auto`."""
    return None if min_cached_token_delta == AUTO else int(min_cached_token_delta)


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
    words = {field.name: field.metadata.get("words", ()) for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for key, value in extra_config.items():
        _refuse_unknown(key, key, known, extra_config_name)
        given[key] = value
    for variable, text in environment.items():
        if variable.startswith(prefix):
            key = variable[len(prefix) :].lower()
            _refuse_unknown(variable, key, known, "the environment")
            given[key] = text
    return kind(
        **{
            key: value if value in words[key] else _convert(key, value, type(known[key]))
            for key, value in given.items()
        }
    )


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
