"""Processes that outlive this one, found again by their id and start time, so that no other process is ever ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.folders import state_folder

__all__ = ["await_true", "names", "run", "running", "start", "stop"]

CHILD_DEADLINE_S = 10.0
"""For `nsenter` and `unshare` to fork, on a busy machine."""

END_DEADLINE_S = 10.0
POLL_S = 0.05

_started_here: list[subprocess.Popen[bytes]] = []
"""Kept, because Python complains of a process that it forgets while it runs."""


def run(*words: str | Path, text: str | None = None) -> str:
    """What a command printed. Raises RuntimeError with its output when it failed."""
    done = subprocess.run([str(word) for word in words], input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        command = " ".join(map(str, words))
        raise RuntimeError(f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def await_true(is_so: Callable[[], bool], what: str, deadline_s: float) -> None:
    """Returns when `is_so()` holds. Raises TimeoutError naming `what`, and the last error that `is_so` had."""
    end, error = time.monotonic() + deadline_s, ""
    while True:
        try:
            if is_so():
                return
            error = ""
        except (OSError, RuntimeError) as failure:
            error = f": {failure}"
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}{error}")
        time.sleep(POLL_S)


def start(
    name: str, *words: str | Path, within: Sequence[str] = (), path: Sequence[Path] = (), has_child: bool = False
) -> int:
    """Starts a process that goes on when this one ends; its output goes to logs/NAME.log. Returns its id.

    within: words before the command (`nsenter`, `unshare`). has_child: these fork, and it is their child that counts.
    path: folders before those of PATH.
    """
    log_file = log(name)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]])}
    with log_file.open("ab") as out:
        process = subprocess.Popen(
            [*within, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=environment,
        )
    _started_here.append(process)
    pid = _only_child(process, name) if has_child else process.pid
    record = _record(name)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"{pid} {_start_time(pid)}")
    return pid


def log(name: str) -> Path:
    """Where the process of this name writes."""
    return state_folder() / "logs" / f"{name}.log"


def names() -> list[str]:
    """All that were started and not stopped, whether or not they still run."""
    folder = state_folder() / "processes"
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def running(name: str) -> int | None:
    """Its process id, if it is still that very process."""
    try:
        pid, started = _record(name).read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if _start_time(int(pid)) == started else None


def stop(name: str, sign: int = signal.SIGTERM) -> None:
    """Returns when it has ended, by force after a while."""
    pid = running(name)
    if pid is not None:
        _signal(pid, sign)
        try:
            await_true(lambda: running(name) is None, f"{name} ends", END_DEADLINE_S)
        except TimeoutError:
            _signal(pid, signal.SIGKILL)
            await_true(lambda: running(name) is None, f"{name} is killed", END_DEADLINE_S)
    forget(name)


def forget(name: str) -> None:
    """Of one that is known to have ended."""
    _record(name).unlink(missing_ok=True)


def _record(name: str) -> Path:
    return state_folder() / "processes" / name


def _signal(pid: int, sign: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def _only_child(process: subprocess.Popen[bytes], name: str) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def has_forked() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with status {process.returncode}: see {log(name)}")
        return bool(children.read_text().split())

    await_true(has_forked, f"{name} starts", CHILD_DEADLINE_S)
    return int(children.read_text().split()[0])


def _start_time(pid: int) -> str | None:
    """Its start time in clock ticks; None: it has ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
