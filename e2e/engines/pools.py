"""Scribbling over a pool, as a broken engine of its pod could: the agent's own socket hands out the mapping."""

from __future__ import annotations

import time
from pathlib import Path

from kvpeer.client.link import open_link
from kvpeer.client.settings import Registration
from kvpeer.core.chain import namespace_digest

__all__ = ["flip_pool"]

START_DEADLINE_S = 10.0


def flip_pool(socket: Path) -> None:
    """Inverts every byte of the pool behind this agent's socket."""
    fields = {"scribbler": "yes"}
    registration = Registration("scribbler", namespace_digest(fields), fields, 4096, 1, -1, 0, 0)
    link = open_link(str(socket), registration, time.monotonic() + START_DEADLINE_S)
    try:
        view = link.pool.payload_view()
        view ^= 0xFF
        del view
    finally:
        link.close()
