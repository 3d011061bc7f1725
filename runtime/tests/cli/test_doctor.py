"""`kvpeer doctor`, run as a process on recorded machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import expand, shape_text
from test_command import RUNTIME, kvpeer


@pytest.mark.parametrize(("shape", "status"), [("gb200", 0), ("link_local_only", 1)])
def test_the_text_is_as_expected_and_the_status_says_whether_something_is_wrong(
    shape: str, status: int, tmp_path: Path
) -> None:
    done = kvpeer("doctor", "--root", str(expand(shape_text(shape), tmp_path)))
    assert (done.stdout, done.stderr) == (shape_text(shape, ".plan"), "")
    assert done.returncode == status


def test_to_be_without_rdma_is_wrong_only_where_it_is_required(tmp_path: Path) -> None:
    root = str(expand(shape_text("efa"), tmp_path))
    assert kvpeer("doctor", "--root", root).returncode == 0
    assert kvpeer("doctor", "--rdma", "--root", root).returncode == 1


def test_values_for_programs_have_the_plan_and_the_problems(tmp_path: Path) -> None:
    done = kvpeer("doctor", "--json", "--root", str(expand(shape_text("nic_down"), tmp_path)))
    values = json.loads(done.stdout)
    assert [(rank["nic"], rank["gid_index"]) for rank in values["plan"]["ranks"]] == [
        ("mlx5_0", 0), ("mlx5_0", 0), ("mlx5_2", 0), ("mlx5_2", 0),
    ]  # fmt: skip
    assert (values["plan"]["pool_nodes"], values["plan"]["cpus"]) == ([0, 1], "0-127")
    assert [(each["name"], each["severity"]) for each in values["problems"]] == [
        ("port_down", "problem"), ("no_subnet_manager", "problem"),
    ]  # fmt: skip
    assert values["host"] is None


def test_settings_of_the_agent_count(tmp_path: Path) -> None:
    root = str(expand(shape_text("dgx_h100"), tmp_path))
    env = {"KVPEER_TOPOLOGY_DEVICES": "mlx5_6,mlx5_77", "KVPEER_TOPOLOGY_RANKS": "1"}
    values = json.loads(kvpeer("doctor", "--json", "--root", root, env=env).stdout)
    assert [rail["nic"] for rail in values["plan"]["rails"]] == ["mlx5_6"]
    assert values["problems"][0]["name"] == "device_unknown"


def test_this_host_is_judged_for_the_pool_that_is_configured() -> None:
    fits = json.loads(kvpeer("doctor", "--json", env={"KVPEER_POOL_SIZE": "64Mi"}).stdout)
    assert "memory_limit_low" not in [each["name"] for each in fits["problems"]]
    done = kvpeer("doctor", "--json", env={"KVPEER_POOL_SIZE": "16Ti", "KVPEER_POOL_EXTENT_SIZE": "1Gi"})
    values = json.loads(done.stdout)
    assert "memory_limit_low" in [each["name"] for each in values["problems"]]
    assert done.returncode == 1
    assert values["host"]["memory_bytes"] >= values["host"]["memory_left_bytes"]


def test_a_wrong_pair_is_one_line_and_status_2() -> None:
    done = kvpeer("doctor", "--pair", "a b:1")
    assert (done.returncode, done.stderr) == (2, "kvpeer: --pair is 'a b:1', but must be HOST or HOST:PORT\n")


def test_nobody_at_the_other_end_is_wrong() -> None:
    env = {"KVPEER_POOL_SIZE": "64Mi", "KVPEER_SECURITY_SECRET": "ab" * 32}
    done = kvpeer("doctor", "--json", "--pair", "127.0.0.1:1", env=env)
    assert done.returncode == 1
    assert "no agent to join at 127.0.0.1:1" in json.loads(done.stdout)["pair"]["error"]


def test_a_canary_flies_to_a_doctor_that_listens() -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(RUNTIME), "KVPEER_SECURITY_SECRET": "ab" * 32}
    env |= {"KVPEER_AGENT_HOST": "127.0.0.1", "KVPEER_AGENT_NAME": "there", "KVPEER_POOL_SIZE": "64Mi"}
    command = [sys.executable, "-m", "kvpeer.cli", "doctor", "--listen", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            line = listening.stdout.readline()
            address = line.partition("--pair ")[2].split()[0]
            done = kvpeer("doctor", "--pair", address, env=env)
        finally:
            listening.terminate()
        assert listening.wait(20) == 0
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition(f"canary to there at {address}\n")[2].splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == ["reading from there", "reading from here"]
    assert all(line.endswith(" GB/s") for line in lines)
