"""The injector as a process, between plain sockets."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes.agents import HOST, variables
from processes.handles import eventually
from processes.injector import COMMAND, Injector

pytestmark = pytest.mark.process

DEADLINE_S = 20.0
BYTES = random.Random(3).randbytes(1 << 20)
QUIET_S = 0.3
"""So long nothing comes when nothing will."""

HELD_BYTES_MAX = 24 << 20
"""What one direction may hold: the proxy's line (4 MiB) and the buffers of the kernel (at most 6 MiB and 4 MiB for each
of the two connections)."""


@pytest.fixture
def agent() -> Iterator[socket.socket]:
    """What the proxy forwards to: a listener whose connections the test accepts."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(DEADLINE_S)
        yield listener


def at(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


@pytest.fixture
def injector(agent: socket.socket, tmp_path: Path) -> Iterator[Injector]:
    with contextlib.closing(Injector(tmp_path / "chaos", {"r": at(agent)})) as injector:
        yield injector


@pytest.fixture
def connect(agent: socket.socket, injector: Injector) -> Iterator:
    """Makes connections through the proxy: the client's end and the agent's."""
    with contextlib.ExitStack() as connections:

        def make() -> tuple[socket.socket, socket.socket]:
            client = connections.enter_context(socket.create_connection((HOST, injector.port("r")), DEADLINE_S))
            accepted = connections.enter_context(agent.accept()[0])
            accepted.settimeout(DEADLINE_S)
            return client, accepted

        yield make


def receive(connection: socket.socket, n_bytes: int) -> bytes:
    """So many bytes, or fewer if the connection ends in order."""
    received = bytearray()
    while len(received) < n_bytes and (chunk := connection.recv(n_bytes - len(received))):
        received += chunk
    return bytes(received)


def send(connection: socket.socket, payload: bytes) -> threading.Thread:
    """Sends while the test does something else; an end of the connection in between is the test's business."""

    def run() -> None:
        with contextlib.suppress(OSError):
            connection.sendall(payload)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def is_silent(connection: socket.socket) -> bool:
    """Whether nothing comes, not even an end."""
    connection.settimeout(QUIET_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(DEADLINE_S)
    return False


def test_bytes_pass_whole_in_both_directions_and_each_direction_ends_alone(injector: Injector, connect) -> None:
    client, accepted = connect()
    send(client, BYTES)
    assert receive(accepted, len(BYTES)) == BYTES
    client.shutdown(socket.SHUT_WR)
    assert accepted.recv(1) == b""
    send(accepted, BYTES)
    assert receive(client, len(BYTES)) == BYTES
    accepted.close()
    assert client.recv(1) == b""
    eventually(lambda: injector.status()["routes"]["r"]["open"] == 0)
    counted = injector.status()["routes"]["r"]
    assert counted["to_agent"]["bytes"] == counted["from_agent"]["bytes"] == len(BYTES)
    assert counted["connections"] == 1


def test_a_reader_that_does_not_read_stops_the_sender(connect) -> None:
    client, accepted = connect()
    client.settimeout(2 * QUIET_S)
    n_sent = 0
    with contextlib.suppress(TimeoutError):
        while n_sent < 4 * HELD_BYTES_MAX:
            n_sent += client.send(BYTES)
    assert len(BYTES) < n_sent < HELD_BYTES_MAX
    assert len(receive(accepted, n_sent)) == n_sent, "and nothing is lost"


def test_a_delay_holds_every_byte_and_does_not_slow_the_flow(injector: Injector, connect) -> None:
    delay_s, n_mib = 0.2, 16
    client, accepted = connect()
    with injector.injecting("r", kind="delay", delay_ms=delay_s * 1000):
        started = time.monotonic()
        send(client, BYTES * n_mib)
        assert accepted.recv(1)
        assert time.monotonic() - started >= delay_s
        assert receive(accepted, len(BYTES) * n_mib - 1) == (BYTES * n_mib)[1:]
        # Read by read it would be 16 MiB / 64 KiB * 0.2 s, 51 s.
        assert time.monotonic() - started < 10 * delay_s + 5


def test_a_freeze_holds_bytes_and_new_connections_and_then_lets_all_of_them_pass(
    injector: Injector, connect, agent: socket.socket
) -> None:
    client, accepted = connect()
    with injector.injecting("r", kind="freeze"):
        client.sendall(b"to the agent")
        accepted.sendall(b"from the agent")
        with socket.create_connection((HOST, injector.port("r")), DEADLINE_S) as second:
            assert is_silent(client)
            assert is_silent(accepted)
            agent.settimeout(QUIET_S)
            with pytest.raises(TimeoutError):
                agent.accept()
            agent.settimeout(DEADLINE_S)
            injector.clear()
            assert receive(accepted, 12) == b"to the agent"
            assert receive(client, 14) == b"from the agent"
            second.sendall(b"x")
            with agent.accept()[0] as later:
                assert later.recv(1) == b"x"


def test_a_freeze_of_one_direction_leaves_the_other_alone(injector: Injector, connect) -> None:
    client, accepted = connect()
    with injector.injecting("r", kind="freeze", direction="from_agent"):
        client.sendall(b"question")
        assert receive(accepted, 8) == b"question"
        accepted.sendall(b"answer")
        assert is_silent(client)
    assert receive(client, 6) == b"answer"


def test_a_freeze_ends_by_itself_at_its_time(injector: Injector, connect) -> None:
    client, accepted = connect()
    started = time.monotonic()
    injector.set("r", {"kind": "freeze", "until_s": 0.5})
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    assert time.monotonic() - started >= 0.5


def test_a_truncated_connection_ends_in_order_at_exactly_that_byte(injector: Injector, connect) -> None:
    client, accepted = connect()
    with injector.injecting("r", kind="truncate", direction="from_agent", after_bytes=300_001):
        send(accepted, BYTES)
        assert receive(client, len(BYTES)) == BYTES[:300_001]


def test_a_reset_connection_is_reset_at_both_ends(injector: Injector, connect) -> None:
    client, accepted = connect()
    with injector.injecting("r", kind="reset", after_bytes=0):
        client.sendall(b"x")
        for end in (client, accepted):
            with pytest.raises(ConnectionResetError):
                end.recv(1)


def test_a_black_hole_swallows_what_follows_and_keeps_the_connection_open(injector: Injector, connect) -> None:
    client, accepted = connect()
    with injector.injecting("r", kind="blackhole", direction="to_agent", after_bytes=100):
        client.sendall(BYTES)  # is taken whole
        assert receive(accepted, 100) == BYTES[:100]
        assert is_silent(accepted)
        accepted.sendall(b"answer")
        assert receive(client, 6) == b"answer"
    client.sendall(BYTES)
    assert is_silent(accepted), "what was swallowed leaves a hole for good"
    client.close()
    assert is_silent(accepted), "and nobody is told"


def test_a_corrupted_stream_differs_by_as_many_bits_as_were_counted(injector: Injector, connect) -> None:
    client, accepted = connect()
    with injector.injecting("r", kind="corrupt", probability=0.1):
        send(client, BYTES)
        received = receive(accepted, len(BYTES))
    n_bits = (int.from_bytes(received, "big") ^ int.from_bytes(BYTES, "big")).bit_count()
    assert injector.n_injected("corrupt", "r") == n_bits
    assert n_bits == pytest.approx(0.1 * len(BYTES) / 1024, rel=0.5)


def test_a_reset_by_one_end_reaches_the_other(connect) -> None:
    client, accepted = connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    with pytest.raises(ConnectionResetError):
        accepted.recv(1)


def test_an_agent_that_is_not_there_resets_its_clients_and_is_counted(agent: socket.socket, injector: Injector) -> None:
    agent.close()
    port = injector.port("r")
    with pytest.raises(ConnectionResetError), socket.create_connection((HOST, port), DEADLINE_S) as client:
        client.recv(1)
    assert injector.status()["routes"]["r"]["unreachable"] == 1


def test_a_seed_gives_the_same_bytes_in_another_run(agent: socket.socket, tmp_path: Path) -> None:
    def received(name: str, seed: int) -> bytes:
        with contextlib.closing(Injector(tmp_path / name, {"r": at(agent)}, seed=seed)) as injector:
            injector.set("r", {"kind": "corrupt", "probability": 0.05})
            with socket.create_connection((HOST, injector.port("r")), DEADLINE_S) as client, agent.accept()[0] as end:
                send(client, BYTES)
                end.settimeout(DEADLINE_S)
                return receive(end, len(BYTES))

    first = received("a", 5)
    assert first != BYTES
    assert received("b", 5) == first
    assert received("c", 6) != first


def test_it_prints_what_it_did_when_it_ends_and_leaves_nothing_behind(injector: Injector, connect) -> None:
    client, accepted = connect()
    client.sendall(b"x")
    assert accepted.recv(1)
    eventually(lambda: injector.status()["routes"]["r"]["to_agent"]["bytes"] == 1)
    before = injector.status()
    assert injector.stop() == before
    assert before["seed"] == 7
    assert not Path(injector.path).exists()
    assert "Traceback" not in injector.log
    for end in (client, accepted):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("GET", "/nowhere", None, 404, "there are GET /"),
        ("POST", "/faults", [], 404, "there are GET /"),
        ("PUT", "/routes/x/faults", [], 404, "no route is named 'x'; there are r"),
        ("PUT", "/faults", [{"kind": "reset", "probabilty": 1}], 400, "unknown key faults[0].probabilty; did you mean"),
        ("PUT", "/faults", {}, 400, "faults must be a list"),
        ("PUT", "/faults", ["x" * 70_000], 400, "at most 65536 are taken"),
    ],
)
def test_a_wrong_request_to_the_control_socket_changes_nothing_and_is_told_why(
    injector: Injector, connect, method: str, path: str, body: object, status: int, error: str
) -> None:
    answered, answer = injector.ask(method, path, body)
    assert (answered, error in answer["error"]) == (status, True), answer
    client, accepted = connect()
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"


def test_the_control_socket_is_its_owners_alone(injector: Injector) -> None:
    assert Path(injector.path).stat().st_mode & 0o777 == 0o600


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=variables({}), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "--listen is missing: name --listen and --to, or --scenario"),
        (["--listen", "127.0.0.1:0"], "--to is missing"),
        (["--listen", "a", "--to", "127.0.0.1:1"], "--listen is 'a', but must be a numeric address and a port"),
        (["--listen", "127.0.0.1:0", "--to", "127.0.0.1:0"], "to is 127.0.0.1:0, but must name the port"),
        (["--listen", "127.0.0.1:0", "--to", "127.0.0.1:1", "--corrupt", "2"], "--corrupt: probability is 2.0"),
        (["--listen", "127.0.0.1:0", "--to", "127.0.0.1:1", "--freeze", "5-8"], "--freeze is '5-8', but must be two"),
        (["--listen", "127.0.0.1:0", "--to", "127.0.0.1:1", "--freeze", "8s-5s"], "--freeze 8s-5s: until_s is 5.0"),
        (["--scenario", "/no/such", "--delay-ms", "5"], "--scenario and --delay-ms exclude each other"),
        (["--scenario", "/no/such"], "cannot read the scenario /no/such: No such file"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: list[str], fault: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("kvpeer: ")
    assert fault in done.stderr


def test_a_taken_port_or_control_socket_ends_the_start_and_is_named(injector: Injector) -> None:
    taken = f"{HOST}:{injector.port('r')}"
    done = run("--listen", taken, "--to", "127.0.0.1:1")
    assert done.returncode == 2
    assert f"cannot listen on {taken}" in done.stderr
    done = run("--listen", f"{HOST}:0", "--to", "127.0.0.1:1", "--control", injector.path)
    assert done.returncode == 2
    assert injector.path in done.stderr
    assert injector.status(), "the one that runs keeps its socket"


def test_flags_describe_one_route(agent: socket.socket, tmp_path: Path) -> None:
    flags = ["--corrupt", "1", "--direction", "to_agent", "--delay-ms", "1", "--freeze", "0ms-200ms", "--seed", "9"]
    process = subprocess.Popen(
        [*COMMAND, "--listen", f"{HOST}:0", "--to", at(agent), *flags],
        env=variables({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        listens = next(line for line in process.stderr if "listens on" in line)
        listen_port = int(listens.split("listens on ")[1].split()[0].rpartition(":")[2])
        with socket.create_connection((HOST, listen_port), DEADLINE_S) as client, agent.accept()[0] as accepted:
            accepted.settimeout(DEADLINE_S)
            send(client, BYTES)
            assert receive(accepted, len(BYTES)) != BYTES
        process.terminate()
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert '"seed": 9' in out
