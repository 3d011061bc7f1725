"""What agents do with RDMA devices, and without: two whole agents; on real verbs in the machine of `make test-rdma`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
from kvpeer.agent.config import TransportSettings
from kvpeer.agent.links import PeerRefusedError
from kvpeer.agent.rdma import open_rdma
from kvpeer.core.topology import Plan
from kvpeer.model import ConfigError, PeerUnavailableError
from kvpeer.native import Pool, VerbsConnection
from kvpeer.wire.messages import OpenData, OpenQueuePair
from whole_agents import WholeAgent, with_agents

RDMA_DEVICE = os.environ.get("KVPEER_TEST_RDMA_DEVICE", "")
needs_verbs = pytest.mark.skipif(not RDMA_DEVICE, reason="needs RDMA devices: make test-rdma")
without_verbs = pytest.mark.skipif(bool(RDMA_DEVICE), reason="about machines without RDMA devices")

NO_PLAN = Plan((), (), (), (), ())
OFF, REQUIRE = {"transport.rdma": "off"}, {"transport.rdma": "require"}
PULL_S = 20.0
"""Processors of the emulated machine are slow."""

PAGE_PACKETS = 4  # 16 KiB in packets of 4096 bytes


@pytest.fixture
def pool():
    with Pool(1 << 20, 1 << 20, b"p" * 16) as opened:
        yield opened


def received_packets(device: str = RDMA_DEVICE) -> int:
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts").read_text())


@without_verbs
def test_an_agent_that_requires_rdma_does_not_start_without_it_and_says_what_is_missing(pool):
    with pytest.raises(ConfigError, match=r"transport.rdma is require, but no RDMA: .*(device|rdma-core)"):
        open_rdma(pool, TransportSettings(rdma="require"), NO_PLAN)


@without_verbs
def test_without_a_device_auto_does_without_and_says_so(pool, caplog):
    with caplog.at_level(logging.INFO):
        assert open_rdma(pool, TransportSettings(rdma="auto"), NO_PLAN) == ()
    assert "pages move by tcp: no RDMA" in caplog.text


def test_off_asks_for_no_device(pool, caplog):
    with caplog.at_level(logging.DEBUG):
        assert open_rdma(pool, TransportSettings(rdma="off"), NO_PLAN) == ()
    assert not caplog.text


def test_an_agent_without_rdma_refuses_queue_pairs(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        with pytest.raises(PeerRefusedError, match="OpenQueuePair is not served"):
            await reader.agent._links.request(producer.id, OpenQueuePair(bytes(32)), 5)

    with_agents(tmp_path, "reader producer", scenario, reader=OFF, producer=OFF)


def test_agents_without_rdma_say_that_pages_come_by_tcp(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await reader.finds(1)
        assert await reader.pull(1, deadline_s=PULL_S) == ["HIT"]
        assert_active(reader, tcp=1, verbs=0)

    with_agents(tmp_path, "reader producer", scenario, reader=OFF, producer=OFF)


def assert_active(agent: WholeAgent, **expected: int) -> None:
    agent.agent._observer.observe()
    for transport, value in expected.items():
        assert agent.count("kvpeer_transport_active", transport=transport) == value
        assert agent.count("kvpeer_transport_peers", transport=transport) == value


@needs_verbs
@pytest.mark.parametrize("rdma", ["auto", "require"])
def test_agents_with_rdma_pull_by_it(tmp_path: Path, rdma: str) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(*range(20))
        await reader.finds(*range(20))
        before = received_packets()
        assert await reader.pull(*range(20), deadline_s=PULL_S) == ["HIT"] * 20
        assert received_packets() - before >= 20 * PAGE_PACKETS
        assert_active(reader, tcp=0, verbs=1)
        assert reader.count("kvpeer_transport_asked_pages_total", outcome="hit", transport="verbs") == 20
        assert producer.agent._server.stats().pages_sent == 0

    settings = {"transport.rdma": rdma, "topology.devices": RDMA_DEVICE}
    with_agents(tmp_path, "reader producer", scenario, reader=settings, producer=settings)


@needs_verbs
def test_agents_pull_by_all_rails_of_their_plans(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        assert [device.name for device in reader.agent._rdma] == ["rxe0", "rxe1"]
        await producer.publish(*range(20))
        await reader.finds(*range(20))
        before = [received_packets("rxe0"), received_packets("rxe1")]
        assert await reader.pull(*range(20), deadline_s=PULL_S) == ["HIT"] * 20
        for device, earlier in zip(("rxe0", "rxe1"), before, strict=True):
            assert received_packets(device) - earlier >= 20 // 2 * PAGE_PACKETS
        reader.agent._observer.observe()
        assert reader.count("kvpeer_transport_lanes", state="in") == 2
        assert reader.count("kvpeer_transport_lanes", state="out") == 0

    with_agents(tmp_path, "reader producer", scenario, reader=REQUIRE, producer=REQUIRE)


@needs_verbs
def test_a_peer_without_rdma_is_read_by_tcp_and_that_is_said_once(tmp_path: Path, caplog) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        for page in (1, 2):  # a chain each
            await producer.publish(page)
            await reader.finds(page)
        with caplog.at_level(logging.INFO):
            assert await reader.pull(1, deadline_s=PULL_S) == ["HIT"]
            assert await reader.pull(2, deadline_s=PULL_S) == ["HIT"]
        assert caplog.text.count("come by tcp: ") == 1
        assert_active(reader, tcp=1, verbs=0)

    with_agents(tmp_path, "reader producer", scenario, producer=OFF)


@needs_verbs
def test_an_agent_that_requires_rdma_neither_reads_nor_serves_by_tcp(tmp_path: Path) -> None:
    async def scenario(strict: WholeAgent, other: WholeAgent) -> None:
        await other.publish(1)
        await strict.finds(1)
        assert await strict.pull(1, deadline_s=PULL_S) == ["MISS"]
        with pytest.raises(PeerRefusedError, match="OpenData is not served"):
            await other.agent._links.request(strict.id, OpenData(1), 5)

    with_agents(tmp_path, "strict other", scenario, strict=REQUIRE, other=OFF)


@needs_verbs
def test_members_get_queue_pairs_until_they_end_and_strangers_none(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        admissions = producer.agent._admissions._rdma
        stranger = msgspec.structs.replace(reader.agent.info, agent_id=b"s" * 16)
        with VerbsConnection(reader.agent._rdma[0], producer.id) as connection:
            question = OpenQueuePair(connection.own_end)
            with pytest.raises(PeerUnavailableError, match="no member"):
                await admissions._open(stranger, question)
            assert len((await admissions._open(reader.agent.info, question)).producer_end) == 32
        assert producer.agent._rdma[0].stats().connections_open == 1
        producer.agent._admissions.revoke(reader.id)
        admissions.close()  # returns when what was asked for before is done
        assert producer.agent._rdma[0].stats().connections_open == 0

    with_agents(tmp_path, "reader producer", scenario, reader=REQUIRE, producer=REQUIRE)
