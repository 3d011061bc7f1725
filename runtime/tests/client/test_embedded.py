"""Engines without an agent beside them start one, together, and share it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpeer.client import embedded
from kvpeer.client.session import Session
from kvpeer.client.settings import ClientSettings, Registration
from kvpeer.model import ConfigError, PeerUnavailableError
from processes.engine import Engine
from processes.handles import FOLDER, RUNTIME, eventually


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, as Unix sockets need. Agents that were started below it are ended."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.delenv("KVPEER_AGENT_RUNTIME_DIR", raising=False)
        before = list(embedded.started_agents)
        yield Path(folder)
        for agent in [agent for agent in embedded.started_agents if agent not in before]:
            if not agent.has_ended():
                os.kill(agent.pid, signal.SIGKILL)
            assert agent.has_ended(10)


def settings(engine: str = "e") -> ClientSettings:
    command = (sys.executable, str(FOLDER / "pool_agent.py"), json.dumps({}))
    return ClientSettings(engine=engine, start_timeout_s=15, agent_command=command)


@pytest.mark.process
def test_processes_of_one_engine_share_one_agent_and_other_engines_have_their_own(runtime_dir: Path) -> None:
    paths: list[str] = []
    before = {agent.pid for agent in embedded.started_agents}
    ranks = [
        threading.Thread(target=lambda: paths.append(embedded.ensure_agent(settings(), time.monotonic() + 15)))
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert len({agent.pid for agent in embedded.started_agents} - before) == 1
    other = embedded.ensure_agent(settings("another engine"), time.monotonic() + 15)
    assert other != paths[0]
    agent = embedded.started_agents[-1].pid
    assert os.getsid(agent) == agent, "it must outlive our terminal"
    assert stat.S_IMODE(Path(other).parent.stat().st_mode) == 0o700


@pytest.mark.process
def test_an_embedded_agent_is_no_descendant_of_the_engine_that_started_it(runtime_dir: Path) -> None:
    # vLLM and SGLang kill their descendants when they stop, all the way down.
    embedded.ensure_agent(settings(), time.monotonic() + 15)
    ancestors, pid = [], embedded.started_agents[-1].pid
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ancestors.append(pid)
    assert os.getpid() not in ancestors


@pytest.mark.process
def test_an_embedded_agent_that_was_killed_is_started_again(runtime_dir: Path) -> None:
    engine = Engine("", settings=settings())
    try:
        assert engine.publish(1)[0] == 1
        os.kill(embedded.started_agents[-1].pid, signal.SIGKILL)
        eventually(lambda: not engine.client.healthy)
        eventually(lambda: engine.client.healthy)
        assert engine.publish(1)[0] == 1
    finally:
        engine.client.close()


@pytest.mark.process
def test_a_link_in_place_of_a_file_is_not_followed(runtime_dir: Path) -> None:
    victim = runtime_dir / "bashrc"
    victim.write_text("precious")
    folder = embedded.engine_folder("e", os.environ)
    for name in ("agent.lock", "agent.log"):
        (folder / name).symlink_to(victim)
        with pytest.raises((ConfigError, OSError), match=name):
            embedded.ensure_agent(settings(), time.monotonic() + 15)
        (folder / name).unlink()
    assert victim.read_text() == "precious"


def test_trouble_in_looking_for_an_agent_is_not_the_end_of_looking() -> None:
    calls = []

    def out_of_descriptors(deadline: float) -> str:
        calls.append(deadline)
        raise OSError("too many open files")

    session = Session(out_of_descriptors, Registration("e", b"n" * 32, {}, 4096, 1, 0, 0, 4096), 1.0)
    try:
        eventually(lambda: len(calls) > 1)
        assert not session.is_connected
    finally:
        session.close()


@pytest.mark.process
def test_an_agent_that_ends_at_its_start_is_reported_with_its_own_words(runtime_dir: Path) -> None:
    broken = (sys.executable, "-c", "raise SystemExit('pool.size is too small')")
    with pytest.raises(ConfigError, match=r"pool\.size is too small"):
        embedded.ensure_agent(ClientSettings(agent_command=broken), time.monotonic() + 15)


def test_an_agent_that_does_not_get_ready_is_not_waited_for_beyond_the_deadline(runtime_dir: Path) -> None:
    silent = (sys.executable, "-c", "import sys; sys.stdin.close(); import threading; threading.Event().wait(30)")
    with pytest.raises(PeerUnavailableError, match="not ready"):
        embedded.ensure_agent(ClientSettings(agent_command=silent), time.monotonic() + 0.2)


_ATTEMPT = """
import json, sys, time
from kvpeer.client import embedded
from kvpeer.client.settings import ClientSettings
from kvpeer.model import PeerUnavailableError
try:
    embedded.ensure_agent(ClientSettings(engine="e", agent_command=("sleep", "60")), time.monotonic() + 0.1)
except PeerUnavailableError:
    print(len(embedded.started_agents))
"""


@pytest.mark.process
def test_an_agent_that_is_slow_to_start_is_waited_for_and_not_started_again(runtime_dir: Path) -> None:
    slow = ClientSettings(engine="e", agent_command=("sleep", "60"))
    before = {agent.pid for agent in embedded.started_agents}
    for _ in range(3):
        with pytest.raises(PeerUnavailableError, match="not ready"):
            embedded.ensure_agent(slow, time.monotonic() + 0.1)
    assert len({agent.pid for agent in embedded.started_agents} - before) == 1
    environment = {"PYTHONPATH": str(RUNTIME), "XDG_RUNTIME_DIR": str(runtime_dir)}
    by_another_rank = subprocess.run(
        [sys.executable, "-c", _ATTEMPT], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert by_another_rank.stdout.strip() == "0"
    first = embedded.started_agents[-1]
    os.kill(first.pid, signal.SIGKILL)
    assert first.has_ended(10)
    with pytest.raises(PeerUnavailableError, match="not ready"):
        embedded.ensure_agent(slow, time.monotonic() + 0.1)
    assert embedded.started_agents[-1].pid != first.pid, "now there is none"


def test_missing_packages_are_named_with_the_fix(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "AGENT_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package are missing: install kvpeer\[agent\]"):
        embedded.ensure_agent(ClientSettings(), time.monotonic() + 1)


def test_what_the_agent_runs_without_is_not_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = embedded.importlib.util.find_spec
    monkeypatch.setattr(
        embedded.importlib.util, "find_spec", lambda name: None if name == "uvloop" else find_spec(name)
    )
    assert embedded._default_command()[1:] == ["-m", "kvpeer.cli", "agent", "--embedded"]


def test_a_folder_that_others_can_enter_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "kvpeer").mkdir()
    (runtime_dir / "kvpeer").chmod(0o755)
    with pytest.raises(ConfigError, match=r"others may enter .*chmod 700"):
        embedded.engine_folder("e", os.environ)


def test_a_configured_socket_wins_over_the_environment_and_over_an_embedded_agent() -> None:
    environment = {"KVPEER_SOCKET": "/run/kvpeer/agent.sock"}
    assert ClientSettings.from_environment(environment, "e").socket == "/run/kvpeer/agent.sock"
    assert ClientSettings.from_environment(environment, "e", "/a.sock").socket == "/a.sock"
    assert ClientSettings.from_environment({}, "e").socket == ""
