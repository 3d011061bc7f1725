"""In place of SGLang's compiled kernels, which have no wheel for a CPU. See ../README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, stops: Any, locations: Any, row_length: int
) -> None:
    """Writes each request's new token locations into its row of the table; `locations` are all of them in a row."""
    taken = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = locations[taken : taken + stop - start].to(table.dtype)
        taken += stop - start


def __getattr__(name: str) -> Callable[..., Any]:
    """Any other name can be imported, and raises when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return missing
