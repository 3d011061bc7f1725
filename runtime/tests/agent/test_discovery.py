from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kvpeer.agent import discovery
from kvpeer.agent.discovery import STALE_S, AddressFile, list_addresses, withdraw_address, write_address
from kvpeer.model import AgentId, ConfigError
from kvpeer.wire.messages import AgentInfo
from link_nodes import until
from whole_agents import WholeAgent, with_agents

OWN, OTHER = AgentId(b"o" * 16), AgentId(b"x" * 16)


def info(agent_id: bytes) -> AgentInfo:
    return AgentInfo(agent_id, "name", "127.0.0.1", 7000, 7001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


def test_agents_of_one_cluster_find_each_other_and_not_themselves(folder: Path) -> None:
    write_address(folder, "blue", info(OWN))
    write_address(folder, "blue", info(OTHER))
    write_address(folder, "green", info(b"g" * 16))
    (address,) = list_addresses(folder, "blue", OWN)
    assert (address.agent_id, address.host, address.control_port) == (OTHER.hex(), "127.0.0.1", 7000)
    withdraw_address(folder, "blue", OTHER)
    withdraw_address(folder, "blue", OTHER)
    assert list_addresses(folder, "blue", OWN) == []


def test_files_of_ended_processes_are_removed(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvpeer.agent.discovery import write_address;"
        "from kvpeer.wire.messages import AgentInfo;"
        "write_address(Path(sys.argv[1]), 'blue', AgentInfo(b'x' * 16, 'n', '127.0.0.1', 1, 2))"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, env=environment)
    assert len(list((folder / "peers/blue").glob("*.json"))) == 1
    assert list_addresses(folder, "blue", OWN) == []
    assert list((folder / "peers/blue").glob("*.json")) == []


def test_a_later_process_with_the_same_pid_is_not_taken_for_the_agent(folder: Path) -> None:
    path = write_address(folder, "blue", info(OTHER))
    address = msgspec.json.decode(path.read_bytes(), type=AddressFile)
    assert address.pid == os.getpid()
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(address, start_ticks=address.start_ticks - 1)))
    assert list_addresses(folder, "blue", OWN) == []


def test_a_file_that_is_no_address_is_passed_over(folder: Path) -> None:
    path = write_address(folder, "blue", info(OTHER))
    address = path.read_bytes()
    path.with_name("junk.json").write_bytes(b"{]")
    path.with_name("deep.json").write_bytes(address[:-1] + b',"later":' + b"[" * 100_000)
    path.with_name("port.json").write_bytes(address.replace(b"7000", b"70000"))
    path.with_name("folder.json").mkdir()
    assert len(list_addresses(folder, "blue", OWN)) == 1


def test_the_name_of_a_process_may_be_no_text(folder: Path, tmp_path: Path) -> None:
    """The agent ended, and its number belongs to any other program by now."""
    program = tmp_path / os.fsdecode(b"name-\xff)")
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b".")
        process.stdin.flush()
        assert process.stdout.read(1) == b".", "it runs under its own name by now"
        path = write_address(folder, "blue", info(OTHER))
        address = msgspec.json.decode(path.read_bytes(), type=AddressFile)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(address, pid=process.pid)))
        assert list_addresses(folder, "blue", OWN) == []
        process.stdin.close()


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        write_address(folder, "blue", info(OWN))


def of_another_namespace(path: Path, age_s: float) -> None:
    """As if a process in a container had written the file: its pid means nothing here."""
    address = msgspec.json.decode(path.read_bytes(), type=AddressFile)
    foreign = msgspec.structs.replace(address, pid=1, start_ticks=7, pid_namespace=address.pid_namespace + 1)
    path.write_bytes(msgspec.json.encode(foreign))
    written_at = path.stat().st_mtime - age_s
    os.utime(path, (written_at, written_at))


@pytest.mark.parametrize(("age_s", "is_listed"), [(0.0, True), (STALE_S - 30, True), (STALE_S + 30, False)])
def test_an_agent_whose_process_cannot_be_seen_counts_while_it_renews_its_file(
    folder: Path, age_s: float, is_listed: bool
) -> None:
    path = write_address(folder, "blue", info(OTHER))
    of_another_namespace(path, age_s)
    assert bool(list_addresses(folder, "blue", OWN)) == is_listed
    assert path.exists() == is_listed


def test_an_agent_writes_its_address_again_when_somebody_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "RENEW_S", 0.02)

    async def scenario(agent: WholeAgent) -> None:
        (path,) = (tmp_path / "run/peers/default").glob("*.json")
        path.unlink()
        await until(path.exists)
        path.parent.chmod(0o755)
        await until(lambda: "may not find this one" in caplog.text)
        path.parent.chmod(0o700)
        path.unlink()
        await until(path.exists)

    with_agents(tmp_path, "agent", scenario)
