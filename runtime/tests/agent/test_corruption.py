"""Reports of corrupt pages over a real pool: only the producer's own check withdraws a page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from kvpeer.agent.corruption import REPORT_PAGES_MAX, CorruptPages
from kvpeer.agent.peering import NoPeers
from kvpeer.agent.pool import PoolService
from kvpeer.core.chain import Chain, namespace_digest
from kvpeer.core.rechecks import READER_PAGES_MAX
from kvpeer.core.slots import SlotSettings, SlotTable
from kvpeer.metrics import build
from kvpeer.model import KEY_BYTES, AgentId, RemoteProtocolError
from kvpeer.native import Pool, crc64
from kvpeer.wire.messages import AgentInfo, ClientHello, CorruptReport
from prometheus_client import CollectorRegistry

EXTENT_BYTES = 1 << 20
PAGE_BYTES = 64 << 10
N_PAGES = 8
OWN, READER, OTHER = (AgentId(bytes([number]) * 16) for number in (1, 2, 3))
DEADLINE_S = 20.0


class Wires:
    """The control channel's notices, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[AgentId, CorruptReport]] = []

    def notify(self, agent_id: AgentId, message: Any) -> None:
        self.sent.append((agent_id, message))


class Producer:
    """A pool with N_PAGES pages of random bytes, and what listens to readers."""

    def __init__(self) -> None:
        self.native = Pool(EXTENT_BYTES, EXTENT_BYTES, OWN)
        self.pool = PoolService(
            self.native, SlotTable(SlotSettings(EXTENT_BYTES, 1)), time.monotonic, NoPeers(), lambda: None
        )
        self.registry = CollectorRegistry()
        self.wires = Wires()
        self.corrupt_pages = CorruptPages(self.pool, self.wires, build(self.registry), time.monotonic)

    async def fill(self) -> None:
        namespace = namespace_digest({"n": "n"})
        chain = Chain(namespace)
        chain.extend(number.to_bytes(8, "big") for number in range(N_PAGES))
        self.keys = chain.slice(0, N_PAGES).keys
        cohort = self.pool.join(ClientHello("e", namespace, {}, PAGE_BYTES, 1, 0, 0, PAGE_BYTES))
        reserved = await self.pool.reserve(1, cohort, 0, chain.slice(0, N_PAGES), time.monotonic() + DEADLINE_S)
        self.slots, self.generations, self.offsets = reserved.slots, reserved.generations, reserved.offsets
        payload = self.native.payload_view()
        payload[:] = np.random.default_rng(1).integers(0, 256, len(payload), dtype=np.uint8)
        checksums = [crc64(payload[offset : offset + PAGE_BYTES]) for offset in self.offsets.tolist()]
        self.pool.commit(1, cohort, 0, self.slots, self.generations, np.array(checksums, dtype=np.uint64))

    def rot(self, page: int) -> None:
        self.native.payload_view()[int(self.offsets[page]) + 777] ^= 1

    async def hear(self, reader: AgentId, report: CorruptReport) -> None:
        (handle,) = self.corrupt_pages.handlers().values()
        await handle(AgentInfo(reader, "r", "h", 1, 2), report)

    def report(self, *pages: int, older: int = 0) -> CorruptReport:
        return report_of(
            b"".join(self.key(page) for page in pages), self.slots[list(pages)], self.generations[list(pages)] - older
        )

    def key(self, page: int) -> bytes:
        return self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]

    def resident(self) -> list[bool]:
        return self.pool.find(self.keys).resident.tolist()

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("kvpeer_pool_reported_pages_total", {"outcome": outcome}) or 0.0

    async def counts(self, **outcomes: float) -> None:
        """Returns when the reports are settled as these; fails if they never are."""
        while any(self.counted(outcome) < n for outcome, n in outcomes.items()):
            await asyncio.sleep(0.001)  # the scenario has a deadline
        assert {outcome: self.counted(outcome) for outcome in outcomes} == outcomes


def report_of(keys: bytes, slots: Any, generations: Any) -> CorruptReport:
    return CorruptReport(keys, slots.astype("<u4").tobytes(), generations.astype("<u4").tobytes())


def with_producer(scenario: Callable[[Producer], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        producer = Producer()
        producer.pool.start()
        checking = asyncio.get_running_loop().create_task(producer.corrupt_pages.run())
        try:
            await producer.fill()
            await asyncio.wait_for(scenario(producer), DEADLINE_S)
        finally:
            checking.cancel()
            await asyncio.wait([checking])
            producer.corrupt_pages.close()
            await producer.pool.close()
            producer.native.close()

    asyncio.run(run())


def test_a_page_whose_own_bytes_are_wrong_is_withdrawn_and_its_slot_rests(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(producer: Producer) -> None:
        producer.rot(3)
        await producer.hear(READER, producer.report(3))
        await producer.counts(confirmed=1.0, false=0.0)
        assert producer.resident() == [page != 3 for page in range(N_PAGES)]
        assert producer.pool.stats().n_corrupt == 1
        assert producer.pool.stats().quarantined_bytes == PAGE_BYTES
        assert f"page {producer.key(3).hex()} in slot {producer.slots[3]}" in caplog.text
        assert READER.hex() in caplog.text

    with_producer(scenario)


def test_a_false_report_removes_nothing_and_is_counted_against_its_reader(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(producer: Producer) -> None:
        await producer.hear(READER, producer.report(*range(N_PAGES)))
        await producer.counts(false=float(N_PAGES), confirmed=0.0)
        assert producer.resident() == [True] * N_PAGES
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [message.split()[3] for message in warnings] == ["1", "2", "4", "8"]
        assert all(READER.hex() in message for message in warnings)
        assert producer.pool.stats().n_corrupt == 0

    with_producer(scenario)


def test_who_reports_what_is_not_there_causes_no_check() -> None:
    async def scenario(producer: Producer) -> None:
        producer.rot(0)
        await producer.hear(READER, producer.report(0, 1, older=1))
        await producer.hear(READER, report_of(producer.key(1), producer.slots[:1], producer.generations[:1]))
        await producer.hear(READER, report_of(bytes(16), np.array([2**32 - 1]), np.array([1])))
        await producer.counts(gone=4.0, confirmed=0.0, false=0.0)
        assert producer.resident() == [True] * N_PAGES

    with_producer(scenario)


def test_a_page_that_was_withdrawn_while_its_report_waited_is_left_alone() -> None:
    async def scenario(producer: Producer) -> None:
        producer.rot(1)
        await producer.hear(READER, producer.report(0, 1))
        producer.pool.quarantine(producer.slots[1:2], producer.generations[1:2])
        await producer.counts(false=1.0, gone=1.0, confirmed=0.0)

    with_producer(scenario)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (CorruptReport(bytes(15), b"", b""), "keys: 15 bytes"),
        (CorruptReport(bytes(32), bytes(4), bytes(8)), "slots: 4 bytes"),
        (CorruptReport(bytes(32), bytes(8), bytes(4)), "generations: 4 bytes"),
        (
            CorruptReport(*(bytes(n * (REPORT_PAGES_MAX + 1)) for n in (16, 4, 4))),
            f"{REPORT_PAGES_MAX + 1} in one CorruptReport",
        ),
    ],
    ids=["ragged keys", "slots", "generations", "too many"],
)
def test_a_malformed_report_is_refused(report: CorruptReport, words: str) -> None:
    async def scenario(producer: Producer) -> None:
        with pytest.raises(RemoteProtocolError, match=words):
            await producer.hear(READER, report)

    with_producer(scenario)


def test_what_came_corrupt_is_told_to_its_producer_in_bounded_notices() -> None:
    async def scenario(reader: Producer) -> None:
        n = REPORT_PAGES_MAX + 3
        keys = np.random.default_rng(2).bytes(n * KEY_BYTES)
        slots, generations = np.arange(n, dtype=np.uint32), np.arange(n, 2 * n, dtype=np.uint32)
        reader.corrupt_pages.report(OTHER, keys, slots, generations)
        assert {to for to, _ in reader.wires.sent} == {OTHER}
        reports = [report for _, report in reader.wires.sent]
        assert [len(report.keys) // KEY_BYTES for report in reports] == [REPORT_PAGES_MAX, 3]
        assert b"".join(report.keys for report in reports) == keys
        assert b"".join(report.slots for report in reports) == slots.tobytes()
        assert b"".join(report.generations for report in reports) == generations.tobytes()
        reader.corrupt_pages.report(OTHER, b"", slots[:0], generations[:0])
        assert len(reader.wires.sent) == 2

    with_producer(scenario)


def test_a_notice_fits_what_one_reader_may_have_waiting() -> None:
    assert REPORT_PAGES_MAX <= READER_PAGES_MAX
