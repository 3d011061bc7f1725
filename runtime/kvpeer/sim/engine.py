"""Simulated engines: ranks that locate, fetch, copy out, and publish what they had to compute; and that die.

They speak to their agent as `client/` does, with the real messages, and copy between memory and the pool in pieces, so
that other things happen meanwhile. Every page that they take as a hit is compared with what it must hold.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.chain import ChainSlice
from kvpeer.core.slot_effects import Found, Reservation, ReserveStatus
from kvpeer.model import KEY_BYTES, Outcome
from kvpeer.sim.agent import Agent
from kvpeer.sim.calls import Calls
from kvpeer.sim.kernel import Process, Task
from kvpeer.sim.memory import Header, SlotState, checksum, page_bytes_of, verified
from kvpeer.sim.pool import Cohort
from kvpeer.sim.world import World
from kvpeer.wire.codec import decode_client, encode
from kvpeer.wire.messages import Commit, Committed, Fetch, Fetched, Locate, Located, Message, Release, Reserve, Reserved
from kvpeer.wire.packing import U1, U4, U8, n_chain_keys, pack, unpack

__all__ = ["Engine"]

PIECES = 3
ANSWER_MARGIN_S = 0.005
DMA_AFTER_DEATH_S = 0.9
"""A device may go on copying for this long after its process died: within the agent's grace of 1 s."""

M = TypeVar("M")
W = TypeVar("W", bound=Message)
T_co = TypeVar("T_co", covariant=True)


class Ask(Protocol[T_co]):
    """Asks the agent, with a deadline on the agent's clock."""

    def __call__(self, until: float, /) -> Awaitable[T_co]: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """Where fetched pages are."""

    outcomes: NDArray[np.uint8]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    pin: int


class Engine:
    """One engine of a pod: `cohort.shape.n_parts` ranks, each a client of the agent with a number of its own."""

    def __init__(
        self, world: World, agent: Agent, calls: Calls, cohort: Cohort, chains: Sequence[ChainSlice], first_client: int
    ) -> None:
        self.world = world
        self.agent = agent
        self.cohort = cohort
        self.process = Process(world.kernel, f"engine of {agent.name}")
        self.clients = [first_client + rank for rank in range(cohort.shape.n_parts)]
        self._calls = calls
        self._asked: dict[Task[Any], int] = {}
        self._chains = chains
        self._rng = random.Random(world.rng.random())  # noqa: S311 - a run must repeat
        self._n_requests = 0

    def start(self) -> None:
        self.process.spawn(self._run())

    def kill(self) -> None:
        """SIGKILL: its sockets close; copies of its devices may go on for a moment."""
        self.process.kill()
        self.agent.process.post(self._gone)

    def _gone(self) -> None:
        """The agent hears of it: answers under way are dropped, then what the ranks held."""
        asked, self._asked = self._asked, {}
        for task, call in asked.items():
            self._calls.drop(call)
            self.agent.process.cancel(task)
        for client in self.clients:
            self.agent.pool.gone(client)

    # ---- requests

    async def _run(self) -> None:
        while self.world.is_hostile:
            await self.process.sleep(self._rng.expovariate(1 / self.world.profile.think_s_mean))
            if not self.world.is_hostile or self.agent.process.is_dead:
                return
            chain = self._chains[int(len(self._chains) * self._rng.random() ** 2)]
            stop = self._rng.randrange(1, len(chain) + 1)
            await self.request(chain.part(0, stop))

    async def request(self, chain: ChainSlice) -> list[Outcome]:
        """One prompt: what can be had is fetched, the rest is computed and published. Returns what rank 0 got."""
        self._n_requests += 1
        request = f"{self.process.name} {self._n_requests}"
        wait_s = self._rng.choice((0.1, 0.3, 1.0))
        located = await self._locate(chain, request, wait_s)
        n_found = len(located) if located.all() else int(located.argmin())
        got: list[Outcome] = []
        if n_found:
            part = chain.part(0, n_found)
            ranks = [self.process.spawn(self._load(rank, part, request, wait_s)) for rank in range(len(self.clients))]
            loaded = [await rank for rank in ranks]
            got = loaded[0]
        n_have = next((idx for idx, outcome in enumerate(got) if outcome is not Outcome.HIT), len(got))
        if n_have < len(chain) and self.world.is_hostile:
            rest = chain.part(n_have, len(chain))
            ranks_publish = [self.process.spawn(self._publish(rank, rest)) for rank in range(len(self.clients))]
            for task in ranks_publish:
                await task
        return got

    async def _locate(self, chain: ChainSlice, request: str, wait_s: float) -> NDArray[np.uint8]:
        message = through_wire(Locate(request, chain.first, chain.keys, chain.anchors), Locate)
        asked = _chain_of(message)
        answering = self._ask("locate", wait_s, lambda until: self.agent.locate(asked, message.request, until))
        statuses = await answering
        if statuses is None:
            return np.zeros(len(chain), dtype=np.uint8)
        return unpack(through_wire(Located(pack(statuses, U1), ""), Located).statuses, U1, len(chain), "statuses")

    # ---- loading

    async def _load(self, rank: int, chain: ChainSlice, request: str, wait_s: float) -> list[Outcome]:
        """Fetches and copies one rank's parts; a page is a hit only after its copy was verified."""
        client = self.clients[rank]
        message = through_wire(Fetch(request, chain.first, chain.keys, chain.anchors), Fetch)
        asked = _chain_of(message)
        pool = self.agent.pool
        fetched = await self._ask(
            "fetch", wait_s,
            lambda until: self.agent.fetch(client, self.cohort, asked, message.request, until),
            lambda late: pool.release(client, late[1].pin),
        )  # fmt: skip
        if fetched is None:
            return [Outcome.TIMEOUT] * len(chain)
        pinned_at = self.agent.process.clock()
        answer = _unpacked(fetched, len(chain), self.agent.pool.table.settings.pin_ttl_s)
        outcomes = [Outcome(value) for value in answer.outcomes.tolist()]
        for idx, outcome in enumerate(outcomes):
            if outcome is Outcome.HIT:
                outcomes[idx] = await self._copy_out(rank, chain, idx, answer, pinned_at)
        self._release(client, answer, outcomes)
        self.world.note("loaded", self.process.name, rank, [int(outcome) for outcome in outcomes])
        return outcomes

    async def _copy_out(self, rank: int, chain: ChainSlice, idx: int, answer: _Answer, pinned_at: float) -> Outcome:
        memory = self.agent.pool.memory
        slot, generation = int(answer.slots[idx]), int(answer.generations[idx])
        key = chain.keys[idx * KEY_BYTES : (idx + 1) * KEY_BYTES]
        part_bytes = self.cohort.part_bytes
        start = int(answer.offsets[idx]) + rank * part_bytes
        before = memory.header(slot)
        copied = bytearray(part_bytes)
        for at, stop in _pieces(part_bytes):
            if at and self._rng.random() < 0.3:
                await self.process.sleep(self._rng.expovariate(1 / 0.02))
            copied[at:stop] = memory.payload[start + at : start + stop]
        after = memory.header(slot)
        want = Header(self.agent.agent_id, SlotState.COMMITTED, generation, key)
        outcome = verified(before, copied, after, want, rank)
        self._check(key, rank, slot, generation, copied, outcome, after, pinned_at)
        return outcome

    def _check(
        self, key: bytes, rank: int, slot: int, generation: int, copied: bytearray, outcome: Outcome,
        after: Header | None, pinned_at: float,
    ) -> None:  # fmt: skip
        """The promises about one page that was fetched and pinned."""
        world, agent = self.world, self.agent
        part_bytes = self.cohort.part_bytes
        expected = page_bytes_of(key, self.cohort.shape.page_bytes)[rank * part_bytes : (rank + 1) * part_bytes]
        if outcome is Outcome.HIT and copied != expected:
            world.violate("wrong bytes in a hit", self.process.name, slot, generation, key.hex())
        if outcome is Outcome.CORRUPT:
            world.corrupt_page_found(agent.agent_id, slot, generation, self.process.name)
        is_pinned = agent.process.clock() < pinned_at + agent.pool.table.settings.pin_ttl_s
        is_disturbed = agent.process.is_dead or (agent.process.disturbed_at >= 0 and world.profile.clock_jumps > 0)
        if is_pinned and not is_disturbed and (after is None or after.generation != generation):
            world.violate("a pinned slot was reused", self.process.name, slot, generation)

    def _release(self, client: int, answer: _Answer, outcomes: list[Outcome]) -> None:
        bad = np.array([value in (Outcome.STALE, Outcome.CORRUPT) for value in outcomes], dtype=np.bool_)
        bad &= answer.outcomes == Outcome.HIT
        codes = np.array(outcomes, dtype=np.uint8)[bad]
        message = through_wire(Release(answer.pin, pack(answer.slots[bad], U4), pack(codes, U1)), Release)
        slots = unpack(message.bad_slots, U4, int(bad.sum()), "bad_slots")
        corrupt = frozenset(slots[unpack(message.bad_outcomes, U1, len(slots), "x") == Outcome.CORRUPT].tolist())
        self.agent.process.post(lambda: self.agent.pool.release(client, message.pin, corrupt))

    # ---- publishing

    async def _publish(self, rank: int, chain: ChainSlice) -> None:
        client = self.clients[rank]
        message = through_wire(Reserve(chain.first, chain.keys, chain.anchors), Reserve)
        asked = _chain_of(message)
        pool = self.agent.pool
        reservation = await self._ask(
            "reserve", 1.0,
            lambda until: pool.reserve(client, asked.keys, asked.partitions(), self.cohort, rank, until),
            lambda late: pool.abandon(client, *_granted(late)),
        )  # fmt: skip
        if reservation is None:
            return
        answer = through_wire(_packed(reservation), Reserved)
        write = np.flatnonzero(unpack(answer.statuses, U1, len(chain), "statuses") == ReserveStatus.WRITE)
        slots = unpack(answer.slots, U4, len(chain), "slots")[write]
        generations = unpack(answer.generations, U4, len(chain), "generations")[write]
        offsets = unpack(answer.offsets, U8, len(chain), "offsets")[write]
        if not len(write):
            return
        is_late = self.world.buggify()
        checksums = []
        for idx, offset in zip(write.tolist(), offsets.tolist(), strict=True):
            key = chain.keys[idx * KEY_BYTES : (idx + 1) * KEY_BYTES]
            checksums.append(await self._write(key, rank, offset, is_late))
        if self.world.buggify():
            self.agent.process.post(lambda: pool.abandon(client, slots, generations))
            return
        await self._commit(client, rank, slots, generations, checksums)

    async def _write(self, key: bytes, rank: int, offset: int, is_late: bool) -> int:
        """Copies one part into its slot, in pieces. A device that was told to copy does so whatever happens to us."""
        part_bytes = self.cohort.part_bytes
        payload = self.agent.pool.memory.payload
        part = page_bytes_of(key, self.cohort.shape.page_bytes)[rank * part_bytes : (rank + 1) * part_bytes]
        start = offset + rank * part_bytes
        delay_s = 0.0
        for at, stop in _pieces(part_bytes):
            if at and self._rng.random() < 0.3:
                delay_s += min(self._rng.expovariate(1 / 0.02), DMA_AFTER_DEATH_S / PIECES)

            def copy(at: int = at, stop: int = stop) -> None:
                payload[start + at : start + stop] = part[at:stop]

            self.world.later(delay_s, copy)
        await self.process.sleep(delay_s + (3.0 * self._rng.random() if is_late else 0.0))
        return checksum(part)

    async def _commit(
        self, client: int, rank: int, slots: NDArray[np.uint32], generations: NDArray[np.uint32], checksums: list[int]
    ) -> None:
        packed = Commit(pack(slots, U4), pack(generations, U4), pack(np.array(checksums, dtype=np.uint64), U8))
        message = through_wire(packed, Commit)
        accepted = await self._ask("commit", 1.0, lambda _: self._commit_there(message, client, rank, len(slots)))
        if accepted is None:
            self.agent.process.post(lambda: self.agent.pool.abandon(client, slots, generations))
        else:
            through_wire(Committed(pack((~accepted).astype(np.uint8), U1)), Committed)
            self.world.note("published", self.process.name, rank, int(accepted.sum()), len(slots))

    async def _commit_there(self, message: Commit, client: int, rank: int, n: int) -> NDArray[np.bool_]:
        slots = unpack(message.slots, U4, n, "slots")
        generations = unpack(message.generations, U4, n, "generations")
        checksums = unpack(message.checksums, U8, n, "checksums")
        return self.agent.pool.commit(client, self.cohort, rank, slots, generations, checksums)

    # ---- asking the agent

    async def _ask(self, kind: str, wait_s: float, ask: Ask[M], late: Callable[[M], None] | None = None) -> M | None:
        """The agent's answer to one request; None when it does not come in time. `late` gets one that comes later, to
        give back what it grants."""
        agent = self.agent
        if agent.process.is_dead:
            return None
        call = self._calls.begin(kind, agent, wait_s - ANSWER_MARGIN_S)
        until = agent.process.clock() + wait_s - ANSWER_MARGIN_S
        task = agent.process.spawn(self._answer(call, ask, until))
        self._asked[task] = call

        def forget() -> None:
            self._asked.pop(task, None)

        task.then(forget)
        await self.process.wait_any([task], self.process.clock() + wait_s)
        if task.is_done:
            return None if task.is_failed else task.result()
        if late is not None:
            task.then(lambda: None if task.is_failed or self.process.is_dead else late(task.result()))
        return None

    async def _answer(self, call: int, ask: Ask[M], until: float) -> M:
        answer = await ask(until)
        self._calls.end(call)
        return answer


def through_wire(message: W, kind: type[W]) -> W:
    """The message after it was packed and unpacked, as its receiver sees it."""
    received = decode_client(encode(message))
    assert isinstance(received, kind)  # noqa: S101 - the codec gives back what it took
    return received


def _chain_of(message: Locate | Fetch | Reserve) -> ChainSlice:
    n_chain_keys(message.first, message.keys, message.anchors)
    return ChainSlice(message.first, message.keys, message.anchors)


def _pieces(n_bytes: int) -> list[tuple[int, int]]:
    size = -(-n_bytes // PIECES)
    return [(at, min(at + size, n_bytes)) for at in range(0, n_bytes, size)]


def _granted(reservation: Reservation) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    is_granted = reservation.statuses == ReserveStatus.WRITE
    return reservation.slots[is_granted], reservation.generations[is_granted]


def _packed(reservation: Reservation) -> Reserved:
    statuses = reservation.statuses
    statuses[statuses == ReserveStatus.BUSY] = ReserveStatus.PRESENT
    return Reserved(
        pack(statuses, U1), pack(reservation.slots, U4), pack(reservation.generations, U4),
        pack(reservation.offsets, U8),
    )  # fmt: skip


def _unpacked(fetched: tuple[NDArray[np.uint8], Found], n: int, pin_ttl_s: float) -> _Answer:
    outcomes, found = fetched
    packed = Fetched(
        pack(outcomes, U1), pack(found.slots, U4), pack(found.generations, U4), pack(found.offsets, U8), found.pin,
        int(pin_ttl_s * 1000),
    )  # fmt: skip
    answer = through_wire(packed, Fetched)
    return _Answer(
        unpack(answer.outcomes, U1, n, "outcomes"),
        unpack(answer.slots, U4, n, "slots"),
        unpack(answer.generations, U4, n, "generations"),
        unpack(answer.offsets, U8, n, "offsets"),
        answer.pin,
    )
