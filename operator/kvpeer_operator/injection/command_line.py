"""Finding the engine's command line in a container, and adding flags to it.

Three forms: the image's own entry point with args; command and args, one word an item; a script of a shell. Flags go
behind the last word, or, in a script, directly behind the words that start the engine, where they need no knowledge of
what follows (redirections, `&`, further commands).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

__all__ = ["CommandLine", "Engine", "command_engines", "find_command_line"]


class Engine(str, Enum):
    VLLM = "vllm"
    SGLANG = "sglang"


_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_SCRIPT_OPTION = re.compile(r"-[a-z]*c")
_ISOLATING = frozenset({"-I", "-E", "-i"})
"""Options of Python and env(1) after which PYTHONPATH is not read."""

_PROGRAM = {Engine.VLLM: ("vllm", "serve"), Engine.SGLANG: ("sglang", "serve")}
_MODULE = {Engine.VLLM: "vllm.entrypoints.openai.api_server", Engine.SGLANG: "sglang.launch_server"}
_STARTS = {
    engine: re.compile(
        rf"(?<![\w./-])(?:[\w./-]*/)?{program}[ \t]+{verb}(?=\s|$)|(?<=\s)-m[ \t]+{re.escape(_MODULE[engine])}(?=\s|$)"
    )
    for engine, (program, verb) in _PROGRAM.items()
}
_PATH_SET = re.compile(r"\bPYTHONPATH=(?![^\s;]*\$\{?PYTHONPATH\b)")
"""An assignment that drops what was there before."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """An engine's command line in a container. `words` are those behind the start of the engine."""

    words: tuple[str, ...]
    field: str
    """"command" or "args": where flags go."""
    index: int
    """Of the script in that list; -1: flags are further items of it."""
    offset: int
    """In the script, where flags go."""

    def has(self, *flags: str) -> bool:
        """Whether one of these flags is given, as `--a-flag`, `--a_flag`, `--a-flag=value` or `--a-flag.key`."""
        return any(_flag(word) in flags for word in self.words)

    def value(self, *flags: str) -> str | None:
        """The value of the last of these flags that is given; empty for one without. None: none is given."""
        found = None
        for word, following in pairwise((*self.words, "")):
            if _flag(word) in flags:
                found = word.partition("=")[2] if "=" in word else ("" if following.startswith("--") else following)
        return found

    def with_flags(self, container: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
        """The container with these flags added."""
        items = list(container.get(self.field) or ())
        if self.index < 0:
            return {**container, self.field: [*items, *flags]}
        script = items[self.index]
        items[self.index] = f"{script[: self.offset]} {shlex.join(flags)}{script[self.offset :]}"
        return {**container, self.field: items}


def command_engines(container: Mapping[str, Any]) -> set[Engine]:
    """The engines that the container's command or args name."""
    text = " ".join(_items(container))
    return {engine for engine, start in _STARTS.items() if start.search(text)}


def find_command_line(container: Mapping[str, Any], engine: Engine) -> CommandLine | None:
    """The engine's command line; None where flags cannot safely be added: nothing that starts the engine, more than
    one, inside quotes or a here-document, or where PYTHONPATH is set anew or not read."""
    items = _items(container)
    if any(_PATH_SET.search(item) for item in items):
        return None
    script = _script_index(items)
    if script is not None:
        return _in_script(container, items[script], script, engine)
    start = _start(items, engine)
    if start is None:
        # The image's own entry point starts the engine; without args its own ones would be replaced.
        usual = not container.get("command") and container.get("args") and engine is Engine.VLLM
        return CommandLine(tuple(items), "args", -1, 0) if usual else None
    if _ISOLATING.intersection(items[:start]):
        return None
    return CommandLine(tuple(items[start:]), "args", -1, 0)


def _items(container: Mapping[str, Any]) -> list[str]:
    return [str(item) for item in (*(container.get("command") or ()), *(container.get("args") or ()))]


def _script_index(items: Sequence[str]) -> int | None:
    """Index of the item that a shell runs as its script."""
    if not items or PurePosixPath(items[0]).name not in _SHELLS:
        return None
    for index, item in enumerate(items[1:-1], start=1):
        if _SCRIPT_OPTION.fullmatch(item):
            return index + 1
    return None


def _start(items: Sequence[str], engine: Engine) -> int | None:
    """Index behind the words that start the engine."""
    for index, (first, second) in enumerate(pairwise(items)):
        is_program = (PurePosixPath(first).name, second) == _PROGRAM[engine]
        if is_program or (first, second) == ("-m", _MODULE[engine]):
            return index + 2
    return None


def _in_script(container: Mapping[str, Any], script: str, index: int, engine: Engine) -> CommandLine | None:
    starts = list(_STARTS[engine].finditer(script))
    if len(starts) != 1 or not _is_plain(script, starts[0].start()):
        return None
    offset = starts[0].end()
    line_start = max(script.rfind(mark, 0, starts[0].start()) for mark in "\n;&|(") + 1
    if _ISOLATING.intersection(script[line_start : starts[0].start()].split()):
        return None
    try:
        words = shlex.split(script[offset:])
    except ValueError:
        return None
    n_command = len(container.get("command") or ())
    field, at = ("command", index) if index < n_command else ("args", index - n_command)
    return CommandLine(tuple(words), field, at, offset)


def _is_plain(script: str, end: int) -> bool:
    """Whether what stands at `end` is read by the shell as words: not in quotes, a comment or a here-document."""
    quote, position = "", 0
    while position < end:
        char = script[position]
        if quote:
            if char == "\\" and quote == '"':
                position += 1
            elif char == quote:
                quote = ""
        elif char == "\\":
            position += 1
        elif char in "'\"`":
            quote = char
        elif script.startswith("<<", position):
            return False
        elif char == "#" and (position == 0 or script[position - 1] in " \t\n;"):
            position = script.find("\n", position)
            if not 0 <= position < end:
                return False
        position += 1
    return not quote


def _flag(word: str) -> str:
    """The flag's plain name, for any way to write it; words that are no long flags stay."""
    if not word.startswith("--"):
        return word.partition("=")[0]
    return word.partition("=")[0].partition(".")[0].replace("_", "-")
