"""Engine names: one for all processes of an engine, none for two engines, the same again after a restart."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvpeer.client.engine_name import ENGINES_MAX, claim_engine_name
from kvpeer.model import ConfigError
from processes.handles import RUNTIME

_PROCESS = """
import sys
from pathlib import Path
from kvpeer.client.engine_name import claim_engine_name
print(claim_engine_name(sys.argv[1], sys.argv[2], Path(sys.argv[3])), flush=True)
sys.stdin.read()
"""


@contextmanager
def claiming(base: str, owner: str, folder: Path) -> Iterator[str]:
    """Another process that has a claim; killed, as engines are, at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, base, owner, str(folder)],
        env={"PYTHONPATH": str(RUNTIME)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_all_processes_of_an_engine_have_one_name_and_two_engines_have_two(tmp_path: Path) -> None:
    with claiming("m", "one", tmp_path) as first, claiming("m", "two", tmp_path) as second:
        with claiming("m", "one", tmp_path) as first_again, claiming("m", "two", tmp_path) as second_again:
            assert (first, second, first_again, second_again) == ("m#0", "m#1", "m#0", "m#1")
        with claiming("other", "three", tmp_path) as other:
            assert other == "other#0"


def test_an_engine_that_starts_again_has_its_name_again(tmp_path: Path) -> None:
    with claiming("m", "kept", tmp_path), claiming("m", "crashed", tmp_path) as before:
        assert before == "m#1"
    with claiming("m", "kept", tmp_path), claiming("m", "restarted", tmp_path) as after:
        assert after == "m#1"


def test_a_name_is_kept_until_the_last_process_of_its_engine_is_gone(tmp_path: Path) -> None:
    with claiming("m", "one", tmp_path):
        with claiming("m", "one", tmp_path):
            pass
        with claiming("m", "two", tmp_path) as other:
            assert other == "m#1"


def test_a_folder_that_does_not_work_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        claim_engine_name("m", "one", tmp_path / "file")


def _with_a_link_in_the_way(folder: Path, victim: Path) -> None:
    """What another user could have laid where the first engine's claim will be."""
    (folder / "names").mkdir(mode=0o700, parents=True)
    stem = hashlib.sha256(b"m").hexdigest()[:16]
    for name in (f"{stem}.0", f"{stem}.scan"):
        (folder / "names" / name).symlink_to(victim)


@pytest.mark.parametrize("open_to_others", ["folder", "names", "neither"])
def test_no_file_of_the_user_is_overwritten_through_a_link(tmp_path: Path, open_to_others: str) -> None:
    folder, victim = tmp_path / "kvpeer", tmp_path / "bashrc"
    victim.write_text("precious\n")
    _with_a_link_in_the_way(folder, victim)
    folder.chmod(0o777 if open_to_others == "folder" else 0o700)
    (folder / "names").chmod(0o777 if open_to_others == "names" else 0o700)
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR" if open_to_others == "neither" else "others may enter"):
        claim_engine_name("m", "one", folder)
    assert victim.read_text() == "precious\n"


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvpeer").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        claim_engine_name("m", "one", tmp_path / "kvpeer")
    assert list((tmp_path / "kvpeer").iterdir()) == []


def test_more_engines_than_names_is_an_error_that_says_so(tmp_path: Path) -> None:
    # flock belongs to the open file, so that one process can stand for many engines.
    for n in range(ENGINES_MAX):
        claim_engine_name("crowd", f"owner {n}", tmp_path)
    with pytest.raises(ConfigError, match="set engine_name"):
        claim_engine_name("crowd", "one too many", tmp_path)
