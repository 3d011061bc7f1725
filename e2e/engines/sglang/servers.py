"""Real SGLang servers for tests and the demo: an unmodified SGLang with HiCache on the CPU device, and kvpeer as L3.

The same fleet can hold vLLM servers: one folder, one set of agents.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.harness import AGENT_LOOKS_S, E2E, START_DEADLINE_S, Fleet, Server, eventually, free_port

__all__ = ["ADMIN_KEY", "PAGE_TOKENS", "Answer", "SGLangFleet", "SGLangServer", "make_model"]

PAGE_TOKENS = 32
ADMIN_KEY = "for-tests"
REQUEST_DEADLINE_S = 90.0

BACKEND = {
    "backend_name": "kvpeer",
    "module_path": "kvpeer.engines.sglang",
    "class_name": "KVPeerStorage",
    "interface_v1": 1,
}

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # No such file, so that ranks talk by gloo: torch's CUDA build brings NCCL, which needs a device.
    "SGLANG_NCCL_SO_PATH": "none",
    # Two busy cores stall for seconds at times, and these deadlines are made for machines that do not.
    "KVPEER_SGLANG_EXISTS_TIMEOUT_S": "5",
    "KVPEER_SGLANG_GET_TIMEOUT_BASE_S": "5",
    "KVPEER_SGLANG_GET_TIMEOUT_MAX_S": "8",
    "KVPEER_SGLANG_SET_TIMEOUT_S": "8",
}

_ARGUMENTS = (
    *("--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"),
    *("--disable-overlap-schedule", "--max-total-tokens", "8192", "--page-size", str(PAGE_TOKENS)),
    *("--mem-fraction-static", "0.3", "--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"),
    *("--enable-metrics", "--enable-cache-report", "--skip-server-warmup"),
)


@dataclass(frozen=True)
class Answer:
    """A greedy completion. cached: prompt tokens by where they came from (device, host, storage)."""

    tokens: list[int]
    logprobs: list[float]
    cached: dict[str, int]
    seconds: float


@dataclass
class SGLangServer(Server):
    """One SGLang server; what it has in common with vLLM's is inherited."""

    def generate(self, tokens: Sequence[int], n_tokens: int = 16) -> Answer:
        """A greedy completion with the log-probability of each token."""
        status, text = self.request(
            "POST",
            "/generate",
            {
                "input_ids": list(tokens),
                "sampling_params": {"temperature": 0, "max_new_tokens": n_tokens, "ignore_eos": True},
                "return_logprob": True,
            },
        )
        assert status == 200, f"{self.name} answered {status}: {text[:500]}\n{self.log_tail()}"
        answer = json.loads(text)
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            answer["output_ids"],
            [float(logprob) for logprob, *_ in meta["output_token_logprobs"]],
            {source: int(details.get(source) or 0) for source in ("device", "host", "storage")},
            float(meta.get("e2e_latency") or 0.0),
        )

    def compute(self, tokens: Sequence[int], n_ranks: int = 1) -> Answer:
        """Computes a prompt that is new to it, and returns when its pages are in the own pool and can be found."""
        before = self._n_written()
        answer = self.generate(tokens)
        n_pages = len(tokens) // PAGE_TOKENS * n_ranks
        eventually(lambda: self._n_written() >= before + n_pages, f"{self.name} publishes {n_pages} pages")
        self.published()
        return answer

    def flush(self) -> None:
        """Empties the caches on device and host; storage stays."""

        def is_flushed() -> bool:
            return self.request("POST", "/flush_cache")[0] == 200

        eventually(is_flushed, f"{self.name} flushes its cache")

    def settled(self) -> None:
        """Waits until no request runs."""
        eventually(lambda: self.metric("sglang:num_running_reqs") == 0, f"{self.name} has no request")

    def detach(self) -> tuple[int, str]:
        return self.request("DELETE", "/hicache/storage-backend")

    def attach(self) -> tuple[int, str]:
        return self.request(
            "PUT",
            "/hicache/storage-backend",
            {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config_json": json.dumps({**BACKEND, "engine_name": self.name}),
            },
        )

    def clear(self) -> tuple[int, str]:
        return self.request("POST", "/hicache/storage-backend/clear")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_DEADLINE_S)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body is not None else "", headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def _n_written(self) -> float:
        try:
            return self.agent_metric("kvpeer_publish_pages_total", outcome="written")
        except OSError:
            return 0.0


class SGLangFleet(Fleet):
    """Starts SGLang servers by `serve`; vLLM servers by `start` as its base."""

    def serve(
        self,
        name: str,
        *arguments: str,
        model: Path | None = None,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> SGLangServer:
        """Starts a server without waiting for it. `name` names its agent too."""
        port, agent_port = free_port(), free_port()
        log = self.folder / f"{name}.{len(self.servers)}.log"
        extra_config = {**BACKEND, "engine_name": name, **(extra or {})}
        command = [
            *(self.python, "-m", "sglang.launch_server", "--model-path", str(model or self.model)),
            *("--served-model-name", "tiny", "--port", str(port), "--admin-api-key", ADMIN_KEY, *_ARGUMENTS),
            *("--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", json.dumps(extra_config), *arguments),
        ]
        more = {**_ENVIRONMENT, "KVPEER_METRICS_PORT": str(agent_port), **(environment or {})}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=self._environment(more),
                start_new_session=True,
            )
        server = SGLangServer(name, process, port, agent_port, log, self._socket(name), self)
        self.servers.append(server)
        return server

    def ready(self, *servers: Server) -> None:
        """Returns when these servers serve, have agents, and their agents know each other."""
        for server in servers:
            server.wait_ready()
        agents = [server for server in self.servers if server.process.poll() is None]
        for server in agents:
            eventually(server.has_agent, f"{server.name} has an agent")
        n_agents = len({server.socket for server in agents})
        for server in agents:
            eventually(
                lambda s=server: s.agent_metric("kvpeer_membership_members", state="alive") == n_agents,
                f"the agent of {server.name} knows {n_agents} agents",
                lasting_s=AGENT_LOOKS_S,
            )


def make_model(folder: Path, python: str, seed: int = 1, family: str = "llama") -> Path:
    """A tiny random model of a family of `tiny_model`, of the same shapes for every seed."""
    model = folder / f"{family}-{seed}"
    made = subprocess.run(
        [python, str(E2E / "engines" / "tiny_model.py"), str(model), family, str(seed)],
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert made.returncode == 0, f"no model could be made:\n{made.stderr}"
    return model
