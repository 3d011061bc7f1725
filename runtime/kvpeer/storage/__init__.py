"""The disk tier: pages of the pool are written through to files, and read back after the pool evicted them.

    DiskStore   what an agent uses: a bounded queue, threads, and whether the disk is in use (asyncio, never blocks)
      DiskThreads  one that writes, and some that read: pages that lie side by side in one call (ReadThreads)
      DiskFolder   the folder, as blocking calls for those threads: open, write a batch, read a page, forget
        FolderLock    one agent a folder
        SegmentFiles  preallocated files, direct I/O
        PageIndex     which page lies in which slot (SQLite)
        record        the block in front of each page that proves what follows

What is decided (places, eviction, the queue, when to give up) is decided in `kvpeer.core.disk`. A page is served only
after its record and the checksums of its bytes were verified; its row is committed only after its bytes are durable.
"""

from kvpeer.storage.base import DiskEvents, DiskSettings, PoolPages
from kvpeer.storage.conditions import DiskError
from kvpeer.storage.folder import DiskFolder
from kvpeer.storage.store import DiskStore

__all__ = ["DiskError", "DiskEvents", "DiskFolder", "DiskSettings", "DiskStore", "PoolPages"]
