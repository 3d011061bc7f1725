"""The settings of a running adapter: those of its start, changed by what its agent was told of the engine's policy.

An operator says what may change while an engine runs by the names of the adapter's environment variables. Which of
them do is the adapter's business; the others stay as they were at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from kvpeer.core.policy import PolicySettings
from kvpeer.engines.options import read_options
from kvpeer.model import ConfigError
from kvpeer.wire.messages import PolicyTold

__all__ = ["ToldSettings"]


class _Options(Protocol):
    def policy(self) -> PolicySettings: ...


_OptionsT = TypeVar("_OptionsT", bound=_Options)


@dataclass(slots=True)
class ToldSettings(Generic[_OptionsT]):
    """settings: those of the start, a frozen dataclass. live: its fields that may change. Belongs to one thread."""

    settings: _OptionsT
    prefix: str
    live: frozenset[str]
    logger: logging.Logger
    _seen: PolicyTold | None = None

    def changed(self, told: PolicyTold | None) -> _OptionsT | None:
        """The settings from now on, if what was told is new; None: nothing is. A value that does not fit is logged, and
        everything stays as it is: no policy ends an engine."""
        if told is None or told == self._seen:
            return None
        self._seen = told
        try:
            settings = self._with(told.variables)
            settings.policy()
        except (ConfigError, ValueError) as error:
            self.logger.warning("kvpeer: policy %s is not used: %s", told.policy, error)
            return None
        names = ", ".join(f"{name}={getattr(settings, name)}" for name in sorted(self.live))
        self.logger.info("kvpeer: policy %s at revision %d: %s", told.policy or "(none)", told.revision, names)
        return settings

    def _with(self, variables: Mapping[str, str]) -> _OptionsT:
        known = {name: value for name, value in variables.items() if self._field(name) in self.live}
        read = read_options(type(self.settings), {}, "", known, self.prefix)
        given = {self._field(name): getattr(read, self._field(name)) for name in known}
        return replace(self.settings, **given)  # type: ignore[type-var]

    def _field(self, variable: str) -> str:
        return variable[len(self.prefix) :].lower() if variable.startswith(self.prefix) else ""
