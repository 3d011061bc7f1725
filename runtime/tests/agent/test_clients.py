"""The path of an agent's socket belongs to one agent at a time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from kvpeer.agent.socket_path import prepare_socket_path
from kvpeer.model import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "agent.sock")


def test_a_socket_that_another_agent_does_not_listen_at_yet_is_not_taken_for_a_left_behind_one(path: str) -> None:
    lock = prepare_socket_path(path, is_private=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
        with pytest.raises(ConfigError, match=r"another agent serves at .*agent\.socket"):
            prepare_socket_path(path, is_private=True)
        assert os.path.exists(path)
    os.close(lock)


def test_a_socket_that_an_agent_left_behind_is_removed(path: str) -> None:
    lock = prepare_socket_path(path, is_private=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
    os.close(lock)
    again = prepare_socket_path(path, is_private=True)
    assert not os.path.exists(path)
    os.close(again)


def test_a_file_that_is_no_socket_is_left_alone(path: str) -> None:
    os.mkdir(os.path.dirname(path), 0o700)
    Path(path).write_text("precious")
    for _ in range(2):  # a refusal leaves no lock behind
        with pytest.raises(ConfigError, match="is not a socket"):
            prepare_socket_path(path, is_private=True)
    assert Path(path).read_text() == "precious"


def test_a_lock_that_cannot_be_opened_is_an_error_that_names_the_file(path: str) -> None:
    os.mkdir(os.path.dirname(path), 0o700)
    os.symlink("/dev/null", f"{path}.lock")
    with pytest.raises(ConfigError, match=r"agent\.sock\.lock"):
        prepare_socket_path(path, is_private=True)
