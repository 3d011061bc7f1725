"""Which page lies in which slot, in SQLite: small rows, committed in batches, read once when the folder is opened.

The index may say more than is true (a row whose slot was written anew when the agent was killed), never less than
wrong: what a row names is verified against its record when it is read. Belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from kvpeer.core.chain import NAMESPACE_BYTES
from kvpeer.core.disk import SLOTS_PER_SEGMENT, Condition, DiskPage, PageFacts
from kvpeer.model import KEY_BYTES, N_PARTITIONS, PARTS_MAX
from kvpeer.storage.conditions import BROKEN_INDEX_ERRORS, condition_of

__all__ = ["PageIndex"]

INDEX_NAME = "index.sqlite"
FORMAT_VERSION = 1

WAL_BYTES_MAX = 4 << 20
"""The log is cut to this size when it was larger; it is carried over into the index at each 1,000 pages of SQLite."""

_IO_ERROR = "I/O"  # what SQLite says of an error of the disk itself

_SCHEMA = f"""
BEGIN;
CREATE TABLE folder (segment_bytes INTEGER NOT NULL);
CREATE TABLE segments (number INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL);
CREATE TABLE pages (
    slot INTEGER PRIMARY KEY, key BLOB NOT NULL, partition INTEGER NOT NULL, namespace BLOB NOT NULL,
    length INTEGER NOT NULL, n_parts INTEGER NOT NULL, sequence INTEGER NOT NULL
);
PRAGMA user_version = {FORMAT_VERSION};
COMMIT;
"""


class PageIndex:
    """The file `index.sqlite`. Every method may raise sqlite3.Error; after one, the index is to be closed.

    An index that cannot be read, or is of another format or segment size, is started anew: it is a cache.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._path = folder / INDEX_NAME
        self._segment_bytes = segment_bytes
        self.slot_bytes_of: dict[int, int] = {}
        """The slot size of each segment, as it is committed."""
        self.pages: list[DiskPage] = []
        """What was found, in the order of its writing; to be taken by `take_pages`."""
        self._is_broken = False
        self._database = self._connect()
        with contextlib.ExitStack() as undo:
            # Whoever has the error has this object, too: a connection would stay open, and keep the index locked.
            undo.callback(lambda: self._database.close())
            if not self._is_usable():
                self._start_anew()
            undo.pop_all()

    def take_pages(self) -> list[DiskPage]:
        """What was found; they are the caller's from then on."""
        pages, self.pages = self.pages, []
        return pages

    def commit(self, slot_bytes_of: Mapping[int, int], pages: Iterable[DiskPage], dropped: Iterable[int]) -> None:
        """Enters pages, which are durable; drops the rows of slots before that. `slot_bytes_of`: of the segments of the
        pages; where a size is new, all that was known of the segment is dropped, too."""
        new = {number: size for number, size in slot_bytes_of.items() if self.slot_bytes_of.get(number) != size}
        with self._transaction() as database:
            for number, slot_bytes in new.items():
                slots = (number * SLOTS_PER_SEGMENT, (number + 1) * SLOTS_PER_SEGMENT)
                database.execute("DELETE FROM pages WHERE slot >= ? AND slot < ?", slots)
                database.execute("REPLACE INTO segments VALUES (?, ?)", (number, slot_bytes))
            database.executemany("DELETE FROM pages WHERE slot = ?", [(slot,) for slot in dropped])
            rows = [(page.slot, page.sequence, page.facts) for page in pages]
            database.executemany(
                "REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(slot, f.key, f.partition, f.namespace, f.length, f.n_parts, seq) for slot, seq, f in rows],
            )
        self.slot_bytes_of.update(new)

    def forget(self, namespace: bytes) -> None:
        """Drops the rows of a namespace, durably: they do not come back after a power cut either."""
        with self._transaction() as database:
            database.execute("DELETE FROM pages WHERE namespace = ?", (namespace,))
        self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def drop_segments(self, numbers: Collection[int]) -> None:
        """Drops segments with their rows."""
        with self._transaction() as database:
            for number in numbers:
                slots = (number * SLOTS_PER_SEGMENT, (number + 1) * SLOTS_PER_SEGMENT)
                database.execute("DELETE FROM pages WHERE slot >= ? AND slot < ?", slots)
                database.execute("DELETE FROM segments WHERE number = ?", (number,))
        for number in numbers:
            self.slot_bytes_of.pop(number, None)

    def close(self) -> None:
        """One that turned out to be broken is removed, and started anew the next time."""
        try:
            self._database.close()
        finally:
            if self._is_broken:
                self._remove()

    # ---- inside

    def _is_usable(self) -> bool:
        """Whether this is an index of ours; then it is loaded."""
        try:
            self._set_up()
            return self._load()
        except BROKEN_INDEX_ERRORS:
            return False
        except sqlite3.Error as error:
            if not _is_the_files_fault(error):
                raise
            return False

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=1.0, isolation_level=None, check_same_thread=False)

    def _set_up(self) -> None:
        database = self._database
        database.text_factory = bytes  # no text of ours is in it
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        # Durable against a kill at once; against a power cut from the next checkpoint on. A row that is lost costs a
        # page, and one that comes back is verified like any other.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")

    def _load(self) -> bool:
        """Reads everything; rows that cannot be are left out. False if the index is of no use here."""
        database = self._database
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != FORMAT_VERSION:
            return False
        if database.execute("SELECT segment_bytes FROM folder").fetchall() != [(self._segment_bytes,)]:
            return False
        for number, slot_bytes in database.execute("SELECT number, slot_bytes FROM segments"):
            if _is_int(number) and number >= 0 and _is_int(slot_bytes) and 0 < slot_bytes <= self._segment_bytes:
                self.slot_bytes_of[number] = slot_bytes
        columns = "slot, sequence, key, partition, namespace, length, n_parts"
        newest: dict[bytes, DiskPage] = {}
        for row in database.execute(f"SELECT {columns} FROM pages ORDER BY sequence DESC"):  # noqa: S608 - a constant
            page = _page(*row)
            if page is not None and page.slot // SLOTS_PER_SEGMENT in self.slot_bytes_of:
                newest.setdefault(page.facts.key, page)
        self.pages = list(reversed(newest.values()))
        return True

    def _start_anew(self) -> None:
        self.slot_bytes_of, self.pages = {}, []
        self._database.close()
        self._remove()
        self._database = self._connect()
        self._set_up()
        self._database.executescript(_SCHEMA)
        self._database.execute("INSERT INTO folder VALUES (?)", (self._segment_bytes,))

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(INDEX_NAME + suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException as error:
            self._is_broken = isinstance(error, BROKEN_INDEX_ERRORS) or _is_the_files_fault(error)
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def _is_the_files_fault(error: BaseException) -> bool:
    """Whether it is the index that is broken, and not the file system."""
    if not isinstance(error, sqlite3.Error):
        return False
    return condition_of(error) is Condition.FAILING and _IO_ERROR not in str(error)


def _page(
    slot: object, sequence: object, key: object, partition: object, namespace: object, length: object, n_parts: object
) -> DiskPage | None:
    """The page of a row, or None if it cannot be one. It may still not be there: that is for its record to say."""
    if not (isinstance(key, bytes) and len(key) == KEY_BYTES):
        return None
    if not (isinstance(namespace, bytes) and len(namespace) == NAMESPACE_BYTES):
        return None
    if not (_is_int(slot) and _is_int(sequence) and _is_int(partition) and _is_int(length) and _is_int(n_parts)):
        return None
    if not (0 <= slot < 1 << 32 and 0 < sequence < 1 << 63 and 0 <= partition < N_PARTITIONS):
        return None
    if not (0 < length < 1 << 32 and 1 <= n_parts <= PARTS_MAX):
        return None
    return DiskPage(PageFacts(key, partition, namespace, length, n_parts), slot, sequence)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int)
