"""Real vLLM servers for tests: started together, asked with token ids, read through /metrics, always ended.

The interpreter with vLLM and kvpeer in it is named by KVPEER_VLLM_PYTHON. Every server runs in a process group of its
own, which is killed with all that is in it; its agent is in another one (it outlives its engine on purpose), found by
its socket's peer and killed by the folder's owner, `Fleet`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

E2E = Path(__file__).resolve().parents[1]

PYTHON_VARIABLE = "KVPEER_VLLM_PYTHON"

START_DEADLINE_S = 500.0
"""Several engines start at once on two cores that may be busy otherwise: one alone takes 50 s, most of it imports."""

REQUEST_DEADLINE_S = 60.0
PAGE_TOKENS = 32
DIRECTORY_REPLICAS = 2

REPAIR_DEADLINE_S = 90.0
"""What a lost link left undone is found when digests are compared, every 10 s, or after a change of members."""

AGENT_LOOKS_S = 1.5
"""An agent brings its gauges up to date once a second."""

VOCABULARY = range(10, 290)

CONNECTOR = {
    "kv_connector": "KVPeerConnector",
    "kv_connector_module_path": "kvpeer.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "KVPEER_POOL_SIZE": "64Mi",
    "KVPEER_POOL_EXTENT_SIZE": "8Mi",
    # Two busy cores stall for seconds at times, and these deadlines are made for machines that do not.
    "KVPEER_CONNECTOR_PULL_BASE_S": "20",
    "KVPEER_CONNECTOR_LOAD_TIMEOUT_S": "20",
    "KVPEER_CONNECTOR_LOOKUP_TIMEOUT_S": "10",
    "KVPEER_CONNECTOR_PUBLISH_TIMEOUT_S": "20",
    # Nor do pulls pay on them: the tiny model computes a prompt faster. Here they are to be made.
    "KVPEER_CONNECTOR_MEASURED_COSTS": "off",
}

_DROPPED_VARIABLES = ("OPENBLAS_CORETYPE", "PYTHONHASHSEED", PYTHON_VARIABLE)


PORTS = (20_000, 32_000)
"""Below Linux's net.ipv4.ip_local_port_range."""


def prompt(seed: str, n_tokens: int) -> list[int]:
    """Token ids that are the same for the same seed, everywhere."""
    return random.Random(seed).choices(VOCABULARY, k=n_tokens)


def free_port() -> int:
    """A port that nobody uses at the moment, and that the kernel gives nobody before the engine and its agent, a minute
    later, listen there: it is below those that connections get."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(
    is_so: Callable[[], bool],
    what: str,
    deadline_s: float = 30.0,
    lasting_s: float = 0.0,
    seen: Callable[[], object] = lambda: "",
) -> None:
    """Returns when `is_so()` has held for `lasting_s`; fails naming `what`, and what was `seen`, if it does not by the
    deadline."""
    end = time.monotonic() + deadline_s
    since: float | None = None
    pause = threading.Event()
    while True:
        now = time.monotonic()
        since = (since or now) if is_so() else None
        if since is not None and now - since >= lasting_s:
            return
        assert now < end, f"not within {deadline_s} s: {what} {seen()}"
        pause.wait(0.05)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does not run; on a crash of the test it goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


_started_at = time.monotonic()


def say(text: str) -> None:
    """Prints with the time since the start, at once."""
    print(f"[{time.monotonic() - _started_at:5.0f} s] {text}", flush=True)


@dataclass(frozen=True)
class Streamed:
    """A completion as it came: its tokens, when the first one was there, and when the last one was."""

    tokens: list[int]
    ttft_ms: float
    total_ms: float


@dataclass
class Server:
    """One vLLM server with the connector. `name` is the engine's name for kvpeer too, and so decides its agent."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    agent_port: int
    """Where its agent's own /metrics is."""
    log: Path
    socket: Path
    fleet: Fleet = field(repr=False)

    # ---- life

    def wait_ready(self) -> None:
        eventually(self._is_ready_or_dead, f"{self.name} is ready", START_DEADLINE_S)
        assert self.process.poll() is None, f"{self.name} ended at its start:\n{self.log_tail()}"

    def wait_ended(self) -> str:
        """Waits for a start that fails; returns the log."""
        self.process.wait(START_DEADLINE_S)
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """The way an operator stops an engine; then its whole group is killed, whatever is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def log_tail(self, n_bytes: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-n_bytes:]

    def _is_ready_or_dead(self) -> bool:
        if self.process.poll() is not None:
            return True
        try:
            return _request(self.port, "GET", "/health", deadline_s=2.0)[0] == 200
        except OSError:
            return False

    # ---- requests

    def complete(self, tokens: Sequence[int], n_tokens: int = 16, **body: Any) -> list[int]:
        """Greedy completion: the generated token ids."""
        status, text = _request(
            self.port, "POST", "/v1/completions", self._body(tokens, n_tokens, body), REQUEST_DEADLINE_S
        )
        assert status == 200, f"{self.name} answered {status}: {text[:500]}\n{self.log_tail()}"
        generated: list[int] = json.loads(text)["choices"][0]["token_ids"]
        assert len(generated) == n_tokens
        return generated

    def stream(self, tokens: Sequence[int], n_tokens: int = 16) -> Streamed:
        """Greedy completion with the times at which a user sees it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_DEADLINE_S)
        generated: list[int] = []
        ttft_ms = 0.0
        began_at = time.perf_counter()
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", self._body(tokens, n_tokens, {"stream": True}), _JSON)
            response = connection.getresponse()
            for line in response:
                if line.startswith(b"data: {"):
                    generated += json.loads(line[len(b"data: ") :])["choices"][0].get("token_ids") or []
                    ttft_ms = ttft_ms or (time.perf_counter() - began_at) * 1000
        total_ms = (time.perf_counter() - began_at) * 1000
        assert len(generated) == n_tokens, f"{self.name} answered {response.status}: {generated}\n{self.log_tail()}"
        return Streamed(generated, ttft_ms, total_ms)

    def complete_all(self, prompts: Sequence[Sequence[int]], n_tokens: int = 16) -> list[list[int]]:
        """Several completions at once."""
        results: dict[int, list[int]] = {}

        def ask(index: int) -> None:
            results[index] = self.complete(prompts[index], n_tokens)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == len(prompts), f"a request failed on {self.name}:\n{self.log_tail()}"
        return [results[index] for index in range(len(prompts))]

    def begin(self, tokens: Sequence[int], n_tokens: int = 16) -> http.client.HTTPConnection:
        """Sends a request without waiting; closing the connection aborts it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_DEADLINE_S)
        connection.request("POST", "/v1/completions", self._body(tokens, n_tokens, {}), _JSON)
        return connection

    def reset_prefix_cache(self, *, with_connector: bool = False) -> None:
        """Empties the engine's own cache; with the connector: also everything that it published."""
        path = f"/reset_prefix_cache?reset_external={str(with_connector).lower()}"

        def is_reset() -> bool:
            return bool(json.loads(_request(self.port, "POST", path)[1])["success"])

        # It fails as long as blocks wait for their copies.
        eventually(is_reset, f"{self.name} resets its prefix cache")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the engine's samples of a metric that have these labels; 0 where there are none."""
        return _sum_of_samples(_request(self.port, "GET", "/metrics")[1], name, labels)

    def agent_metric(self, name: str, **labels: str) -> float:
        """The same of its agent. Raises OSError when there is no agent."""
        return _sum_of_samples(_request(self.agent_port, "GET", "/metrics")[1], name, labels)

    def agent_story(self) -> str:
        """What its agent looked for, found and was refused so far, to be read when a test fails."""
        lines = _request(self.agent_port, "GET", "/metrics")[1].splitlines()
        told = [
            line for line in lines if line.startswith(_STORY) and not line.endswith(" 0.0") and "_created" not in line
        ]
        return f"the agent of {self.name}:\n" + "\n".join(line for line in told if "_bucket" not in line)

    def cached_tokens(self, source: str) -> float:
        """Prompt tokens that came from a source: device, host (the own pool) or p2p."""
        return self.metric("vllm:prompt_tokens_cached_by_source_total", source=source)

    def settled(self) -> None:
        """Waits until the engine has no request and every copy is over, so that what was computed can be had by
        others."""

        def is_idle() -> bool:
            return self.metric("vllm:num_requests_running") == 0 and self.metric("vllm:kv_cache_usage_perc") == 0

        eventually(is_idle, f"{self.name} frees all its blocks")

    def published(self) -> None:
        """Waits until all that the engine computed is in its pool, and every agent of the fleet can find it."""
        self.settled()

        def counts() -> list[tuple[str, float, float, float]]:
            """(agent, pages, records that it owns, agents that it knows); servers of one name share an agent."""
            return [
                (
                    agent.name,
                    agent.agent_metric("kvpeer_pool_pages", state="committed"),
                    agent.agent_metric("kvpeer_directory_holders"),
                    agent.agent_metric("kvpeer_membership_members", state="alive"),
                )
                for agent in {s.agent_port: s for s in self.fleet.servers if s.has_agent()}.values()
            ]

        def is_findable() -> bool:
            agents = counts()
            n_pages, n_records = sum(each[1] for each in agents), sum(each[2] for each in agents)
            return n_records == n_pages * min(DIRECTORY_REPLICAS, len(agents))

        # Both numbers may be of before the last pages, and equal; not for longer than agents need to look again.
        what = "every page in a pool is in the directory"
        eventually(is_findable, what, REPAIR_DEADLINE_S, AGENT_LOOKS_S, counts)

    def _body(self, tokens: Sequence[int], n_tokens: int, more: dict[str, Any]) -> str:
        return json.dumps(
            {
                "model": "tiny",
                "prompt": list(tokens),
                "max_tokens": n_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **more,
            }
        )

    # ---- its agent

    def agent_pid(self) -> int:
        """The process behind the agent's socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], "little")

    def has_agent(self) -> bool:
        """Whether its agent answers."""
        try:
            self.agent_metric("kvpeer_agent_info")
        except OSError:
            return False
        return True


def _request(port: int, method: str, path: str, body: str = "", deadline_s: float = 20.0) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline_s)
    with contextlib.closing(connection):
        connection.request(method, path, body, _JSON)
        response = connection.getresponse()
        return response.status, response.read().decode()


def _sum_of_samples(text: str, name: str, labels: dict[str, str]) -> float:
    total = 0.0
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match and match["name"] == name and labels.items() <= dict(_LABEL.findall(match["labels"] or "")).items():
            total += float(match["value"])
    return total


_STORY = tuple(f"kvpeer_{part}" for part in ("locate", "transport", "fetch", "breaker", "membership", "directory"))
_JSON = {"Content-Type": "application/json"}
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class Fleet:
    """Servers of one user on one host: they share a runtime folder, so their embedded agents find each other."""

    folder: Path
    model: Path
    python: str
    servers: list[Server] = field(default_factory=list)

    def start(
        self,
        name: str,
        *arguments: str,
        transfer: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        kv_cache_bytes: int = 64 << 20,
        with_kvpeer: bool = True,
    ) -> Server:
        """Starts a server without waiting for it."""
        config = {**CONNECTOR, **(transfer or {}), "kv_connector_extra_config": {"engine_name": name, **(extra or {})}}
        port, agent_port = free_port(), free_port()
        log = self.folder / f"{name}.{len(self.servers)}.log"
        command = [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", "2048", "--max-num-seqs", "8", "--block-size", str(PAGE_TOKENS), "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes), *arguments),
            *(("--kv-transfer-config", json.dumps(config)) if with_kvpeer else ()),
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=self._environment({"KVPEER_METRICS_PORT": str(agent_port), **(environment or {})}),
                start_new_session=True,
            )
        server = Server(name, process, port, agent_port, log, self._socket(name), self)
        self.servers.append(server)
        return server

    def close(self) -> None:
        """Ends all servers and agents."""
        agents = set()
        for server in self.servers:
            with contextlib.suppress(OSError):
                agents.add(server.agent_pid())
        for server in self.servers:
            server.kill()
        for pid in agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED_VARIABLES}
        return {
            **inherited,
            **_ENVIRONMENT,
            # kvpeer itself comes from the wheel that is installed beside vLLM, as it would for a user.
            "PYTHONPATH": str(E2E),
            "KVPEER_AGENT_RUNTIME_DIR": str(self.runtime_folder),
            **more,
        }

    @property
    def runtime_folder(self) -> Path:
        return self.folder / "run"

    def _socket(self, name: str) -> Path:
        from kvpeer.client.embedded import engine_folder

        return engine_folder(name, {"KVPEER_AGENT_RUNTIME_DIR": str(self.runtime_folder)}) / "agent.sock"


def make_fleet(folder: Path, python: str, model_arguments: Sequence[str] = ()) -> Fleet:
    """A fleet with a fresh model. `folder` must have a short path: sockets lie below it. model_arguments: of
    tiny_model.py, after the folder."""
    model = folder / "model"
    made = subprocess.run(
        [python, str(Path(__file__).with_name("tiny_model.py")), str(model), *model_arguments],
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        env={**{n: v for n, v in os.environ.items() if n not in _DROPPED_VARIABLES}, **_ENVIRONMENT},
    )
    assert made.returncode == 0, f"no model could be made:\n{made.stderr}"
    return Fleet(folder, model, python)


def keep_logs(fleet: Fleet, target: str) -> None:
    """Copies the logs of servers and agents to a folder that outlives the test run."""
    for log in [*fleet.folder.glob("*.log"), *fleet.runtime_folder.glob("engines/*/agent.log")]:
        Path(target).mkdir(parents=True, exist_ok=True)
        shutil.copy(log, Path(target) / (log.name if log.name != "agent.log" else f"agent-{log.parent.name}.log"))
