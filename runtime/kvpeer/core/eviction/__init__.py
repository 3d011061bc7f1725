"""Eviction policies, one per file. A policy only orders slots; which of them may go is the slot table's business."""

from kvpeer.core.eviction.base import EvictionPolicy
from kvpeer.core.eviction.lru import LeastRecentlyUsed

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]
