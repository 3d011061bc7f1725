"""Ownership of a native object: freed once, by `close` or by the garbage collector. Not at exit: threads that are still
inside a call would lose what they work on, and the kernel frees everything anyway."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from kvpeer.model import InternalError, LocalProtocolError

__all__ = ["Handle"]

_HandleType = TypeVar("_HandleType", bound="Handle")


class Handle:
    """Base of the wrappers: owns one native object. Usable as a context manager that closes at its end.

    `close` must not run while another thread is inside a call on the same object, unless the subclass says otherwise.
    """

    def __init__(self, pointer: int | None, destroy: Callable[[int], None]) -> None:
        if pointer is None:
            raise InternalError(f"the native library gave no {type(self).__name__}")
        self._native = pointer
        self._finalizer = weakref.finalize(self, destroy, pointer)
        self._finalizer.atexit = False

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self._finalizer.alive

    @property
    def _pointer(self) -> int:
        """The native object.

        Raises:
            LocalProtocolError: the handle is closed.
        """
        if not self._finalizer.alive:
            raise LocalProtocolError(f"{type(self).__name__} is closed")
        return self._native

    def close(self) -> None:
        """Frees the native object. Closing again does nothing."""
        self._finalizer()

    def __enter__(self: _HandleType) -> _HandleType:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
