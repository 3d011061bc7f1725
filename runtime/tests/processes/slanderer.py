"""A whole agent of the cluster that reports every page it pulled as corrupt, though each was right.

Runs as `python slanderer.py`, with the agent's settings in the environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import numpy as np
from kvpeer.agent.config import load
from kvpeer.agent.main import _main
from kvpeer.agent.puller import PeerPuller
from kvpeer.model import AgentId, Outcome

_account = PeerPuller._account


def _account_and_slander(
    self: PeerPuller,
    producer: AgentId,
    keys: bytes,
    partitions: np.ndarray,
    holders: np.ndarray,
    outcomes: np.ndarray,
    page_bytes: int,
) -> None:
    _account(self, producer, keys, partitions, holders, outcomes, page_bytes)
    right: Any = outcomes == Outcome.HIT
    rows = np.frombuffer(keys, dtype=np.uint8).reshape(-1, 16)[right]
    slots, generations = holders["slot"][right].copy(), holders["generation"][right].copy()
    self._s.corrupt_pages.report(producer, rows.tobytes(), slots, generations)


if __name__ == "__main__":
    PeerPuller._account = _account_and_slander  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(_main(load(None, os.environ), is_embedded=False))
