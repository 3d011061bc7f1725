"""Real agents behind `kvpeer chaos`: whatever the network does, a fetch ends by its deadline, a hit has the right
bytes, and when the fault is over pages are hits again."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kvpeer.core.ring import Ring
from kvpeer.model import AgentId

from processes.agents import POLL_S, AgentProcess, Cluster, finds, publish_all
from processes.engine import PAGE_BYTES, Engine, chain_of
from processes.handles import eventually
from processes.injector import Injector

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(120)]

DEADLINE_S = 1.0
SLACK_S = 2.0
"""What a loaded machine may take beyond a deadline, before a test calls it missed."""

RECOVERY_S = 20.0
"""From the end of a fault to hits: a location that failed is left alone for 10 s, a peer that failed for a few seconds,
one that was believed dead is probed each second."""

DELAY_S = 0.1
"""Of a slow link: many times the 20 ms after which an owner is late, and too little to be taken for dead."""

N_PAGES = 8
N_CHAINS = 2
MID_PAGE_BYTES = 2 * PAGE_BYTES + PAGE_BYTES // 2
"""So far into the answer to a fetch a page is under way."""

BEFORE, BEHIND = "127.0.0.2", "127.0.0.3"
"""Addresses of the proxies and of the agents. Connections that are opened have 127.0.0.1, and so take none of the ports
that were found free here."""

NAMES = ("a", "b", "c")
CONTROL = tuple(f"{name}-control" for name in NAMES)
DATA = ("a-data",)

ALLOWED = {"HIT", "MISS", "STALE", "CORRUPT", "TIMEOUT", "REFUSED"}


@dataclass
class Scene:
    """Three agents, each behind proxies for its control and its data port; an engine that publishes at the first and
    one that reads at the second."""

    cluster: Cluster
    injector: Injector
    agents: dict[str, AgentProcess]
    producer: Engine
    reader: Engine
    numbers: Iterator[int] = field(default_factory=itertools.count)
    requests: Iterator[str] = field(default_factory=lambda: (f"request {n}" for n in itertools.count()))

    def chain(self) -> list[int]:
        """Pages that nobody has had so far, which the reader can find."""
        chain = list(itertools.islice(self.numbers, N_PAGES))
        publish_all(self.producer, chain)
        finds(self.reader, chain)
        return chain

    def fetch(self, chain: Sequence[int], request: str = "") -> list[str]:
        """The outcomes, which come by the deadline and none of which is a lie."""
        outcomes = self.reader.fetch(*chain, deadline_s=DEADLINE_S, request=request or next(self.requests))
        assert self.reader.last_fetch_s < DEADLINE_S + SLACK_S
        assert set(outcomes) <= ALLOWED
        return outcomes

    def wait_hits(self, chains: Sequence[Sequence[int]]) -> None:
        """Returns when all these pages are hits."""
        for chain in chains:
            eventually(lambda chain=chain: set(self.fetch(chain)) == {"HIT"}, RECOVERY_S, POLL_S)

    def fetch_under(self, routes: Sequence[str], *faults: dict[str, Any]) -> list[Counter[str]]:
        """The outcomes of some fetches while these routes have these faults, one after the other; afterwards all agents
        see each other and the same pages are hits."""
        chains = [[self.chain() for _ in range(N_CHAINS)] for _ in faults]
        outcomes: list[Counter[str]] = [Counter() for _ in faults]
        for fault, theirs, counts in zip(faults, chains, outcomes, strict=True):
            n_before = self.injector.n_injected(fault["kind"], *routes)
            with self.injector.injecting(*routes, **fault):
                if routes == CONTROL:  # where agents talk without being asked: the fault has struck before they are
                    eventually(lambda fault=fault, n=n_before: self.injector.n_injected(fault["kind"], *routes) > n)
                for chain in theirs:
                    counts.update(self.fetch(chain))
        self.cluster.wait_members()
        self.wait_hits(list(itertools.chain(*chains)))
        for agent in self.agents.values():
            assert "Traceback" not in agent.log
            eventually(lambda agent=agent: agent.metric("kvpeer_pool_pages", state="writing") == 0, poll_s=POLL_S)
            assert agent.metric("kvpeer_pool_corrupt_pages_total") == 0, "what is damaged on the way is no bad memory"
        return outcomes


def free_ports(host: str, n: int) -> list[int]:
    """Ports that nobody uses at the moment, each another one."""
    with contextlib.ExitStack() as listening:
        return [listening.enter_context(socket.create_server((host, 0))).getsockname()[1] for _ in range(n)]


@contextlib.contextmanager
def behind_proxies(
    cluster: Cluster, names: Sequence[str], settings: Mapping[str, str] | None = None
) -> Iterator[tuple[Injector, dict[str, AgentProcess]]]:
    """Agents, started one after the other, whose peers know nothing but their proxies; and these."""
    routes = [f"{name}-{port}" for name in names for port in ("control", "data")]
    ports = dict(zip(routes, free_ports(BEHIND, len(routes)), strict=True))
    targets = {route: f"{BEHIND}:{port}" for route, port in ports.items()}
    with contextlib.closing(Injector(cluster.folder / "chaos", targets, BEFORE)) as injector:
        agents = {}
        for name in names:
            listens = {f"agent.{port}_port": str(ports[f"{name}-{port}"]) for port in ("control", "data")}
            told = {
                f"agent.advertise_{port}_port": str(injector.port(f"{name}-{port}")) for port in ("control", "data")
            }
            hosts = {"agent.host": BEHIND, "agent.advertise_host": BEFORE}
            agents[name] = cluster.launch(name, {**hosts, **listens, **told, **(settings or {})}).wait_serving()
        cluster.wait_members()
        yield injector, agents


@contextlib.contextmanager
def set_up(cluster: Cluster, settings: Mapping[str, str] | None = None) -> Iterator[Scene]:
    with behind_proxies(cluster, NAMES, settings) as (injector, agents):
        yield Scene(cluster, injector, agents, cluster.engine(agents["a"]), cluster.engine(agents["b"]))


@pytest.fixture(scope="module")
def scene(shared_cluster: Cluster) -> Iterator[Scene]:
    """One for all who leave pages as hits. A link may still break of what an earlier test did to it."""
    with set_up(shared_cluster) as scene:
        yield scene


@pytest.fixture
def new_scene(cluster: Cluster) -> Iterator[Scene]:
    """One without a past, whose links are whole."""
    with set_up(cluster) as scene:
        yield scene


def bytes_of(injector: Injector, route: str) -> dict[str, int]:
    return {way: injector.status()["routes"][route][way]["bytes"] for way in ("to_agent", "from_agent")}


def test_all_that_agents_say_to_each_other_passes_the_proxies(scene: Scene) -> None:
    before = bytes_of(scene.injector, "a-data")
    assert set(scene.fetch(scene.chain())) == {"HIT"}
    eventually(lambda: bytes_of(scene.injector, "a-data")["from_agent"] - before["from_agent"] > N_PAGES * PAGE_BYTES)
    assert sum(sum(bytes_of(scene.injector, route).values()) for route in CONTROL) > 0
    assert "peers are told" in scene.agents["a"].log


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "truncate", "direction": "from_agent", "after_bytes": MID_PAGE_BYTES},
        {"kind": "truncate", "direction": "to_agent", "after_bytes": 40},
        {"kind": "reset", "direction": "from_agent", "after_bytes": MID_PAGE_BYTES},
        {"kind": "blackhole", "direction": "from_agent", "after_bytes": MID_PAGE_BYTES},
        {"kind": "blackhole", "direction": "to_agent", "after_bytes": 0},
        {"kind": "freeze"},
    ],
    ids=lambda fault: f"{fault['kind']} {fault.get('direction', 'both')}",
)
def test_pages_that_do_not_come_whole_are_no_hits_and_the_peer_stays_a_member(scene: Scene, fault: dict) -> None:
    n_ended = scene.agents["b"].log.count(" ended\n")
    (outcomes,) = scene.fetch_under(DATA, fault)
    assert outcomes["HIT"] < N_CHAINS * N_PAGES
    assert scene.agents["b"].log.count(" ended\n") == n_ended


def test_corrupted_pages_and_requests_are_never_hits_with_wrong_bytes(scene: Scene) -> None:
    answers = {"kind": "corrupt", "direction": "from_agent", "probability": 0.02}
    # In a hello: its capability, and then a key. In a request on an old connection: a generation, a key.
    requests = [{"kind": "corrupt", "direction": "to_agent", "after_bytes": n} for n in (20, 100)]
    of_answers, *of_requests = scene.fetch_under(DATA, answers, *requests)
    assert of_answers["CORRUPT"] > 0, "most of what passes are the bytes of pages"
    for outcomes in of_requests:
        assert outcomes["HIT"] < N_CHAINS * N_PAGES


def test_without_checksums_the_same_corruption_gives_wrong_hits(cluster: Cluster) -> None:
    """That is what they are for; and the tests here would see a wrong hit."""
    with set_up(cluster, {"transport.verify": "generation"}) as scene:
        chain = scene.chain()
        with scene.injector.injecting(*DATA, kind="corrupt", direction="from_agent", probability=0.02):
            assert "WRONG" in scene.reader.fetch(*chain, request="unchecked")


def test_a_slow_data_path_delivers_all_the_same(scene: Scene) -> None:
    (outcomes,) = scene.fetch_under(DATA, {"kind": "delay", "delay_ms": 30, "jitter_ms": 20})
    assert outcomes == {"HIT": N_CHAINS * N_PAGES}


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "delay", "delay_ms": 20, "jitter_ms": 20},
        {"kind": "corrupt", "probability": 0.5},
        {"kind": "truncate", "after_bytes": 100},
        {"kind": "reset", "probability": 0.5},
        {"kind": "blackhole", "after_bytes": 100},
    ],
    ids=lambda fault: fault["kind"],
)
def test_a_faulty_control_channel_costs_deadlines_and_links_and_nothing_else(scene: Scene, fault: dict) -> None:
    """TLS turns every corrupted byte into the end of a link."""
    (outcomes,) = scene.fetch_under(CONTROL, fault)
    if fault["kind"] == "delay":
        assert outcomes == {"HIT": N_CHAINS * N_PAGES}


def test_a_frozen_data_path_times_out_while_the_peer_answers_all_questions(new_scene: Scene) -> None:
    chain = new_scene.chain()
    with new_scene.injector.injecting(*DATA, kind="freeze"):
        # Located first: a producer whose pages do not come is soon not promised any more.
        assert new_scene.reader.locate(*chain, request="frozen") == [2] * N_PAGES
        assert set(new_scene.fetch(chain, request="frozen")) == {"TIMEOUT"}
        assert new_scene.agents["b"].knows(len(NAMES))
    new_scene.wait_hits([chain])


def test_a_frozen_control_channel_costs_no_page_that_was_located_and_then_the_membership(new_scene: Scene) -> None:
    located, others = new_scene.chain(), new_scene.chain()
    new_scene.fetch(new_scene.chain())  # leaves an open data connection
    assert new_scene.reader.locate(*located, request="located") == [2] * N_PAGES
    with new_scene.injector.injecting(*CONTROL, kind="freeze"):
        assert set(new_scene.fetch(located, request="located")) == {"HIT"}
        for agent in new_scene.agents.values():
            eventually(lambda agent=agent: agent.knows(1), poll_s=POLL_S)
        assert "HIT" not in new_scene.fetch(others)
    new_scene.cluster.wait_members()
    new_scene.wait_hits([others])


def n_lookups(agent: AgentProcess) -> float:
    outcomes = ("answered", "refused", "failed")
    return sum(agent.metric("kvpeer_links_requests_total", message="Lookup", outcome=outcome) for outcome in outcomes)


def pages_owned_by(engine: Engine, agents: Mapping[str, AgentProcess], owners: str) -> Iterator[int]:
    """Pages, each a chain of its own, whose owners are these agents ("ac": first a, then c)."""
    ring = Ring.build([AgentId(agent.agent_id) for agent in agents.values()], 2, 160)
    wanted = [agents[name].agent_id for name in owners]
    for number in itertools.count():
        found = ring.owners(chain_of(engine.namespace, number).partitions())[0]
        if [ring.members[idx] for idx in found] == wanted:
            yield number


def test_a_slow_owner_is_hedged_to_the_other_one(cluster: Cluster) -> None:
    """The link between the first two agents passes the first one's proxy, because the second one dialled."""
    with behind_proxies(cluster, NAMES) as (injector, agents):
        publisher, reader = cluster.engine(agents["c"]), cluster.engine(agents["b"])
        numbers = list(itertools.islice(pages_owned_by(reader, agents, "ac"), 10))
        for number in numbers:
            publish_all(publisher, [number])
            finds(reader, [number])

        def ask(number: int, request: str) -> tuple[float, float]:
            """Owners that were asked, and how long it took to find the page."""
            before = n_lookups(agents["b"])
            started = time.monotonic()
            assert reader.locate(number, request=request) == [2]
            took_s = time.monotonic() - started
            return n_lookups(agents["b"]) - before, took_s

        assert any(ask(number, f"quick {number}")[0] == 1 for number in numbers), "who answers at once is asked alone"
        with injector.injecting("a-control", kind="delay", delay_ms=DELAY_S * 1000):
            asked = [ask(number, f"slow {number}") for number in numbers[:4]]
        assert {n_asked for n_asked, _ in asked} == {2}
        assert min(took_s for _, took_s in asked) < 2 * DELAY_S, "the slow owner alone takes a round trip"


@pytest.mark.parametrize("direction", ["to_agent", "both"])
def test_a_connection_that_nothing_passes_any_more_is_opened_anew_though_both_agents_live(
    cluster: Cluster, direction: str
) -> None:
    """A box in the middle has forgotten the connection of two agents. Neither is told, and both see each other by way
    of the third; but what the one publishes does not reach the other, who would say for ever that it does not exist."""
    with behind_proxies(cluster, NAMES) as (injector, agents):
        publisher, reader = cluster.engine(agents["b"]), cluster.engine(agents["a"])
        numbers = pages_owned_by(reader, agents, "cb")
        before = next(numbers)
        publish_all(publisher, [before])
        finds(reader, [before])
        links = [f"{name}-control" for name in "bc"]  # between them, whoever of the two dialled
        for link in links:
            injector.set(link, {"kind": "blackhole", "direction": direction, "after_bytes": 0})
        eventually(lambda: injector.n_injected("blackhole", *links) > 0, poll_s=POLL_S)
        injector.clear()  # who dials anew gets through
        number = next(numbers)
        publish_all(publisher, [number])
        finds(reader, [number])
        for agent in agents.values():
            assert " ended\n" not in agent.log


def test_a_test_that_injects_nothing_fails(scene: Scene) -> None:
    with (
        pytest.raises(AssertionError, match="no truncate was injected"),
        scene.injector.injecting(*DATA, kind="truncate", after_bytes=1 << 40),
    ):
        assert set(scene.fetch(scene.chain())) == {"HIT"}


def random_fault(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["delay", "freeze", "blackhole", "reset", "truncate", "corrupt"])
    direction = {"kind": kind, "direction": rng.choice(["to_agent", "from_agent", "both"])}
    if kind == "delay":
        return {**direction, "delay_ms": rng.choice([1, 20, 200]), "jitter_ms": rng.choice([0, 100])}
    if kind == "freeze":
        return {**direction, "until_s": rng.choice([0.2, 2.0])}
    return {**direction, "probability": rng.choice([0.001, 0.02, 0.3]), "after_bytes": rng.choice([0, 1000, 100_000])}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_faults_of_all_kinds_on_all_routes_at_once_never_make_a_wrong_hit(scene: Scene) -> None:
    seed = int(os.environ.get("KVPEER_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"again with  KVPEER_CHAOS_SEED={seed}")
    rng = random.Random(seed)
    routes = [f"{name}-{port}" for name in NAMES for port in ("control", "data")]
    outcomes: Counter[str] = Counter()
    for _ in range(15):
        chains = [scene.chain() for _ in range(4)]
        for route in routes:
            scene.injector.set(route, *(random_fault(rng) for _ in range(rng.choice([0, 1, 2]))))
        for chain in chains:
            outcomes.update(scene.fetch(chain))
        scene.injector.clear()
        scene.cluster.wait_members()
        scene.wait_hits(chains)
    print(outcomes, scene.injector.status())
    assert outcomes["HIT"] < outcomes.total()
