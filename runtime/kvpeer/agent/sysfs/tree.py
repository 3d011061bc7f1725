"""Reading small files below a root: bounded, and never an error. What is missing is None or empty; what is there and
cannot be read or understood is remembered by its path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvpeer.core.topology import natural

__all__ = ["ENTRIES_MAX", "FILE_BYTES_MAX", "UNREAD_MAX", "Tree", "parse_numbers"]

FILE_BYTES_MAX = 1 << 16
"""The kernel's files here have a page at most, but for /proc/meminfo and NVIDIA's, which have a few KiB."""

ENTRIES_MAX = 4096
"""In one folder: a host has hundreds of PCI devices, and a port 256 addresses."""

UNREAD_MAX = 64
"""Paths that are remembered; more say nothing new."""

NUMBERS_MAX = 1 << 16
"""In a list such as 0-55,112-167: no kernel has more CPUs."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,63}")

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Tree:
    """Files below `root`, which stands for /. Paths are given without a leading slash. Belongs to one thread."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._unread: dict[str, None] = {}

    @property
    def unread(self) -> tuple[str, ...]:
        """Paths, with a leading slash, of what was there and could not be read or understood."""
        return tuple(self._unread)

    def text(self, path: str) -> str | None:
        """What the file holds, without white space around it; None where there is none or it cannot be read. An entry
        that the kernel says is empty (EINVAL: an unused address) is not there."""
        try:
            with open(self._root / path, "rb", buffering=0) as file:
                return file.read(FILE_BYTES_MAX).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _ABSENT:
                self.fault(path)
            return None

    def name(self, path: str) -> str:
        """The name of a device that the file holds, fit to be a part of a path; empty where there is none."""
        text = self.text(path) or ""
        if text and not _NAME.fullmatch(text):
            self.fault(path)
            return ""
        return text

    def number(self, path: str) -> int | None:
        """The whole number that the file holds; None as in `text`."""
        text = self.text(path)
        if text is None:
            return None
        if not re.fullmatch(r"-?\d{1,18}", text):
            self.fault(path)
            return None
        return int(text)

    def numbers(self, path: str) -> frozenset[int]:
        """The numbers of a list of ranges; none where there is no such file."""
        text = self.text(path)
        if text is None:
            return frozenset()
        try:
            return parse_numbers(text)
        except ValueError:
            self.fault(path)
            return frozenset()

    def names(self, folder: str) -> list[str]:
        """The entries of a folder in natural order, at most ENTRIES_MAX; none where there is none."""
        try:
            with os.scandir(self._root / folder) as entries:
                found = [entry.name for entry, _ in zip(entries, range(ENTRIES_MAX + 1), strict=False)]
        except FileNotFoundError:
            return []
        except OSError:
            self.fault(folder)
            return []
        if len(found) > ENTRIES_MAX:
            self.fault(folder)
        return sorted(found, key=natural)[:ENTRIES_MAX]

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        return os.path.lexists(self._root / path)

    def target(self, path: str) -> tuple[str, ...]:
        """The parts of the real path below the root that a link leads to; empty where there is none."""
        if not self.exists(path):
            return ()
        root = os.path.realpath(self._root)
        return tuple(Path(os.path.relpath(os.path.realpath(self._root / path), root)).parts)

    def can_open(self, path: str) -> bool:
        """Whether this process may open a device for reading and writing: its cgroup has a say, not the mode alone."""
        try:
            os.close(os.open(self._root / path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    def fields(self, path: str) -> Iterator[tuple[str, str]]:
        """Name and value of each line `name: value`."""
        for line in (self.text(path) or "").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                yield name.strip(), value.strip()

    def fault(self, path: str) -> None:
        """Remembers a path that is there and cannot be used."""
        if len(self._unread) < UNREAD_MAX:
            self._unread[f"/{path}"] = None


_ABSENT = {22, 95}  # EINVAL, EOPNOTSUPP: the attribute exists and this entry has none


def parse_numbers(text: str) -> frozenset[int]:
    """The numbers of the kernel's lists: 0-3,8.

    Raises:
        ValueError: it is no such list, or has more than NUMBERS_MAX numbers.
    """
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is no range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + NUMBERS_MAX or len(numbers) > NUMBERS_MAX:
            raise ValueError(f"{part!r} has no or too many numbers")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)
