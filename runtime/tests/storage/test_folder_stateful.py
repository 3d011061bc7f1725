"""Whatever is written, dropped, forgotten and torn in whatever order: a copy of the folder at any moment, as a kill
would leave it, opens to every page that was committed and is wanted, and to no wrong byte."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvpeer.model import Outcome
from kvpeer.storage.folder import PageWrite

from storage.pool_memory import SLOT_BYTES, PoolMemory, content, key_of, open_folder

TARGET_SLOT = 63
NAMESPACES = (b"a" * 32, b"b" * 32)
NUMBERS = st.integers(0, 60)


class Folder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvpeer-folder-"))
        self.memory = PoolMemory()
        self.n_copies = 0
        self.folder = open_folder(self.root / "0")
        self.model: dict[bytes, bytes] = {}  # key -> namespace, of all that is committed and wanted
        self.dropped: list[int] = []

    def teardown(self) -> None:
        self.folder.close()
        shutil.rmtree(self.root)

    def _begin(self, numbers: set[int], namespace: bytes) -> list[PageWrite]:
        writes = []
        for number in numbers:
            offer = self.memory.put(number, namespace)
            page = self.folder.pages.begin(offer.facts)
            if page is not None:
                writes.append(PageWrite(page, offer, *self.folder.pages.segments.place(page.slot)))
        for page in self.folder.pages.take_gone():
            del self.model[page.facts.key]
        return writes

    @rule(numbers=st.sets(NUMBERS, min_size=1, max_size=12), namespace=st.sampled_from(NAMESPACES))
    def write(self, numbers: set[int], namespace: bytes) -> None:
        writes = self._begin(numbers, namespace)
        assert self.folder.write(writes) == set()
        sizes = self.folder.pages.segments.slot_bytes_of
        self.folder.commit({w.segment: sizes[w.segment] for w in writes}, [w.page for w in writes], self.dropped)
        self.dropped = []
        for write in writes:
            assert self.folder.pages.stored(write.page)
            self.model[write.page.facts.key] = namespace

    @rule(numbers=st.sets(NUMBERS, min_size=1, max_size=12), is_killed=st.booleans())
    def write_without_committing(self, numbers: set[int], is_killed: bool) -> None:
        """As when the agent is killed in between, or the pages moved in the pool meanwhile."""
        writes = self._begin(numbers, NAMESPACES[0])
        self.folder.write(writes)
        if is_killed:
            self._open_copy()
        else:
            for write in writes:
                self.folder.pages.failed(write.page)

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        page = self.folder.pages.find(key_of(number))
        if page is not None:
            self.folder.pages.drop(page)
            self.folder.pages.take_gone()
            self.dropped.append(page.slot)
            del self.model[page.facts.key]

    @rule(namespace=st.sampled_from(NAMESPACES))
    def forget(self, namespace: bytes) -> None:
        self.folder.pages.forget(namespace)
        self.folder.pages.take_gone()
        self.folder.forget(namespace)
        self.model = {key: theirs for key, theirs in self.model.items() if theirs != namespace}

    @rule()
    def kill(self) -> None:
        self._open_copy()

    def _open_copy(self) -> None:
        self.n_copies += 1
        path = self.root / str(self.n_copies)
        shutil.copytree(self.root / str(self.n_copies - 1), path)
        self.folder.close()
        self.folder, self.dropped = open_folder(path), []
        found = {page.facts.key: page for page in self.folder.pages.all()}
        assert found.keys() >= self.model.keys()
        for key, page in found.items():
            got = self._read(page)
            assert got == content(int.from_bytes(key, "big")) or (got is Outcome.STALE and key not in self.model)
            if got is Outcome.STALE:
                self.folder.pages.drop(page)
                self.dropped.append(page.slot)
            else:
                self.model[key] = page.facts.namespace  # one that was evicted may be back: right, if no longer needed
        self.folder.pages.take_gone()

    def _read(self, page) -> bytes | Outcome:
        place = self.folder.pages.segments.place(page.slot)
        got = self.folder.read(page, *place, self.memory.address + TARGET_SLOT * SLOT_BYTES)
        return self.memory.bytes_of(TARGET_SLOT) if got.outcome is Outcome.HIT else got.outcome

    @invariant()
    def agree(self) -> None:
        self.folder.pages.check()
        assert {page.facts.key for page in self.folder.pages.all()} == self.model.keys()


Folder.TestCase.settings = settings(max_examples=15, stateful_step_count=15)
TestFolder = Folder.TestCase
