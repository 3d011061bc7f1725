"""Pages of a host pool at a real agent: by number and by tensor they are the same, and nothing else is touched."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from host_pools import N_PAGES, PAGE_TOKENS, CopiesOnly, FlatPage, HostPool
from kvpeer.client import Client, ClientSettings, Registration
from kvpeer.core.chain import namespace_digest
from kvpeer.core.policy import Action, Decision
from kvpeer.core.reasons import DecisionReason
from kvpeer.core.traces import unnamed_request
from kvpeer.engines.sglang import pages as pages_module
from kvpeer.engines.sglang.layout import SUPPORTED_LAYOUTS, page_layout
from kvpeer.engines.sglang.pages import PoolPages
from kvpeer.wire.messages import RequestTrace
from processes.handles import Program, running

pytestmark = pytest.mark.process

NAMESPACE = namespace_digest({"model": "tiny"})
KEYS = ["a" * 64, "b" * 64, "c" * 64]

Open = Callable[..., PoolPages]


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return str(folder / "agent.sock")


@pytest.fixture
def agent(path: str) -> Iterator[Program]:
    with running("pool_agent.py", {"socket": path}) as agent:
        yield agent


@pytest.fixture
def opened(path: str, agent: Program) -> Iterator[Open]:
    """Opens host pools at one agent."""
    made: list[PoolPages] = []

    def open_pool(pool: HostPool, shard: int = 0) -> PoolPages:
        layout = page_layout("kv", pool)
        registration = Registration("t", NAMESPACE, {}, layout.page_bytes, 1, 0, 0, layout.page_bytes)
        client = Client.connect(ClientSettings(socket=path), registration)
        if layout.segments is not None:
            client.register_layout(layout.segments)
        made.append(PoolPages(pool, layout, client, NAMESPACE, shard))
        return made[-1]

    yield open_pool
    for pages in made:
        pages.close(soon())


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def filled(pool: HostPool, seed: int) -> HostPool:
    pool.array[...] = np.random.default_rng(seed).integers(0, 256, pool.array.shape)
    return pool


def numbers(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)


@pytest.mark.parametrize("kind", [HostPool, CopiesOnly])
@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
def test_pages_arrive_where_they_are_wanted_and_nowhere_else(opened: Open, kind: type[HostPool], layout: str) -> None:
    source, target = filled(kind(layout), 1), filled(kind(layout), 2)
    before = target.array.copy()
    writer, reader = opened(source), opened(target)
    assert writer.write(KEYS, numbers(4, 0, 2), soon()).tolist() == [True] * 3
    assert reader.statuses([KEYS[2], "d" * 64, KEYS[0]], soon()).tolist() == [1, 0, 1]
    arrived = reader.read([KEYS[2], "d" * 64, KEYS[0]], numbers(1, 2, 3), soon())
    assert arrived.tolist() == [True, False, True]
    assert np.array_equal(target.page(1), source.page(2))
    assert np.array_equal(target.page(3), source.page(4))
    target.page(1)[...] = target.page(3)[...] = 0
    untouched = before.copy()
    HostPool.page(kind_of(target, untouched), 1)[...] = HostPool.page(kind_of(target, untouched), 3)[...] = 0
    assert np.array_equal(target.array, untouched)


def kind_of(pool: HostPool, array: np.ndarray) -> HostPool:
    other = HostPool(pool.layout)
    other.array = array
    return other


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
def test_by_tensor_and_by_number_a_key_names_the_same_bytes(opened: Open, layout: str) -> None:
    source, target = filled(HostPool(layout), 1), HostPool(layout)
    writer, reader = opened(source), opened(target)
    assert writer.write_from(KEYS[:2], [source.get_data_page(p * PAGE_TOKENS) for p in (3, 1)], soon()).all()
    assert reader.read(KEYS[:2], numbers(0, 2), soon()).all()
    assert np.array_equal(target.page(0), source.page(3))
    assert np.array_equal(target.page(2), source.page(1))
    assert writer.write(KEYS[2:], numbers(4), soon()).all()
    flat = [reader.host_pool.get_dummy_flat_data_page()]
    assert reader.read_into(KEYS[2:], flat, soon()).all()
    assert flat[0].array.tobytes() == source.get_data_page(4 * PAGE_TOKENS).array.tobytes()


def test_pages_that_are_copied_come_in_bounces(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = filled(CopiesOnly("layer_first"), 1), CopiesOnly("layer_first")
    writer, reader = opened(source), opened(target)
    monkeypatch.setattr(pages_module, "BOUNCE_BYTES", 2 * writer.page_bytes)
    keys = [f"{n:064}" for n in range(N_PAGES)]
    everything = np.arange(N_PAGES)
    assert writer.write(keys, everything, soon()).all()
    assert reader.read(keys, everything, soon()).all()
    assert np.array_equal(target.array, source.array)


def test_shards_keep_their_pages_apart(opened: Open) -> None:
    source = filled(HostPool("page_first"), 1)
    zero, one = opened(source, shard=0), opened(HostPool("page_first"), shard=1)
    assert zero.write(KEYS, numbers(0, 1, 2), soon()).all()
    assert not one.statuses(KEYS, soon()).any()
    assert not one.read(KEYS, numbers(0, 1, 2), soon()).any()


def test_indices_that_are_no_whole_pages_of_the_pool_are_no_places(opened: Open) -> None:
    pages = opened(HostPool("page_first"))
    whole = np.arange(2 * PAGE_TOKENS)
    assert pages.page_numbers(whole, 2).tolist() == [0, 1]
    assert pages.page_numbers(whole + 1, 2) is None
    assert pages.page_numbers(whole, 3) is None
    assert pages.page_numbers(whole + N_PAGES * PAGE_TOKENS, 2) is None
    assert pages.page_numbers(whole - PAGE_TOKENS, 2) is None
    assert pages.page_numbers(None, 2) is None


def test_a_tensor_that_is_no_page_is_refused(opened: Open) -> None:
    pages = opened(HostPool("page_first"))
    short = FlatPage(np.zeros(pages.page_bytes - 1, np.uint8))
    with pytest.raises(ValueError, match=f"{pages.page_bytes} bytes"):
        pages.read_into(KEYS[:1], [short], soon())
    with pytest.raises(ValueError, match=f"{pages.page_bytes} bytes"):
        pages.write_from(KEYS[:1], [short], soon())


def test_a_frozen_agent_costs_no_more_than_the_deadline_and_closing_less_than_a_second(
    opened: Open, agent: Program
) -> None:
    pages = opened(filled(HostPool("page_first"), 1))
    assert pages.write(KEYS, numbers(0, 1, 2), soon()).all()
    agent.send_signal(signal.SIGSTOP)
    for call in (
        lambda deadline: pages.statuses(KEYS, deadline),
        lambda deadline: pages.read(KEYS, numbers(0, 1, 2), deadline),
        lambda deadline: pages.write(["d" * 64], numbers(3), deadline),
    ):
        began_at = time.monotonic()
        assert not call(soon(0.3)).any()
        assert time.monotonic() - began_at < 0.8
    began_at = time.monotonic()
    pages.close(soon(0.8))
    assert time.monotonic() - began_at < 1.0
    agent.send_signal(signal.SIGCONT)


class Kept:
    """In the place of a sender: keeps what it is given."""

    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []
        self.is_closed = False

    def add(self, trace: RequestTrace, at: float) -> None:
        self.traces.append(trace)

    def close(self) -> None:
        self.is_closed = True


def test_what_was_decided_of_a_prompt_is_told_under_its_first_page(opened: Open) -> None:
    known, kept = opened(HostPool(SUPPORTED_LAYOUTS[0])), Kept()
    pages = PoolPages(known.host_pool, known._layout, known._client, NAMESPACE, 0, kept)  # type: ignore[arg-type]
    decision = Decision(Action.RELOAD, PAGE_TOKENS, 0.0, DecisionReason.BELOW_FLOOR)
    pages.tell(KEYS, np.array([1, 2, 0], np.uint8), decision, 0.5)
    (trace,) = kept.traces
    assert trace.request == unnamed_request(pages._chain(KEYS[:1]).keys)
    assert (trace.reason, trace.n_tokens, trace.lookup_us) == ("decision.below_floor", PAGE_TOKENS, 500_000)
    assert (trace.resident_tokens, trace.reachable_tokens) == (PAGE_TOKENS, 2 * PAGE_TOKENS)
    pages.close(soon())
    assert kept.is_closed
