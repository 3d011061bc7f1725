"""The command line, run as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvpeer import __version__
from kvpeer.agent.config import effective, load

RUNTIME = Path(__file__).parents[2]


def kvpeer(*arguments: str, env: dict[str, str] | None = None, code: str = "") -> subprocess.CompletedProcess[str]:
    program = (
        ["-c", f"{code}\nimport sys; from kvpeer.cli import main; sys.exit(main())"] if code else ["-m", "kvpeer.cli"]
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(RUNTIME), **(env or {})}
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_version_names_the_release_and_the_wire() -> None:
    done = kvpeer("version")
    assert (done.returncode, done.stdout) == (0, f"kvpeer {__version__}, wire version 1\n")


def test_print_config_shows_what_is_in_force_with_secrets_masked(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("pool:\n  size: 2Gi\n")
    env = {"KVPEER_SECURITY_SECRET": "ab" * 32, "KVPEER_AGENT_NAME": "n"}
    done = kvpeer("agent", "--config", str(file), "--print-config", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == effective(load(file, env))
    assert "size: 2Gi" in done.stdout
    assert "abab" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "fault"),
    [
        (["agent", "--config", "/no/such.yaml"], {}, "cannot read the configuration file /no/such.yaml: No such file"),
        (["agent"], {"KVPEER_POOL_SIZE": "big"}, "KVPEER_POOL_SIZE: 'big' is not a size such as 64Gi"),
        (["agent"], {"KVPEER_SECURITY_SECRET_FILE": "/no/secret"}, "cannot read /no/secret: No such file"),
    ],
)
def test_a_configuration_fault_is_one_line_and_status_2(arguments: list[str], env: dict[str, str], fault: str) -> None:
    done = kvpeer(*arguments, env={**env, "KVPEER_AGENT_LOG_LEVEL": "error"})
    assert done.returncode == 2
    assert done.stderr.startswith("kvpeer: ")
    assert fault in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("package", ["msgspec", "yaml", "cryptography", "prometheus_client"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("pool:\n  size: 2Gi\n")
    arguments = ("agent", "--config", str(file))
    done = kvpeer(
        *arguments, code=f"import sys; sys.modules[{package!r}] = None", env={"KVPEER_AGENT_LOG_LEVEL": "error"}
    )
    assert done.returncode == 2
    assert done.stderr == f"kvpeer: the package {package} is missing: run pip install 'kvpeer[agent]'\n"


def test_a_wrong_command_line_is_status_2_with_usage() -> None:
    done = kvpeer("agnet")
    assert done.returncode == 2
    assert "usage: kvpeer" in done.stderr
