"""How agents start and end: what cannot be as configured is said at once, and nothing else keeps an engine waiting."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvpeer.client import embedded
from kvpeer.client.settings import ClientSettings

from processes.agents import (
    COMMAND,
    HOST,
    SMALL,
    START_DEADLINE_S,
    Cluster,
    address_files,
    finds,
    free_port,
    publish_all,
    variables,
)
from processes.engine import Engine
from processes.handles import FOLDER, RUNTIME, eventually

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


def _secret_in_a_variable(folder: Path) -> dict[str, str]:
    return {"security.secret": "ab" * 32}


def _secret_in_a_file(folder: Path) -> dict[str, str]:
    (folder / "given").touch(mode=0o600)
    (folder / "given").write_text("ab" * 32)
    return {"security.secret_file": str(folder / "given")}


def _no_secret(folder: Path) -> dict[str, str]:
    return {"security.mode": "insecure"}


@pytest.mark.parametrize("security", [_secret_in_a_variable, _secret_in_a_file, _no_secret])
def test_an_agent_of_its_own_starts_where_there_is_no_runtime_folder_yet(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, security: Callable[[Path], dict[str, str]]
) -> None:
    fresh = cluster.folder / "fresh"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(fresh))
    where = {"agent.runtime_dir": "", "agent.socket": ""}
    cluster.launch("a", {**where, **security(cluster.folder)}).wait_serving()
    assert stat.S_IMODE((fresh / "kvpeer").stat().st_mode) == 0o700
    engine = Engine(str(fresh / "kvpeer" / "agent.sock"))
    publish_all(engine, PAGES)
    engine.client.close()


def test_agents_of_two_hosts_find_each_other_with_the_file_that_the_readme_shows(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (RUNTIME.parent / "README.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    hosts = ("127.0.0.1", "127.0.0.2")
    for shown, host in zip(("10.0.0.11", "10.0.0.12"), hosts, strict=True):
        assert shown in text
        text = text.replace(shown, host)
    assert "/etc/kvpeer/secret" in text
    text = text.replace("/etc/kvpeer/secret", str(cluster.folder / "secret"))
    (cluster.folder / "secret").touch(mode=0o600)
    (cluster.folder / "secret").write_text("cd" * 32 + "\n")
    (cluster.folder / "agent.yaml").write_text(text)
    command = (*COMMAND, "--config", str(cluster.folder / "agent.yaml"))
    port = str(free_port())
    for host in hosts:
        # Both run on this host; all else that is not in the file is as small as a test needs it.
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(cluster.folder / f"of {host}"))
        own = {"agent.host": host, "agent.control_port": port, "agent.runtime_dir": "", "agent.socket": ""}
        cluster.launch(host, own, command).wait_serving()
    cluster.wait_members()
    producer, reader = (Engine(str(cluster.folder / f"of {host}" / "kvpeer" / "agent.sock")) for host in hosts)
    publish_all(producer, PAGES)
    finds(reader, PAGES)
    assert reader.fetch(*PAGES) == ["HIT"] * len(PAGES)
    for engine in (producer, reader):
        engine.client.close()


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


def test_an_agent_that_cannot_go_on_ends_with_a_status_and_says_why(cluster: Cluster) -> None:
    agent = cluster.launch("failing", command=(sys.executable, str(FOLDER / "failing_agent.py")))
    assert agent.process is not None
    assert agent.process.wait(START_DEADLINE_S) == 1
    assert "CRITICAL" in agent.log
    assert "a bug in the membership" in agent.log
    assert not list(address_files(cluster.runtime_dir)), "it left in order"
