"""How agents start and end: what cannot be as configured is said at once, and nothing else keeps an engine waiting."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvpeer.client import embedded
from kvpeer.client.settings import ClientSettings

from processes.agents import COMMAND, HOST, SMALL, Cluster, address_files, finds, free_port, publish_all, variables
from processes.engine import Engine
from processes.handles import eventually

pytestmark = pytest.mark.process

PAGES = range(4)
NOWHERE = {
    "a port where nobody listens": lambda: f"{HOST}:{free_port()}",
    "an address that does not answer": lambda: "192.0.2.1:7000",
    "a name that does not exist": lambda: "agents.invalid:7000",
}


def test_wrong_seeds_keep_no_engine_waiting_and_a_right_one_among_them_is_found(cluster: Cluster) -> None:
    wrong = [make() for make in NOWHERE.values()]
    a = cluster.launch("a", {"agent.seeds": ",".join(wrong)}).wait_serving()
    alone = cluster.engine(a)
    publish_all(alone, PAGES)
    assert alone.fetch(*PAGES) == ["HIT"] * len(PAGES)
    assert alone.locate(100, 101) == [0, 0]
    eventually(lambda: "cannot be joined" in a.log)
    assert any(f"seed {seed} cannot be joined" in a.log for seed in wrong)
    (cluster.folder / "elsewhere").mkdir(mode=0o700)
    secret = (cluster.runtime_dir / "secret").read_text().strip()
    elsewhere = {
        "agent.runtime_dir": str(cluster.folder / "elsewhere"),
        "agent.seeds": ",".join([*wrong, f"{HOST}:{a.control_port}"]),
        "security.secret": secret,
    }
    b = cluster.launch("b", elsewhere).wait_serving()
    cluster.wait_members()
    reader = cluster.engine(b)
    finds(reader, PAGES)
    assert reader.fetch(*PAGES) == ["HIT"] * len(PAGES)


def run_agent(folder: Path, settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """An agent that is expected to end by itself."""
    own = {"agent.runtime_dir": str(folder), "agent.log_level": "error"}
    return subprocess.run(
        [*COMMAND, *arguments],
        env=variables({**SMALL, **own, **settings}),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvpeer: ")
    assert done.stderr.count("\n") == 1, "one line for people, no trace"
    for word in words:
        assert word in done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.mark.parametrize("key", ["agent.control_port", "agent.data_port", "metrics.port"])
def test_a_taken_port_ends_the_start_and_names_its_key(folder: Path, key: str) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(run_agent(folder, {key: str(port)}), key, str(port))


def test_a_socket_at_which_another_agent_serves_is_not_taken_over(folder: Path) -> None:
    path = str(folder / "agent.sock")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as taken:
        taken.bind(path)
        taken.listen()
        assert_refused(run_agent(folder, {"agent.socket": path}), "agent.socket", path)
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.connect(path)


def _with_misspelt_key(folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    (folder / "agent.yaml").write_text("pool:\n  sise: 1Gi\n")
    return {}, ["--config", str(folder / "agent.yaml")], ["pool.sise", "pool.size"]


def _with_misspelt_variable(folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    return {"pool.sise": "1Gi"}, [], ["KVPEER_POOL_SISE", "KVPEER_POOL_SIZE"]


def _with_short_secret(folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    return {"security.secret": "ab" * 8}, [], ["security.secret", "at least 128", "openssl rand"]


@pytest.mark.parametrize("fault", [_with_misspelt_key, _with_misspelt_variable, _with_short_secret])
def test_a_faulty_setting_ends_the_start_and_names_key_and_fix(
    folder: Path, fault: Callable[[Path], tuple[dict[str, str], list[str], list[str]]]
) -> None:
    settings, arguments, words = fault(folder)
    assert_refused(run_agent(folder, settings, *arguments), *words)


def test_a_stopped_agent_leaves_nothing_behind_and_says_goodbye(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    assert len(list(address_files(cluster.runtime_dir))) == 2
    assert a.stop() == 0
    assert [address["name"] for address in address_files(cluster.runtime_dir)] == ["b"]
    assert not os.path.exists(a.socket)
    assert "Traceback" not in a.log
    eventually(lambda: f"agent {a.agent_id.hex()} ended" in b.log)
    cluster.wait_members()


@pytest.fixture
def of_one_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's environment. Agents that are started in it are ended."""
    for name in [name for name in os.environ if name.startswith("KVPEER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    before = list(embedded.started_agents)
    yield folder
    for agent in [agent for agent in embedded.started_agents if agent not in before]:
        if not agent.has_ended():
            os.kill(agent.pid, signal.SIGKILL)
        assert agent.has_ended(10)


def test_embedded_agents_of_one_user_find_each_other_and_end_after_their_last_engine(of_one_user: Path) -> None:
    small = {"KVPEER_AGENT_LINGER": "1s", "KVPEER_POOL_SIZE": "16Mi", "KVPEER_POOL_EXTENT_SIZE": "1Mi"}
    engines = [
        Engine("", settings=ClientSettings(engine=name, start_timeout_s=30, agent_environment=small))
        for name in ("one", "two")
    ]
    agents = embedded.started_agents[-2:]
    try:
        producer, reader = engines
        publish_all(producer, PAGES)
        finds(reader, PAGES)
        assert reader.fetch(*PAGES) == ["HIT"] * len(PAGES)
    finally:
        engines[0].client.close()
    assert agents[0].has_ended(20), "it lingered for a second and ended"
    assert not agents[1].has_ended(), "the other one has an engine"
    engines[1].client.close()
    assert agents[1].has_ended(20)
    assert list(address_files(of_one_user / "kvpeer")) == []
