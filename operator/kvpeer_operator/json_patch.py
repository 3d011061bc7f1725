"""The JSON Patch (RFC 6902) between two objects. Pure, and the same each time: the order is that of the objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["json_patch"]


def json_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """The operations that make `after` of `before`. A list that got longer keeps its items and gets further ones; one
    that got shorter is replaced."""
    return list(_operations(before, after, ""))


def _operations(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from ({"op": "remove", "path": _below(path, key)} for key in before if key not in after)
        for key, value in after.items():
            if key in before:
                yield from _operations(before[key], value, _below(path, key))
            else:
                yield {"op": "add", "path": _below(path, key), "value": value}
    elif isinstance(before, list) and isinstance(after, list) and len(before) <= len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from _operations(old, new, _below(path, str(index)))
        yield from ({"op": "add", "path": f"{path}/-", "value": value} for value in after[len(before) :])
    elif type(before) is not type(after) or before != after:
        yield {"op": "replace", "path": path, "value": after}


def _below(path: str, key: str) -> str:
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
