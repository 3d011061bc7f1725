"""Where the cluster's programs and its state are."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "REPOSITORY", "cache_folder", "state_folder"]

CACHE_VARIABLE = "KVPEER_CLUSTER_CACHE"
REPOSITORY = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """What is kept between clusters: programs, base images. Made where it is missing."""
    folder = Path(os.environ.get(CACHE_VARIABLE) or REPOSITORY / "build" / "cluster").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def state_folder() -> Path:
    """What one cluster has: keys, logs, etcd, the nodes' disks. There is one cluster for a cache folder."""
    return cache_folder() / "state"
