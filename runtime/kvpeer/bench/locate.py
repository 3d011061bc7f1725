"""Locating pages at peers: a client's question through two real agents, against the bare round trip between two.

One agent owns all pages asked for and another one holds them, so that the first agent, which is asked, has to ask
exactly one other. Everything is warm: links are open, the directory is in sync.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import numpy.typing as npt

from kvpeer.bench.agents import AgentProcess, cluster, wait_until
from kvpeer.bench.control import round_trips
from kvpeer.bench.rounds import Comparison, Experiment
from kvpeer.client import Client, ClientSettings, EngineLayout, Registration
from kvpeer.core.chain import ChainSlice, namespace_digest, partitions_of_anchors
from kvpeer.core.ring import Ring
from kvpeer.model import ANCHOR_GROUP_PAGES, KEY_BYTES, AgentId, InternalError
from kvpeer.wire.messages import Lookup
from kvpeer.wire.packing import U2, pack

__all__ = ["locating"]

N_KEYS = (1, 64, 512)
BUDGETS = {64: "excess <= 150"}

PAGE_BYTES = 4096
"""Only where pages are counts here, not their bytes."""

REPEATS = 60
"""Questions in one sample, of which the median counts."""

DEADLINE_S = 5.0
AT_A_PEER = 2  # LocateResult.statuses

SETTINGS = {"pool.size": "64Mi", "pool.extent_size": "16Mi", "directory.replicas": "1"}
"""One owner a page: with two replicas among three agents, the asked one would own most pages itself."""


@contextmanager
def locating() -> Iterator[Experiment]:
    """Medians of single questions, and how many messages a question makes."""
    with ExitStack() as entered:
        enter = entered.enter_context
        agents = enter(cluster())
        asked, owner, holder = agents.start(3, SETTINGS)
        reader, writer = (enter(closing(_engine(agent, part))) for agent, part in ((asked, -1), (holder, 0)))
        ring = Ring.build([AgentId(agent.agent_id) for agent in (asked, owner, holder)], replicas=1)
        of_owner = ring.owned_by(AgentId(owner.agent_id))
        rng = np.random.default_rng()
        chains = {n: _chain(rng, n, np.flatnonzero(of_owner)) for n in N_KEYS}
        mixed = _chain(rng, max(N_KEYS), np.arange(len(of_owner)))
        for chain in (*chains.values(), mixed):
            _publish(writer, reader, chain)
        bare = enter(round_trips(agents.folder))
        subjects: dict[str, Callable[[], float]] = {}
        rows = []
        for n, chain in chains.items():
            lookup = Lookup(chain.keys, pack(chain.partitions(), U2))
            subjects[f"bare {n}"] = functools.partial(bare, lookup, REPEATS)
            subjects[f"locate {n}"] = functools.partial(_median_us, reader, chain)
            name = "bare round trip of as many bytes"
            budget = BUDGETS.get(n)
            rows.append(Comparison(f"locate.{n}_keys", "us", f"locate {n}", f"bare {n}", name, budget=budget))
        subjects["messages"] = functools.partial(_messages, reader, mixed, (owner, holder))
        subjects["owners"] = lambda: float(_n_remote_owners(ring, mixed, asked))
        rows.append(
            Comparison(
                "locate.messages", "per question", "messages", "owners", "distinct other owners", budget="ratio <= 1"
            )
        )
        yield Experiment(subjects, rows)


_requests = itertools.count()


def _median_us(reader: Client, chain: ChainSlice) -> float:
    took = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        statuses = reader.locate(chain, f"request {next(_requests)}", DEADLINE_S).statuses
        took.append(time.perf_counter() - started)
        if (statuses != AT_A_PEER).any():
            raise InternalError("a page of the benchmark was not located")
    return 1e6 * statistics.median(took)


def _messages(reader: Client, chain: ChainSlice, others: Sequence[AgentProcess]) -> float:
    def n_served() -> float:
        series = 'kvpeer_links_served_requests_total{message="Lookup",outcome="answered"}'
        return sum(agent.metric(series) for agent in others)

    before = n_served()
    _median_us(reader, chain)
    return (n_served() - before) / REPEATS


def _n_remote_owners(ring: Ring, chain: ChainSlice, asked: AgentProcess) -> int:
    owners = {ring.members[idx] for idx in np.unique(ring.owners(chain.partitions())).tolist()}
    return len(owners - {AgentId(asked.agent_id)})


def _chain(rng: np.random.Generator, n: int, partitions: npt.NDArray[np.intp]) -> ChainSlice:
    """n pages whose anchors lie in these partitions."""
    keys = rng.integers(0, 256, (n, KEY_BYTES), np.uint8)
    anchors = keys[::ANCHOR_GROUP_PAGES]
    while not (fits := np.isin(partitions_of_anchors(anchors.tobytes()), partitions)).all():
        anchors[~fits] = rng.integers(0, 256, (int((~fits).sum()), KEY_BYTES), np.uint8)
    return ChainSlice(0, keys.tobytes(), anchors.tobytes())


def _engine(agent: AgentProcess, part: int) -> Client:
    """A client with one block; a scheduler where part is -1."""
    namespace = namespace_digest({"benchmark": "locate"})
    part_bytes = PAGE_BYTES if part >= 0 else 0
    registration = Registration("benchmark", namespace, {}, PAGE_BYTES, 1, part, 0, part_bytes)
    return Client.connect(ClientSettings(socket=agent.socket), registration)


def _publish(writer: Client, reader: Client, chain: ChainSlice) -> None:
    """Returns when all pages can be found by the reader."""
    block = np.zeros(PAGE_BYTES, np.uint8)
    layout = EngineLayout(
        np.array([block.ctypes.data], np.uint64), np.array([0], np.uint64), np.array([PAGE_BYTES], np.uint32)
    )
    writer.register_layout(layout)
    blocks = np.zeros(len(chain), np.int64)
    wait_until(lambda: writer.publish(chain, blocks, DEADLINE_S).n_refused == 0, "pages were not published")
    found = functools.partial(reader.locate, chain, "", DEADLINE_S)
    wait_until(lambda: bool((found().statuses == AT_A_PEER).all()), "pages were not found")
