"""Flags reach the engine however its command is written; where they would not, the pod is left alone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from kvpeer_operator.injection.command_line import Engine, find_command_line

FLAGS = ["--kv-transfer-config", '{"a": "b c", "d": "it\'s $HOME"}']

SCRIPTS = [
    "vllm serve model",
    "exec vllm serve model --port 8000",
    "vllm serve model &\nwait $!",
    "vllm serve \\\n  model \\\n  --port 8000",
    "vllm serve model 2>&1 | cat",
    "cd / && vllm serve model || exit 1; echo done > /dev/null",
    "# starts the engine\nX=1 vllm serve model  # with a comment",
    "(vllm serve model)",
    'if [ -n "$HOME" ]; then vllm serve "a model"; fi',
    "export PYTHONPATH=/mine:$PYTHONPATH; vllm serve model",
    "python3 -m vllm.entrypoints.openai.api_server --model model",
]

REFUSED = [
    "echo",
    "echo vllm serve now; vllm serve model",
    "vllm serve a & vllm serve b",
    'eval "vllm serve model"',
    "bash -c 'vllm serve model'",
    "cat > run.sh <<EOF\nvllm serve model\nEOF\nsh run.sh",
    "# vllm serve model",
    "my-vllm serve model",
    "vllm serve 'unfinished",
    "export PYTHONPATH=/mine; vllm serve model",
    "env -i vllm serve model",
    "python3 -I -m vllm.entrypoints.openai.api_server --model m",
    "`vllm serve model`",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shape", ["command", "args", "split"])
def test_flags_in_a_script_reach_the_engine_and_nothing_else_changes(script: str, shape: str, tmp_path: Path) -> None:
    """A real shell runs the script, with programs that write down what they are called with."""
    containers: dict[str, dict[str, Any]] = {
        "command": {"command": ["/bin/sh", "-c", script]},
        "args": {"args": ["sh", "-ec", script]},
        "split": {"command": ["/bin/bash", "-c"], "args": [script]},
    }
    container = containers[shape]
    line = find_command_line(container, Engine.VLLM)
    assert line is not None
    plain, changed = _run(container, tmp_path), _run(line.with_flags(container, FLAGS), tmp_path)
    start = 2 if plain[:1] == ["-m"] else 1
    assert changed == [*plain[:start], *FLAGS, *plain[start:]]


@pytest.mark.parametrize("script", REFUSED)
def test_a_script_in_which_flags_might_get_lost_is_left_alone(script: str) -> None:
    assert find_command_line({"command": ["sh", "-c", script]}, Engine.VLLM) is None


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"args": ["--model", "m"]}, {"args": ["--model", "m", *FLAGS]}),
        ({"command": ["vllm", "serve", "m"]}, {"command": ["vllm", "serve", "m"], "args": FLAGS}),
        ({"command": ["vllm", "serve"], "args": ["m"]}, {"command": ["vllm", "serve"], "args": ["m", *FLAGS]}),
        (
            {"command": ["numactl", "-N", "0", "/opt/venv/bin/vllm", "serve"], "args": ["m"]},
            {"command": ["numactl", "-N", "0", "/opt/venv/bin/vllm", "serve"], "args": ["m", *FLAGS]},
        ),
        (
            {"args": ["python3", "-m", "vllm.entrypoints.openai.api_server"]},
            {"args": ["python3", "-m", "vllm.entrypoints.openai.api_server", *FLAGS]},
        ),
    ],
)
def test_flags_stand_behind_the_last_word(container: dict[str, Any], expected: dict[str, Any]) -> None:
    line = find_command_line(container, Engine.VLLM)
    assert line is not None
    assert line.with_flags(container, FLAGS) == expected


@pytest.mark.parametrize(
    "container",
    [
        {},  # flags would replace the image's own arguments
        {"command": ["/start.sh"], "args": ["m"]},
        {"command": ["python3", "-I", "-m", "vllm.entrypoints.openai.api_server"]},
        {"command": ["env", "PYTHONPATH=/mine", "vllm", "serve", "m"]},
    ],
)
def test_another_command_is_left_alone(container: dict[str, Any]) -> None:
    assert find_command_line(container, Engine.VLLM) is None


@pytest.mark.parametrize("word", ["--a-flag", "--a_flag", "--a-flag=1", "--a_flag.key=1", "--a-flag.key"])
def test_a_flag_is_known_however_it_is_written(word: str) -> None:
    line = find_command_line({"command": ["vllm", "serve", "m", word]}, Engine.VLLM)
    assert line is not None
    assert line.has("--a-flag")
    assert not line.has("--a")


@pytest.mark.parametrize(
    ("words", "value"),
    [(["-pp", "2"], "2"), (["--size=4"], "4"), (["--size", "1", "--size", "3"], "3"), (["--size"], ""), ([], None)],
)
def test_the_value_of_a_flag_is_that_of_its_last_use(words: list[str], value: str | None) -> None:
    line = find_command_line({"command": ["vllm", "serve", *words]}, Engine.VLLM)
    assert line is not None
    assert line.value("--size", "-pp") == value


def _run(container: dict[str, Any], folder: Path) -> list[str]:
    """The words that the engine is called with."""
    said = folder / "said"
    for name in ("vllm", "python3"):
        stub = folder / name
        stub.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {said}\n")
        stub.chmod(0o755)
    words = [*container.get("command", ()), *container.get("args", ())]
    subprocess.run(words, env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/nowhere"}, check=True, timeout=10)
    return said.read_text().split("\0")[:-1]
