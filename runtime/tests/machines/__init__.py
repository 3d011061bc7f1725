"""Machines as trees of /sys, /proc and /dev, in a text that is expanded into a folder.

Made by hand after public documentation: the kernel's Documentation/ABI (sysfs-class-infiniband, sysfs-bus-pci, node),
NVIDIA's DGX H100 and GB200 system guides, AWS's EFA guide. Numbers of buses, addresses and names are invented.

A line of the text is `path = content`, `path -> target` (a link; the target is a path from the root), `path/` (an empty
folder), or belongs to a block `define NAME ARGUMENTS ... end`, whose lines have {ARGUMENT} in them and which is used as
`NAME VALUES`. `# ` begins a comment. In a content, `\\n`
is a line break, `\\t` a tab, `~` a blank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["SHAPES", "expand", "shape_text"]

_FOLDER = Path(__file__).parent / "shapes"

SHAPES = tuple(sorted(file.stem for file in _FOLDER.glob("*.tree")))


def shape_text(name: str, suffix: str = ".tree") -> str:
    """A shape's tree, or what is expected of it."""
    return (_FOLDER / f"{name}{suffix}").read_text()


def expand(text: str, root: Path) -> Path:
    """Makes the tree below `root`, which is returned."""
    for line in _lines(_with_common(text)):
        if " -> " in line:
            path, target = (part.strip() for part in line.split(" -> "))
            link = root / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(root / target, link.parent))
        elif " = " in line:
            path, content = (part.strip() for part in line.split(" = ", 1))
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.replace("\\n", "\n").replace("\\t", "\t").replace("~", " ") + "\n")
        else:
            assert line.endswith("/"), line
            (root / line).mkdir(parents=True, exist_ok=True)
    return root


def _with_common(text: str) -> list[str]:
    return [*(_FOLDER / "common.txt").read_text().splitlines(), *text.splitlines()]


def _lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines with blocks put in where they are used."""
    blocks: dict[str, tuple[list[str], list[str]]] = {}
    body: list[str] | None = None
    for raw in lines:
        line = raw.partition("# ")[0].strip()
        words = line.split()
        if not words:
            continue
        if words[0] == "define":
            body = []
            blocks[words[1]] = (words[2:], body)
        elif words[0] == "end":
            body = None
        elif body is not None:
            body.append(line)
        elif words[0] in blocks:
            names, template = blocks[words[0]]
            assert len(names) == len(words) - 1, line
            values = dict(zip(names, words[1:], strict=True))
            yield from _lines([*_definitions(blocks), *(each.format(**values) for each in template)])
        else:
            yield line


def _definitions(blocks: dict[str, tuple[list[str], list[str]]]) -> Iterator[str]:
    """So that blocks can use blocks."""
    for name, (names, body) in blocks.items():
        yield " ".join(["define", name, *names])
        yield from body
        yield "end"
