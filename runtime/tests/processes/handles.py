"""Starting and ending the programs of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RUNTIME = FOLDER.parents[1]
DEADLINE_S = 20.0


def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S, poll_s: float = 0.005) -> None:
    """Returns when the condition holds; fails if it does not by the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not so by the deadline"
        time.sleep(poll_s)


class Program:
    """A program that answers each line on its stdin with a line of JSON on its stdout."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(RUNTIME), str(FOLDER.parent)])}
        self.process = subprocess.Popen(
            [sys.executable, str(FOLDER / name), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        self.send(**command)
        return json.loads(self.line())

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Ends the process and returns its status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        if number == signal.SIGKILL:
            status = self.process.wait(DEADLINE_S)
        else:
            try:
                status = self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status


@contextlib.contextmanager
def running(name: str, settings: dict[str, Any]) -> Iterator[Program]:
    program = Program(name, settings)
    try:
        yield program
    finally:
        program.end()
