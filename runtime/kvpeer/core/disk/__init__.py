"""The decisions of the disk tier: which page lies where, which go, what is written next, and when a disk is given up.

Pure: `kvpeer.storage` does the reading and writing.
"""

from kvpeer.core.disk.health import Condition, DiskHealth
from kvpeer.core.disk.pages import DiskPage, DiskPages, PageFacts
from kvpeer.core.disk.segments import SLOTS_PER_SEGMENT, Segments
from kvpeer.core.disk.write_queue import Offer, WriteQueue

__all__ = [
    "SLOTS_PER_SEGMENT",
    "Condition",
    "DiskHealth",
    "DiskPage",
    "DiskPages",
    "Offer",
    "PageFacts",
    "Segments",
    "WriteQueue",
]
