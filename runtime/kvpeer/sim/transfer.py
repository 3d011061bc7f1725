"""The data plane between simulated agents: pages read out of a producer's memory while it changes, and verified.

A model of the native server, of `transport/` and of `agent/data_peers.py`: a capability from the control channel opens
a connection; one request at a time; each page is header, payload in pieces, header again. At its deadline a fetch gives
the connection up, and nothing arrives any more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.view import ClusterView
from kvpeer.model import (
    KEY_BYTES,
    AdmissionRefusedError,
    AgentId,
    CapacityError,
    KvPeerError,
    Outcome,
    PeerUnavailableError,
    RemoteProtocolError,
)
from kvpeer.sim.kernel import Future, Process
from kvpeer.sim.links import Handlers, Links
from kvpeer.sim.memory import Header, Part, PoolMemory, SlotState, verified
from kvpeer.wire.messages import AgentInfo, DataAdmission, OpenData, PeerMessage

__all__ = ["Answer", "Batch", "DataPeers", "DataServer", "Fetched", "Servers"]

CAPABILITY_BYTES = 32
CAPABILITY_TTL_S = 5.0
CAPABILITIES_MAX = 1024
"""Handed out and not used yet, as in the native server."""
PIECES = 3
"""Of a payload; between two of them other things may happen to the slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pages of one producer and where each is to go in the reader's memory."""

    keys: bytes
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    destinations: list[int]

    def __len__(self) -> int:
        return len(self.slots)

    def key(self, idx: int) -> bytes:
        return self.keys[idx * KEY_BYTES : (idx + 1) * KEY_BYTES]


@dataclass(slots=True)
class Fetched:
    """A `core.pull.FetchAnswer`. `parts`: the part table that came with each page."""

    outcomes: NDArray[np.uint8]
    parts: list[tuple[Part, ...]]
    error: KvPeerError | None = None

    @property
    def n_parts(self) -> NDArray[np.uint16]:
        return np.array([len(table) for table in self.parts], dtype=np.uint16)

    @property
    def n_asked(self) -> int:
        return len(self.parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """One page as it was sent; `before` is None when the producer says that it is not there."""

    before: Header | None
    payload: bytes
    after: Header | None


@dataclass(slots=True, eq=False)
class Connection:
    """`answers`: what has arrived for the request under way."""

    reader_id: AgentId
    server: DataServer
    is_open: bool = True
    answers: list[Answer] = field(default_factory=list)
    arrived: Future[None] = field(default_factory=Future)

    def close(self) -> None:
        self.is_open = False
        self.arrived.set(None)


class DataServer:
    """The producer's side. `lie` may change what is sent."""

    def __init__(
        self,
        run_id: AgentId,
        host: int,
        memory: PoolMemory,
        process: Process,
        rng: random.Random,
        lie: Callable[[Answer, AgentId], Answer] | None = None,
    ) -> None:
        self.host = host
        self.process = process
        self.connections: list[Connection] = []
        self.admissions: dict[bytes, tuple[AgentId, float]] = {}
        self._run_id = run_id
        self._memory = memory
        self._rng = rng
        self._lie = lie

    def handlers(self) -> Handlers:
        return {OpenData: self._admit}

    def revoke(self, reader_id: AgentId) -> None:
        """The reader ended: its connections are closed, its capabilities void."""
        self.admissions = {cap: entry for cap, entry in self.admissions.items() if entry[0] != reader_id}
        for connection in [connection for connection in self.connections if connection.reader_id == reader_id]:
            self.close(connection)

    def close(self, connection: Connection) -> None:
        connection.close()
        if connection in self.connections:
            self.connections.remove(connection)

    def open(self, capability: bytes, reader_id: AgentId, producer_id: AgentId) -> Connection | None:
        """A connection for who shows a capability that was given to it, by this run."""
        entry = self.admissions.pop(capability, None)
        if entry is None or entry[0] != reader_id or entry[1] < self.process.clock() or producer_id != self._run_id:
            return None
        connection = Connection(reader_id, self)
        self.connections.append(connection)
        return connection

    async def serve(self, connection: Connection, batch: Batch, send: Callable[[Answer], None]) -> None:
        """Reads page by page and sends each; other things happen meanwhile."""
        for idx in range(len(batch)):
            answer = await self._read(int(batch.slots[idx]), int(batch.generations[idx]), batch.key(idx))
            if not connection.is_open:
                return
            send(answer if self._lie is None else self._lie(answer, self._run_id))

    async def _read(self, slot: int, generation: int, key: bytes) -> Answer:
        before = self._memory.header(slot)
        is_there = (
            before is not None
            and before.state is SlotState.COMMITTED
            and (before.generation, before.key) == (generation, key)
        )
        if not is_there or before is None:
            return Answer(None, b"", None)
        payload = bytearray(before.length)
        piece_bytes = -(-before.length // PIECES)
        for start in range(0, before.length, piece_bytes):
            if start and self._rng.random() < 0.4:
                await self.process.sleep(self._rng.expovariate(1 / 0.01))
            address = self._memory.address(slot) + start
            stop = min(start + piece_bytes, before.length)
            payload[start:stop] = self._memory.payload[address : address + stop - start]
        return Answer(before, bytes(payload), self._memory.header(slot))

    def _admit(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, OpenData)  # noqa: S101 - what it is registered for
        now = self.process.clock()
        self.admissions = {cap: entry for cap, entry in self.admissions.items() if entry[1] >= now}
        if len(self.admissions) >= CAPABILITIES_MAX:
            raise CapacityError("too many capabilities are unused")
        capability = self._rng.randbytes(CAPABILITY_BYTES)
        self.admissions[capability] = (AgentId(peer.agent_id), now + CAPABILITY_TTL_S)
        return DataAdmission(capability, round(CAPABILITY_TTL_S * 1000))


class Servers:
    """Who serves data at which address."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[str, int], DataServer] = {}

    def listen(self, info: AgentInfo, server: DataServer) -> None:
        self._by_address[info.host, info.data_port] = server

    def at(self, host: str, port: int) -> DataServer | None:
        return self._by_address.get((host, port))


class DataPeers:
    """The reader's side: one connection a producer, for one fetch at a time; further fetches open their own."""

    def __init__(
        self, own_id: AgentId, host: int, memory: PoolMemory, process: Process, links: Links, view: ClusterView,
        servers: Servers,
    ) -> None:  # fmt: skip
        self._own_id = own_id
        self._host = host
        self._memory = memory
        self._process = process
        self._links = links
        self._view = view
        self._servers = servers
        self._idle: dict[AgentId, Connection] = {}
        self.in_flight: Counter[AgentId] = Counter()

    def forget(self, producer: AgentId) -> None:
        """The producer ended: its connection is closed."""
        connection = self._idle.pop(producer, None)
        if connection is not None:
            connection.close()

    async def fetch(self, producer: AgentId, batch: Batch, deadline: float) -> Fetched:
        """Fetches, verified; ends by `deadline` on the own clock, and writes nothing afterwards."""
        self.in_flight[producer] += 1
        try:
            return await self._fetch(producer, batch, deadline)
        finally:
            self.in_flight[producer] -= 1
            if not self.in_flight[producer]:
                del self.in_flight[producer]

    async def _fetch(self, producer: AgentId, batch: Batch, deadline: float) -> Fetched:
        fetched = Fetched(np.full(len(batch), Outcome.MISS, dtype=np.uint8), [()] * len(batch))
        connection = None
        try:
            connection = await self._connection(producer, deadline)
            await self._exchange(connection, producer, batch, deadline, fetched)
        except KvPeerError as error:
            if connection is not None:
                connection.close()
            fetched.error = error
            unanswered = fetched.outcomes == Outcome.MISS
            if isinstance(error, AdmissionRefusedError):
                fetched.outcomes[unanswered] = Outcome.REFUSED
            elif self._process.clock() >= deadline:
                fetched.outcomes[unanswered] = Outcome.TIMEOUT
        else:
            if self._idle.setdefault(producer, connection) is not connection:
                connection.server.close(connection)
        return fetched

    async def _connection(self, producer: AgentId, deadline: float) -> Connection:
        idle = self._idle.pop(producer, None)
        if idle is not None and idle.is_open and not idle.server.process.is_dead:
            return idle
        info = self._view.info(producer)
        if info is None:
            raise PeerUnavailableError("the producer is not a member")
        answer = await self._links.request(producer, OpenData(1), max(0.001, deadline - self._process.clock()))
        if not isinstance(answer, DataAdmission) or len(answer.capabilities) != CAPABILITY_BYTES:
            raise RemoteProtocolError("the producer answered OpenData with something else")
        server = self._servers.at(info.host, info.data_port)
        if server is None:
            raise PeerUnavailableError("nobody serves data there")
        opened: Future[Connection | None] = Future()

        def open_there(_: bytes) -> None:
            server.process.post(lambda: opened.set(server.open(answer.capabilities, self._own_id, producer)))

        self._links.network.carry(self._host, server.host, b"\0" * 72, open_there)
        await self._process.wait_any([opened], deadline)
        if not opened.is_done:
            raise PeerUnavailableError("no data connection in time")
        connection = opened.result()
        if connection is None:
            raise AdmissionRefusedError("the producer did not admit this reader")
        return connection

    async def _exchange(
        self, connection: Connection, producer: AgentId, batch: Batch, deadline: float, fetched: Fetched
    ) -> None:
        server, network = connection.server, self._links.network
        connection.answers.clear()

        def arrive(answer: Answer) -> None:
            if connection.is_open:
                connection.answers.append(answer)
                connection.arrived.set(None)

        # One byte stream: answers keep their order, however late each is.
        last_at = 0.0

        def send(answer: Answer) -> None:
            nonlocal last_at
            if network.passes(server.host, self._host):
                last_at = max(last_at, server.process.kernel.now + network.delay(server.host, self._host))
                server.process.kernel.at(last_at, lambda: self._process.post(lambda: arrive(answer)))

        is_served = False

        def serve(_: bytes) -> None:
            nonlocal is_served
            if not is_served:  # a stream repeats nothing
                is_served = True
                server.process.post(lambda: _start(server, connection, batch, send))

        network.carry(self._host, server.host, b"\0" * 48, serve)
        for idx in range(len(batch)):
            while len(connection.answers) <= idx:
                connection.arrived = Future()
                if not connection.is_open or server.process.is_dead:
                    raise PeerUnavailableError("the data connection broke")
                await self._process.wait_any([connection.arrived], deadline)
                if self._process.clock() >= deadline and len(connection.answers) <= idx:
                    raise PeerUnavailableError("the deadline passed")
            self._take(connection.answers[idx], producer, batch, idx, fetched)

    def _take(self, answer: Answer, producer: AgentId, batch: Batch, idx: int, fetched: Fetched) -> None:
        """Puts a page where it belongs, then looks whether it is the right one."""
        want = Header(producer, SlotState.COMMITTED, int(batch.generations[idx]), batch.key(idx))
        outcome = Outcome.STALE
        if answer.before is not None and len(answer.payload) == batch.lengths[idx]:
            address = batch.destinations[idx]
            self._memory.payload[address : address + len(answer.payload)] = answer.payload
            outcome = verified(answer.before, answer.payload, answer.after, want)
        fetched.outcomes[idx] = outcome
        if answer.before is not None:
            fetched.parts[idx] = answer.before.parts


def _start(server: DataServer, connection: Connection, batch: Batch, send: Callable[[Answer], None]) -> None:
    if connection.is_open:
        server.process.spawn(server.serve(connection, batch, send))
