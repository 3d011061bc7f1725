"""`kvpeer chaos` as a process of its own, started as operators start it and steered through its control socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from processes.agents import HOST, POLL_S, START_DEADLINE_S, variables
from processes.handles import eventually

COMMAND = (sys.executable, "-m", "kvpeer.cli", "chaos")
SEED = 7


class _UnixConnection(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("chaos", timeout=START_DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Injector:
    """Proxies to `targets` ("address:port", by the names of their routes). They listen on `host`, where `port` says."""

    def __init__(self, folder: Path, targets: Mapping[str, str], host: str = HOST, seed: int = SEED) -> None:
        folder.mkdir(mode=0o700)
        self.path = str(folder / "chaos.sock")
        routes = [{"name": name, "listen": f"{host}:0", "to": target} for name, target in targets.items()]
        scenario = folder / "scenario.json"
        scenario.write_text(json.dumps({"seed": seed, "routes": routes}))
        self._log_path = folder / "chaos.log"
        self._out_path = folder / "chaos.json"
        with open(self._log_path, "wb") as log, open(self._out_path, "wb") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "--scenario", str(scenario), "--control", self.path],
                stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=variables({}),
            )  # fmt: skip
        eventually(lambda: "ready" in self.log or self.process.poll() is not None, START_DEADLINE_S, POLL_S)
        assert self.process.poll() is None, self.log

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def port(self, route: str) -> int:
        """Where the proxy of this route listens."""
        return int(self.status()["routes"][route]["listen"].rpartition(":")[2])

    # ---- steering

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request to the control socket; status and answer."""
        with contextlib.closing(_UnixConnection(self.path)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def status(self) -> Any:
        status, answer = self.ask("GET", "/")
        assert status == 200, answer
        return answer

    def set(self, route: str, *faults: Mapping[str, Any]) -> None:
        """From now on these faults on this route."""
        status, answer = self.ask("PUT", f"/routes/{route}/faults", list(faults))
        assert status == 200, answer

    def clear(self) -> None:
        """No faults any more."""
        status, answer = self.ask("PUT", "/faults", [])
        assert status == 200, answer

    def n_injected(self, kind: str, *routes: str) -> int:
        """How often this fault struck on these routes, both directions together."""
        of_routes = self.status()["routes"]
        return sum(of_routes[route][way][kind] for route in routes for way in ("to_agent", "from_agent"))

    @contextlib.contextmanager
    def injecting(self, *routes: str, **fault: Any) -> Iterator[None]:
        """These routes have this fault, and no route has one afterwards. Fails if none was injected: a test of nothing
        would pass."""
        before = self.n_injected(fault["kind"], *routes)
        for route in routes:
            self.set(route, fault)
        try:
            yield
        finally:
            self.clear()
        n = self.n_injected(fault["kind"], *routes) - before
        assert n > 0, f"no {fault['kind']} was injected on {routes}"

    # ---- life

    def stop(self) -> Any:
        """Ends it in order; what it printed."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(START_DEADLINE_S) == 0, self.log
        return json.loads(self._out_path.read_bytes())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(START_DEADLINE_S)
        print(f"---- log of the injector\n{self.log}")  # shown where a test failed
