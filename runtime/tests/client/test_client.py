"""Clients and an agent without peers, as real processes on a real socket."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpeer.client import Client, ClientSettings, EngineLayout, NativeCopier
from kvpeer.client.client import _extended
from kvpeer.client.link import open_link
from kvpeer.client.settings import Registration
from kvpeer.core.sources import Offer
from kvpeer.model import AgentId, CapacityError, ConfigError, Outcome
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import Fetch, Fetched, Release
from processes.engine import PAGE_BYTES, Engine, chain_of, namespace_of
from processes.handles import RUNTIME, eventually, running

pytestmark = pytest.mark.process

EIGHT_SLOTS = {"capacity_bytes": 1 << 20, "extent_bytes": 1 << 20}  # of 128 KiB
SLOT_PAGES = 10  # 1 MiB / 96 KiB


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return str(folder / "agent.sock")


@pytest.fixture
def engines(path: str) -> Iterator[Any]:
    """Makes engines that are closed at the end."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(path, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.copier.go_on.set()
        engine.client.close()


def registration(page_bytes: int = PAGE_BYTES, part: int = 0) -> Registration:
    return Registration("raw", namespace_of("tiny"), {}, page_bytes, 1, part, 0, page_bytes)


def test_what_one_process_published_another_fetches_byte_for_byte(path: str) -> None:
    with (
        running("pool_agent.py", {"socket": path}),
        running("engine.py", {"socket": path}) as first,
        running("engine.py", {"socket": path}) as second,
    ):
        assert first.ask(do="publish", numbers=[1, 2, 3]) == [3, 0, 0]
        assert second.ask(do="fetch", numbers=[3, 9, 1, 2]) == ["HIT", "MISS", "HIT", "HIT"]
        assert second.ask(do="publish", numbers=[2, 4]) == [1, 1, 0]


def test_two_ranks_make_one_page_and_each_gets_its_own_part(path: str) -> None:
    ranks = [{"socket": path, "n_parts": 2, "part": part} for part in (0, 1)]
    with (
        running("pool_agent.py", {"socket": path}),
        running("engine.py", ranks[0]) as zero,
        running("engine.py", ranks[1]) as one,
    ):
        assert zero.ask(do="publish", numbers=[1, 2]) == [2, 0, 0]
        assert zero.ask(do="fetch", numbers=[1]) == ["MISS"], "half a page is no page"
        assert one.ask(do="publish", numbers=[1]) == [1, 0, 0]
        assert zero.ask(do="fetch", numbers=[1, 2]) == ["HIT", "MISS"]
        assert one.ask(do="fetch", numbers=[1, 2]) == ["HIT", "MISS"]


def test_slots_of_a_killed_client_are_free_after_the_grace_and_not_before(path: str, engines: Any) -> None:
    settings = {"socket": path, **EIGHT_SLOTS, "slots": {"death_grace_s": 1.5}}
    numbers = list(range(SLOT_PAGES))
    with running("pool_agent.py", settings), running("engine.py", {"socket": path}) as doomed:
        assert doomed.ask(do="pause", numbers=numbers) is True
        survivor = engines()
        assert survivor.publish(*range(100, 104)) == (0, 0, 4), "every slot is being written"
        killed_at = time.monotonic()
        doomed.end(signal.SIGKILL)
        eventually(lambda: survivor.publish(*range(100, 104))[0] == 4)
        assert time.monotonic() - killed_at >= 1.5


def test_without_its_agent_a_client_misses_promptly_and_comes_back(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}) as agent:
        engine = engines()
        assert engine.publish(1, 2)[0] == 2
        agent.end(signal.SIGKILL)
        eventually(lambda: not engine.client.healthy)
        started = time.monotonic()
        assert engine.fetch(1, 2) == ["MISS", "MISS"]
        assert engine.locate(1, 2) == [0, 0]
        assert engine.publish(3) == (0, 0, 1)
        assert time.monotonic() - started < 0.5
    with running("pool_agent.py", {"socket": path}):
        eventually(lambda: engine.client.healthy)
        assert engine.fetch(1) == ["MISS"], "the pool is a new one"
        assert engine.publish(1)[0] == 1
        assert engine.fetch(1) == ["HIT"]


def test_a_copy_that_runs_when_the_agent_dies_ends_before_the_pool_is_unmapped(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}) as agent:
        engine = engines()
        engine.publish(*range(8))
        engine.copier.reached.clear()
        engine.copier.go_on.clear()
        outcomes: list[str] = []
        fetching = threading.Thread(target=lambda: outcomes.extend(engine.fetch(*range(8))))
        fetching.start()
        assert engine.copier.reached.wait(10)
        agent.end(signal.SIGKILL)
        eventually(lambda: not engine.client.healthy)
    with running("pool_agent.py", {"socket": path}):
        time.sleep(0.3)  # time to do the wrong thing in: to unmap, or to connect again
        assert not engine.client.healthy
        engine.copier.go_on.set()
        fetching.join(10)
        assert outcomes == ["HIT"] * 8
        eventually(lambda: engine.client.healthy)


def test_a_frozen_agent_costs_one_deadline_and_what_it_granted_late_is_given_back(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, **EIGHT_SLOTS}) as agent:
        engine, other = engines(), engines()
        agent.send_signal(signal.SIGSTOP)
        assert engine.publish(*range(SLOT_PAGES), deadline_s=0.4) == (0, 0, SLOT_PAGES)
        started = time.monotonic()
        for _ in range(10):
            assert engine.fetch(1, deadline_s=0.4) == ["TIMEOUT"]
        assert time.monotonic() - started < 0.4, "each waited"
        agent.send_signal(signal.SIGCONT)
        eventually(lambda: engine.client.healthy)
        assert other.publish(*range(50, 58))[0] == 8, "slots that were granted too late stayed reserved"


def test_a_pool_of_few_slots_under_churn_never_gives_wrong_bytes(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, **EIGHT_SLOTS, "slots": {"lease_ttl_s": 0.0}}):
        writer, reader = engines(), engines()
        stop, written = threading.Event(), [0]

        def churn() -> None:
            rng = np.random.default_rng(1)
            while not stop.is_set():
                written[0] += writer.publish(*rng.choice(24, 4, replace=False).tolist())[0]

        churning = threading.Thread(target=churn)
        churning.start()
        rng, seen = np.random.default_rng(2), set()
        end = time.monotonic() + 20
        n_hits = 0
        while n_hits < 300 and time.monotonic() < end:
            outcomes = reader.fetch(*rng.choice(24, 4, replace=False).tolist())
            seen.update(outcomes)
            n_hits += outcomes.count("HIT")
        stop.set()
        churning.join(10)
        assert n_hits >= 300
        assert "WRONG" not in seen
        assert written[0] > 3 * SLOT_PAGES, "nothing was evicted"


def test_nothing_stays_pinned_after_a_fetch(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, **EIGHT_SLOTS}):
        engine = engines()
        engine.publish(*range(8))
        assert engine.fetch(*range(8)) == ["HIT"] * 8
        assert engine.publish(*range(100, 108)) == (8, 0, 0)


def test_a_page_that_somebody_scribbled_over_is_corrupt_once_and_then_gone(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}):
        engine, other = engines(), engines()
        engine.publish(1, 2)
        chain = chain_of(namespace_of("tiny"), 1)
        with other.client._session.link() as link:
            found = link.request(Fetch("r", 0, chain.keys, chain.anchors), time.monotonic() + 5)
            assert isinstance(found, Fetched)
            link.give_back(Release(found.pin, b"", b""))
            offset = int(np.frombuffer(found.offsets, dtype=np.uint64)[0])
            link.pool.payload_view()[offset + 5] ^= 1
        assert engine.fetch(1, 2) == ["CORRUPT", "HIT"]
        assert engine.fetch(1, 2) == ["MISS", "HIT"]
        assert engine.publish(1) == (1, 0, 0)
        assert engine.fetch(1) == ["HIT"]


def test_a_full_pool_refuses_and_is_no_error(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, **EIGHT_SLOTS}):
        engine = engines()
        for number in range(SLOT_PAGES):
            engine.publish(number)
        link = open_link(path, registration(), time.monotonic() + 5)
        try:
            serving = threading.Thread(target=link.serve, args=(lambda answer: None,), daemon=True)
            serving.start()
            chain = chain_of(namespace_of("tiny"), *range(SLOT_PAGES))
            pinned = link.request(Fetch("r", 0, chain.keys, chain.anchors), time.monotonic() + 5)
            assert isinstance(pinned, Fetched)
            n_pinned = list(pinned.outcomes).count(0)
            assert n_pinned >= SLOT_PAGES - 2
            n_written, _, n_refused = engine.publish(*range(100, 100 + SLOT_PAGES))
            assert n_written + n_refused == SLOT_PAGES
            assert n_written == SLOT_PAGES - n_pinned
            assert engine.client.healthy
        finally:
            link.shutdown()
            serving.join(5)
            link.close()
        eventually(lambda: engine.publish(*range(200, 204))[0] == 4)


def test_a_copy_whose_blocks_were_taken_back_is_not_published(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, **EIGHT_SLOTS}):
        engine = engines()
        assert engine.publish(*range(SLOT_PAGES), is_current=False) == (0, 0, SLOT_PAGES)
        assert set(engine.fetch(*range(SLOT_PAGES))) == {"MISS"}
        assert engine.publish(*range(50, 58))[0] == 8, "the reservation was not given back"


def test_a_reset_withdraws_the_namespace_and_no_other(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}):
        engine, other = engines(), engines(namespace="other")
        engine.publish(1)
        other.publish(1)
        assert engine.client.reset("weights were updated")
        assert engine.fetch(1) == ["MISS"]
        assert other.fetch(1) == ["HIT"]


def test_a_client_whose_pages_differ_within_a_namespace_is_told_so(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}):
        engines()
        with pytest.raises(ConfigError, match=r"page_bytes.*other engines of this namespace"):
            engines(page_bytes=PAGE_BYTES // 2)
        with pytest.raises(ConfigError, match=r"pool\.extent_size"):
            engines(page_bytes=2 << 20, namespace="large")


def test_clients_beyond_the_limit_are_refused(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, "limits": {"clients_max": 1}}):
        first = engines()
        with pytest.raises(CapacityError, match="clients_max"):
            open_link(path, registration(), time.monotonic() + 5)
        first.client.close()
        eventually(lambda: can_connect(path))


def can_connect(path: str) -> bool:
    try:
        link = open_link(path, registration(), time.monotonic() + 5)
    except CapacityError:
        return False
    link.shutdown()
    link.close()
    return True


HOSTILE = {
    "a frame of 4 GiB": struct.pack("<I2sBBQI", 0xFFFF_FFFF, b"KV", 1, 1, 0, 1000),
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 4,
    "half a frame, then the end": pack_frame(FrameKind.REQUEST, 0, b"x" * 100, 1000)[:50],
    "a request before the hello": pack_frame(FrameKind.REQUEST, 0, encode(Fetch("r", 0, b"", b"")), 1000),
    "a body that is no message": pack_frame(FrameKind.REQUEST, 0, b"\xc1" * 20, 1000),
}


@pytest.mark.parametrize("after_hello", [False, True], ids=["as hello", "after hello"])
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_client_that_breaks_the_protocol_is_dropped_and_harms_nobody(
    path: str, engines: Any, hostile: bytes, after_hello: bool
) -> None:
    with running("pool_agent.py", {"socket": path}) as agent:
        engine = engines()
        if after_hello:
            if hostile is HOSTILE["a request before the hello"]:
                hostile = pack_frame(FrameKind.REQUEST, 9, encode(Fetch("r", 0, b"short", b"")), 1000)
            sock = open_link(path, registration(), time.monotonic() + 5)._sock
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(path)
        with sock:
            sock.settimeout(10)
            sock.sendall(hostile)
            if hostile is HOSTILE["half a frame, then the end"]:
                sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        assert engine.publish(1)[0] == 1
        assert agent.process.poll() is None


def test_a_client_that_never_reads_its_answers_is_dropped(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}) as agent:
        engine = engines()
        keys = b"k" * 16 * 4096
        question = pack_frame(FrameKind.REQUEST, 1, encode(Fetch("r", 0, keys, keys[: 16 * 128])), 60_000)
        sock = open_link(path, registration(), time.monotonic() + 5)._sock
        with sock:
            sock.settimeout(20)
            with pytest.raises(ConnectionError):
                sock.sendall(question * 1000)  # 70 MiB of answers
        assert engine.publish(1)[0] == 1
        assert agent.process.poll() is None


def test_requests_of_several_threads_do_not_wait_for_each_other(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}):
        engine = engines()
        engine.publish(1)
        engine.copier.reached.clear()
        engine.copier.go_on.clear()
        fetching = threading.Thread(target=engine.fetch, args=(1,))
        fetching.start()
        assert engine.copier.reached.wait(10)
        assert engine.locate(1, 2) == [1, 0]
        engine.copier.go_on.set()
        fetching.join(10)


def test_a_client_that_does_not_wait_is_there_at_once_and_connects_later(path: str) -> None:
    began_at = time.monotonic()
    client = Client.connect(ClientSettings(socket=path), registration(), wait_s=0.0)
    assert time.monotonic() - began_at < 1.0
    assert client.locate(chain_of(namespace_of("tiny"), 1), "r", 1.0).statuses.tolist() == [0]
    with running("pool_agent.py", {"socket": path}):
        eventually(lambda: client.healthy)
    client.close(wait_s=1.0)


def test_a_publish_says_of_each_page_whether_it_is_there(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path, **EIGHT_SLOTS}):
        engine = engines()
        eventually(lambda: engine.publish(1, 2)[2] == 0)
        chain = chain_of(engine.namespace, 2, 3, 1)
        result = engine.client.publish(chain, np.arange(3, dtype=np.int64), 5.0)
        assert (result.n_written, result.n_present) == (1, 2)
        assert result.is_there.tolist() == [True] * 3
        link_pages = chain_of(engine.namespace, *range(100, 100 + 2 * SLOT_PAGES))
        too_many = engine.client.publish(link_pages, np.arange(2 * SLOT_PAGES, dtype=np.int64), 5.0)
        assert too_many.n_refused > 0
        assert int((~too_many.is_there).sum()) == too_many.n_refused


def test_blocks_anywhere_are_copied_by_the_copier_of_the_call(path: str, engines: Any) -> None:
    with running("pool_agent.py", {"socket": path}):
        engine = engines()
        elsewhere = np.arange(2 * PAGE_BYTES, dtype=np.uint64).astype(np.uint8).reshape(2, PAGE_BYTES)
        layout = EngineLayout(
            np.array([elsewhere.ctypes.data], np.uint64),
            np.array([PAGE_BYTES], np.uint64),
            np.array([PAGE_BYTES], np.uint32),
        )
        copier, chain = NativeCopier(layout), chain_of(engine.namespace, 7)
        one, two = np.array([0], np.int64), np.array([1], np.int64)
        eventually(lambda: engine.client.publish(chain, one, 5.0, copier=copier).is_there.all())
        elsewhere[1] = 0
        assert engine.client.fetch(chain, two, "r", 5.0, copier).tolist() == [Outcome.HIT]
        assert np.array_equal(elsewhere[0], elsewhere[1])
        assert not engine.memory.any(), "the registered blocks were not touched"


def test_a_client_waits_in_the_background_for_an_agent_that_comes_later(path: str, engines: Any) -> None:
    started = time.monotonic()
    engine = engines(settings=ClientSettings(socket=path, start_timeout_s=0.2))
    assert time.monotonic() - started < 2
    assert not engine.client.healthy
    assert engine.fetch(1) == ["MISS"]
    with running("pool_agent.py", {"socket": path}):
        eventually(lambda: engine.client.healthy)


def test_the_client_brings_no_event_loop_into_the_engine() -> None:
    code = "import sys, kvpeer.client; print(sorted({'asyncio', 'ssl', 'uvloop', 'yaml'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(RUNTIME)}
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_what_is_offered_of_a_long_chain_goes_on_only_where_it_did_not_end_before() -> None:
    a, b, c = (AgentId(bytes([n]) * 16) for n in range(3))
    first = _extended([], [Offer(a, 100, 1), Offer(b, 60, 2)], 0, is_resident=True)
    assert first == [Offer(a, 100, 1), Offer(b, 60, 2)]
    then = _extended(first, [Offer(a, 20, 1), Offer(b, 50, 2), Offer(c, 50, 3)], 100, is_resident=False)
    assert then == [Offer(a, 120, 1), Offer(b, 60, 2)]
    assert _extended(first, [], 100, is_resident=False) == first


def test_what_follows_a_batch_that_the_own_pool_has_all_of_is_offered() -> None:
    a = AgentId(b"a" * 16)
    second = _extended([], [Offer(a, 20, 1)], 100, is_resident=True)
    assert second == [Offer(a, 120, 1)]
    assert _extended(second, [Offer(a, 30, 2)], 120, is_resident=False) == [Offer(a, 150, 1)]
