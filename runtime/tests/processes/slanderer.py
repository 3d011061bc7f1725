"""A whole agent of the cluster that reports every page it pulled as corrupt, though each was right.

Runs as `python slanderer.py`, with the agent's settings in the environment.
"""

from __future__ import annotations

import asyncio
import logging
import os

import numpy as np
from kvpeer.agent.config import load
from kvpeer.agent.main import _main
from kvpeer.core.pull import Commit, Effect, PullPlan, ReportCorrupt

_committed = PullPlan.committed


def _committed_and_slandered(self: PullPlan, commit: Commit, accepted: np.ndarray, now: float) -> list[Effect]:
    right = commit.fetch.portion.at(commit.indices)
    slots, generations = right.holders["slot"].copy(), right.holders["generation"].copy()
    slander = ReportCorrupt(right.producer, right.keys, slots, generations)
    return [*_committed(self, commit, accepted, now), slander]


if __name__ == "__main__":
    PullPlan.committed = _committed_and_slandered  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(_main(load(None, os.environ), is_embedded=False))
