"""ib_read_bw of the perftest package: the device's own speed, by a program that everybody has. One queue pair."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpeer.bench.peers.rdma import missing_rdma, rdma_address
from kvpeer.bench.peers.system import SystemFailedError, Way

__all__ = ["IbReadBw", "read_bandwidth"]

NAME = "ib_read_bw"

SAMPLE_BYTES = 64 << 20
"""Of one turn, as the systems beside it."""

ITERATIONS_MIN = 64

TURN_S_MAX = 60.0

RETRY_S = 0.05

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class IbReadBw:
    """See the module docstring."""

    name: str = NAME
    way: Way = Way.RDMA

    def missing(self) -> str | None:
        """Returns why it cannot run here."""
        if shutil.which(NAME) is None:
            return missing_rdma() or "ib_read_bw is not installed: it is in the package perftest"
        return missing_rdma()

    def start(self, page_bytes: int) -> _Turns:
        """Nothing runs between its turns."""
        return _Turns(page_bytes)


class _Turns:
    def __init__(self, page_bytes: int) -> None:
        iterations = max(ITERATIONS_MIN, SAMPLE_BYTES // page_bytes)
        address = rdma_address()
        place = ["-d", address.device, "-x", str(address.gid_index)] if address else []
        self._command = [NAME, *place, "-F", "--report_gbits", "-s", str(page_bytes), "-n", str(iterations)]

    def bandwidth(self, n_processes: int, n_threads: int) -> Callable[[], float] | None:
        """See `Running`: one reader of one thread."""
        return self._turn if (n_processes, n_threads) == (1, 1) else None

    def close(self) -> None:
        """Nothing to do."""

    def _turn(self) -> float:
        """Raises SystemFailedError."""
        command = [*self._command, "-p", str(_free_port())]
        deadline = time.monotonic() + TURN_S_MAX
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            while True:
                done = subprocess.run(  # noqa: S603
                    [*command, HOST], capture_output=True, text=True, timeout=TURN_S_MAX, check=False
                )
                if done.returncode == 0:
                    return read_bandwidth(done.stdout)
                # The server may not listen yet, and does not say when it does.
                if time.monotonic() > deadline or server.poll() is not None:
                    raise SystemFailedError(NAME, f"{' '.join(done.stderr.split())}")
                time.sleep(RETRY_S)
        except subprocess.TimeoutExpired as error:
            raise SystemFailedError(NAME, f"it did not end within {TURN_S_MAX:g} s") from error
        finally:
            server.kill()
            server.wait()


def read_bandwidth(output: str) -> float:
    """Returns the average in GB/s that the program printed.

    Raises:
        SystemFailedError: it printed none.
    """
    after = output.partition("BW average[Gb/sec]")[2].splitlines()[1:2]
    numbers = after[0].split() if after else []
    if len(numbers) < 4:
        raise SystemFailedError(NAME, f"it printed no bandwidth: {' '.join(output.split())[-200:]}")
    return float(numbers[3]) / 8


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])
