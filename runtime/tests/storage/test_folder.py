"""The folder over real files and a real SQLite: what is committed is read back, before and after a restart."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from kvpeer.core.disk import SLOTS_PER_SEGMENT, Condition, DiskPage
from kvpeer.model import Outcome
from kvpeer.storage import DiskError
from kvpeer.storage.folder import DiskFolder, PageWrite

from storage.pool_memory import N_SEGMENTS, SEGMENT_BYTES, SLOT_BYTES, PoolMemory, content, key_of, open_folder, write

TARGET_SLOT = 40


def read(folder: DiskFolder, memory: PoolMemory, page: DiskPage) -> Outcome | bytes:
    """The page's bytes, or what came instead."""
    memory.view[TARGET_SLOT * SLOT_BYTES : (TARGET_SLOT + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
    place = folder.pages.segments.place(page.slot)
    got = folder.read(page, *place, memory.address + TARGET_SLOT * SLOT_BYTES)
    return memory.bytes_of(TARGET_SLOT) if got.outcome is Outcome.HIT else got.outcome


@pytest.fixture
def memory() -> PoolMemory:
    return PoolMemory()


def test_pages_are_read_back_and_found_again_after_a_restart(tmp_path: Path, memory: PoolMemory) -> None:
    folder = open_folder(tmp_path / "kv")
    pages = write(folder, [memory.put(number) for number in range(6)])
    assert [read(folder, memory, page) for page in pages] == [content(number) for number in range(6)]
    folder.close()
    folder = open_folder(tmp_path / "kv")
    found = folder.pages.all()
    assert [page.facts.key for page in found] == [key_of(number) for number in range(6)]
    assert [read(folder, memory, page) for page in found] == [content(number) for number in range(6)]
    (after,) = write(folder, [memory.put(9)])
    assert after.sequence > max(page.sequence for page in found), "a sequence is not used twice"
    folder.close()


def test_files_have_their_size_from_the_start_and_never_another(tmp_path: Path, memory: PoolMemory) -> None:
    folder = open_folder(tmp_path / "kv")
    for number in range(100):
        write(folder, [memory.put(number)])
        files = {path.name: path.stat() for path in (tmp_path / "kv").glob("*.pages")}
        assert {status.st_size for status in files.values()} == {SEGMENT_BYTES}
        assert len(files) <= N_SEGMENTS
    assert all(status.st_blocks * 512 >= SEGMENT_BYTES for status in files.values()), "the room is reserved"
    assert folder.pages.n_evicted == 100 - len(folder.pages)
    folder.close()
    folder = open_folder(tmp_path / "kv")
    kept = folder.pages.all()
    assert [read(folder, memory, page) for page in kept] == [content(n) for n in range(100 - len(kept), 100)]
    folder.close()


@pytest.mark.parametrize("byte", [0, 20, 4096, 4096 + 9_999], ids=["magic", "key", "first byte", "last byte"])
def test_a_page_that_was_damaged_on_the_disk_is_no_hit(tmp_path: Path, memory: PoolMemory, byte: int) -> None:
    folder = open_folder(tmp_path / "kv")
    (page,) = write(folder, [memory.put(1)])
    _flip(tmp_path / "kv" / "0.pages", byte)
    assert read(folder, memory, page) is (Outcome.STALE if byte < 4096 else Outcome.CORRUPT)
    folder.close()


def test_a_row_whose_slot_was_written_anew_is_no_hit(tmp_path: Path, memory: PoolMemory) -> None:
    """As after a kill between the write of a page and the commit of its row."""
    folder = open_folder(tmp_path / "kv")
    (old,) = write(folder, [memory.put(1)])
    folder.pages.drop(old)
    offer = memory.put(2)
    new = folder.pages.begin(offer.facts)
    assert new.slot == old.slot
    folder.write([PageWrite(new, offer, *folder.pages.segments.place(new.slot))])
    folder.close()
    folder = open_folder(tmp_path / "kv")
    (found,) = folder.pages.all()
    assert found.facts.key == key_of(1)
    assert read(folder, memory, found) is Outcome.STALE
    folder.close()


def test_a_namespace_that_was_forgotten_does_not_come_back(tmp_path: Path, memory: PoolMemory) -> None:
    folder = open_folder(tmp_path / "kv")
    write(folder, [memory.put(1, b"a" * 32), memory.put(2, b"b" * 32)])
    folder.forget(b"a" * 32)
    folder.close()
    folder = open_folder(tmp_path / "kv")
    assert [page.facts.key for page in folder.pages.all()] == [key_of(2)]
    folder.close()


def test_one_agent_has_the_folder_until_it_ends(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    with pytest.raises(DiskError, match="another agent") as caught:
        open_folder(tmp_path / "kv")
    assert caught.value.condition is Condition.LOCKED
    folder.close()
    open_folder(tmp_path / "kv").close()


def test_a_folder_without_a_parent_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(DiskError) as caught:
        open_folder(tmp_path / "not mounted" / "kv")
    assert caught.value.condition is Condition.VANISHED


def test_a_folder_that_was_replaced_has_vanished(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    folder.check()
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    with pytest.raises(DiskError) as caught:
        folder.check()
    assert caught.value.condition is Condition.VANISHED
    open_folder(tmp_path / "kv").close()
    with pytest.raises(DiskError):
        folder.check()
    folder.close()


def test_fewer_segments_than_before_keep_their_pages_and_give_the_rest_back(tmp_path: Path, memory: PoolMemory) -> None:
    folder = open_folder(tmp_path / "kv")
    for number in range(20):
        write(folder, [memory.put(number)])
    assert {page.slot // SLOTS_PER_SEGMENT for page in folder.pages.all()} == {0, 1}
    folder.close()
    folder = DiskFolder(tmp_path / "kv", 1, SEGMENT_BYTES)
    assert {page.slot // SLOTS_PER_SEGMENT for page in folder.pages.all()} == {0}
    assert [path.name for path in (tmp_path / "kv").glob("*.pages")] == ["0.pages"]
    folder.close()


def test_another_segment_size_starts_anew(tmp_path: Path, memory: PoolMemory) -> None:
    folder = open_folder(tmp_path / "kv")
    write(folder, [memory.put(1)])
    folder.close()
    folder = DiskFolder(tmp_path / "kv", N_SEGMENTS, 2 * SEGMENT_BYTES)
    assert folder.pages.all() == []
    assert not list((tmp_path / "kv").glob("*.pages"))
    write(folder, [memory.put(1)])
    folder.close()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "other version", "no tables"])
def test_an_index_that_cannot_be_read_is_started_anew(tmp_path: Path, memory: PoolMemory, damage: str) -> None:
    folder = open_folder(tmp_path / "kv")
    write(folder, [memory.put(1)])
    folder.close()
    index = tmp_path / "kv" / "index.sqlite"
    if damage == "garbage":
        index.write_bytes(os.urandom(8192))
    elif damage == "truncated":
        index.write_bytes(index.read_bytes()[:5000])
    else:
        database = sqlite3.connect(index)
        database.execute("PRAGMA user_version = 99" if damage == "other version" else "DROP TABLE folder")
        database.commit()
        database.close()
    folder = open_folder(tmp_path / "kv")
    assert folder.pages.all() == []
    write(folder, [memory.put(1)])
    folder.close()
    folder = open_folder(tmp_path / "kv")
    assert len(folder.pages) == 1
    folder.close()


def test_an_index_that_breaks_while_it_is_used_is_started_anew_by_the_next_run(
    tmp_path: Path, memory: PoolMemory
) -> None:
    folder = open_folder(tmp_path / "kv")
    write(folder, [memory.put(1)])
    folder._index._database.execute("DROP TABLE pages")
    with pytest.raises(DiskError) as caught:
        write(folder, [memory.put(2)])
    assert caught.value.condition is Condition.FAILING
    folder.close()
    folder = open_folder(tmp_path / "kv")
    assert folder.pages.all() == []
    write(folder, [memory.put(3)])
    folder.close()


def test_rows_that_cannot_be_are_left_out(tmp_path: Path, memory: PoolMemory) -> None:
    folder = open_folder(tmp_path / "kv")
    write(folder, [memory.put(1)])
    folder.close()
    database = sqlite3.connect(tmp_path / "kv" / "index.sqlite")
    right = (1, key_of(2), 0, b"n" * 32, 10_000, 1, 5)
    wrong = {"slot": (0, [-1, 1 << 40, 9_999, 5 * SLOTS_PER_SEGMENT]), "key": (1, [b"", "text"]),
             "partition": (2, [4096, -1]), "namespace": (3, [b"n"]), "length": (4, [0, -5, 1 << 33, 200_000]),
             "n_parts": (5, [0, 65]), "sequence": (6, [0, -1, 1.5])}  # fmt: skip
    for place, values in wrong.values():
        for value in values:
            row = list(right)
            row[place] = value
            database.execute("REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            database.commit()
            database.close()
            folder = open_folder(tmp_path / "kv")
            assert [page.facts.key for page in folder.pages.all()] == [key_of(1)], (place, value)
            folder.pages.check()
            folder.close()
            database = sqlite3.connect(tmp_path / "kv" / "index.sqlite")
            database.execute("DELETE FROM pages WHERE key != ?", (key_of(1),))
    database.commit()
    database.close()


def test_where_direct_io_cannot_be_had_the_page_cache_is_used(
    tmp_path: Path, memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = os.open

    def refuse_direct(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "this file system has no direct I/O")
        return opening(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse_direct)
    folder = open_folder(tmp_path / "kv")
    (page,) = write(folder, [memory.put(1)])
    assert not folder.is_direct
    assert read(folder, memory, page) == content(1)
    folder.close()


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system with room for one segment and the index."""
    path = tmp_path / "mounted"
    path.mkdir()
    size = SEGMENT_BYTES + (200 << 10)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if done.returncode:
        pytest.skip("mounting needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_file_system_without_room_for_a_segment_is_full_and_what_is_there_goes_on(
    small_disk: Path, memory: PoolMemory
) -> None:
    folder = open_folder(small_disk / "kv")
    pages = write(folder, [memory.put(number) for number in range(16)])
    assert {page.slot // SLOTS_PER_SEGMENT for page in pages} == {0}
    offer = memory.put(16)
    page = folder.pages.begin(offer.facts)
    segment, offset = folder.pages.segments.place(page.slot)
    assert segment == 1
    assert folder.write([PageWrite(page, offer, segment, offset)]) == {1}
    assert not (small_disk / "kv" / "1.pages").exists(), "what was reserved of it is given back"
    folder.pages.refuse_segment(1)
    assert read(folder, memory, pages[0]) == content(0)
    (page,) = write(folder, [memory.put(17)])
    assert read(folder, memory, page) == content(17), "it evicts instead"
    folder.close()


def test_an_index_that_could_not_be_opened_locks_nobody_out(small_disk: Path) -> None:
    """Whoever tries again has the error of the time before still in hand, and with it all that its frames hold."""
    others = small_disk / "others"
    kept: list[DiskError] = []
    for left_bytes in range(0, 40 << 10, 4 << 10):  # so that it fails at each step of opening
        others.write_bytes(bytes(SEGMENT_BYTES + (200 << 10) - left_bytes))
        try:
            open_folder(small_disk / "kv").close()
        except DiskError as error:
            kept.append(error)
        others.unlink()
        open_folder(small_disk / "kv").close()
        for path in (small_disk / "kv").iterdir():
            path.unlink()
    assert {error.condition for error in kept} == {Condition.FULL}


def test_a_disk_that_becomes_read_only_says_so(small_disk: Path, memory: PoolMemory) -> None:
    folder = open_folder(small_disk / "kv")
    write(folder, [memory.put(1)])
    folder.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(DiskError) as caught:
        open_folder(small_disk / "kv")
    assert caught.value.condition is Condition.READ_ONLY


WRITES_FOR_EVER = """
import sys
from pathlib import Path
from storage.pool_memory import PoolMemory, open_folder, write
memory, folder, number = PoolMemory(), open_folder(Path(sys.argv[1])), int(sys.argv[2])
print(len(folder.pages), flush=True)
while True:
    fresh = [memory.put(n) for n in range(number, number + 7)]
    write(folder, fresh)
    number += 7
    print(number, flush=True)
"""


def test_a_kill_at_any_moment_loses_at_most_what_was_not_committed_and_leaves_nothing_torn(
    tmp_path: Path, memory: PoolMemory
) -> None:
    path, number, n_found = tmp_path / "kv", 0, 0
    runtime = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{runtime}:{runtime / 'tests'}"}
    for n_batches in range(1, 9):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES_FOR_EVER, str(path), str(number)], stdout=subprocess.PIPE, env=environment
        )
        assert writer.stdout is not None
        assert int(writer.stdout.readline()) == n_found
        for _ in range(n_batches):
            number = int(writer.stdout.readline())
        writer.kill()
        writer.communicate()
        folder = open_folder(path)
        found = {page.facts.key: page for page in folder.pages.all()}
        n_found = len(found)
        bytes_of = {key: read(folder, memory, page) for key, page in found.items()}
        folder.close()
        torn = [key for key, got in bytes_of.items() if not isinstance(got, bytes)]
        assert len(torn) <= 7, "no more than the batch that was being written"
        for key, got in bytes_of.items():
            if isinstance(got, bytes):
                assert got == content(int.from_bytes(key, "big"))
        kept = {int.from_bytes(key, "big") for key in found} - {int.from_bytes(key, "big") for key in torn}
        assert kept >= set(range(max(0, number - 7), number)), "what was committed last is there"


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
