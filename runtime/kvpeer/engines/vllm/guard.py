"""The boundary where errors end: nothing that goes wrong in kvpeer reaches the engine that calls it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvpeer.engines.vllm.tally import Tally

__all__ = ["guarded"]

_logger = logging.getLogger("vllm.kvpeer")

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Counting(Protocol):
    _tally: Tally


def guarded(answer: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Makes a method answer `answer()` instead of raising: the error is logged, and counted in the object's `_tally`
    as `kvpeer_vllm_errors_total`."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: _Counting, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                _logger.exception("kvpeer: %s failed; the engine goes on without it", method.__name__)
                self._tally.count("errors", method.__name__)
                return answer()

        return guarded  # type: ignore[return-value]

    return decorate
