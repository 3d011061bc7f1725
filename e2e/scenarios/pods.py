"""Engine pods: a real vLLM on the CPU with a tiny model, as a user would describe it, and what is asked of it.

The engine's environment is gigabytes, so it is not in an image: the node's own is mounted, read-only, at the paths that
its interpreter knows. It is the one that KVPEER_VLLM_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.control_plane import kubectl
from cluster.folders import REPOSITORY, cache_folder
from cluster.images import PROJECT_IMAGES
from engines.harness import PAGE_TOKENS, PYTHON_VARIABLE, eventually
from prometheus_client.parser import text_string_to_metric_families

from scenarios.kube import Object, get

__all__ = [
    "CLUSTER_LABEL",
    "ENGINE_PORT",
    "SKIPPED",
    "EnginePod",
    "engine_pod",
    "fake_pod",
    "make_model",
    "peer_cache_cluster",
    "policy",
    "wait_ready",
]

CLUSTER_LABEL = "kvpeer.io/cluster"
SKIPPED = "kvpeer.io/skipped"

ENGINE_PORT, AGENT_PORT = 8000, 7948
START_DEADLINE_S = 500.0
"""Engines start on two cores that others use, too: one alone takes 50 s."""
REQUEST_DEADLINE_S = 120.0
POOL_SIZE = "64Mi"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HOME": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Two busy cores stall for seconds at times, and these deadlines are made for machines that do not.
    "KVPEER_CONNECTOR_PULL_BASE_S": "20",
    "KVPEER_CONNECTOR_LOAD_TIMEOUT_S": "20",
    "KVPEER_CONNECTOR_LOOKUP_TIMEOUT_S": "10",
    "KVPEER_CONNECTOR_PUBLISH_TIMEOUT_S": "20",
    # Nor do pulls pay on them: the tiny model computes a prompt faster. Here they are to be made.
    "KVPEER_CONNECTOR_MEASURED_COSTS": "off",
}


def peer_cache_cluster(name: str = "chat", **spec: Any) -> Object:
    """A PeerCacheCluster with the images that were built here."""
    images = {"agent": PROJECT_IMAGES["agent"], "payload": PROJECT_IMAGES["agent"]}
    given = {"images": images, "pool": {"size": POOL_SIZE}, **spec}
    return _object("kvpeer.io/v1alpha1", "PeerCacheCluster", name, spec=given)


def policy(name: str = "chat", cluster: str = "chat", mode: str = "On", **spec: Any) -> Object:
    """A P2PPolicy that pulls from two pages on."""
    given = {"clusterRef": {"name": cluster}, "mode": mode, "minCachedTokenDelta": 2 * PAGE_TOKENS, **spec}
    return _object("kvpeer.io/v1alpha1", "P2PPolicy", name, spec=given)


def engine_pod(name: str, node: str, cluster: str = "chat", labels: dict[str, str] | None = None) -> Object:
    """A pod with vLLM; cluster: the one that it joins, empty for none."""
    python = Path(os.environ[PYTHON_VARIABLE])
    folders = {"venv": python.parents[1], "python": python.resolve().parents[1], "model": make_model()}
    environment = [{"name": key, "value": value} for key, value in _ENVIRONMENT.items()]
    environment.append({"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders["model"])),
        *("--served-model-name", "tiny", "--host", "0.0.0.0", "--port", str(ENGINE_PORT), "--dtype", "bfloat16"),
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--block-size", str(PAGE_TOKENS), "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ]
    mounts = [{"name": key, "mountPath": str(path), "readOnly": True} for key, path in folders.items()]
    volumes = [{"name": key, "hostPath": {"path": str(path)}} for key, path in folders.items()]
    container = {
        "name": "engine",
        "image": PROJECT_IMAGES["agent"],
        "command": command,
        "env": environment,
        "securityContext": {"runAsUser": 0},
        "ports": [{"name": "http", "containerPort": ENGINE_PORT}],
        "readinessProbe": {"httpGet": {"port": "http", "path": "/health"}, "periodSeconds": 1},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    spec = {
        "nodeName": node,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 20,
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}}],
    }
    return _pod(name, {**_joining(cluster), **(labels or {})}, spec)


def fake_pod(name: str, node: str = "", cluster: str = "chat", **container: Any) -> Object:
    """A pod whose command looks like vLLM's and which only sleeps: for what becomes of pods, not of requests."""
    given = {
        "name": "engine",
        "image": PROJECT_IMAGES["agent"],
        "command": ["python3", "-c", "import time; time.sleep(3600)"],
        "args": ["vllm", "serve", "tiny"],
        **container,
    }
    spec = {"terminationGracePeriodSeconds": 1, "containers": [given], **({"nodeName": node} if node else {})}
    return _pod(name, _joining(cluster), spec)


def make_model() -> Path:
    """The tiny model's folder; made once."""
    folder = cache_folder() / "model"
    if not (folder / "config.json").exists():
        script = REPOSITORY / "e2e" / "engines" / "tiny_model.py"
        subprocess.run([os.environ[PYTHON_VARIABLE], script, folder], check=True)
    return folder


@dataclass(frozen=True)
class EnginePod:
    """A pod whose engine answers."""

    name: str
    namespace: str
    address: str

    def complete(self, tokens: Sequence[int], n_tokens: int = 16) -> list[int]:
        """Greedy completion: the generated token ids."""
        asked = {"model": "tiny", "prompt": list(tokens), "max_tokens": n_tokens, "temperature": 0}
        body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
        request = urllib.request.Request(
            f"http://{self.address}:{ENGINE_PORT}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as answer:  # noqa: S310
            generated: list[int] = json.load(answer)["choices"][0]["token_ids"]
        assert len(generated) == n_tokens
        return generated

    def pulled_tokens(self) -> float:
        """Prompt tokens that came from peers."""
        return _metric(self.address, ENGINE_PORT, "vllm:prompt_tokens_cached_by_source", source="p2p")

    def n_decisions(self, reason: str) -> float:
        """Requests that its engine decided for this reason."""
        return _metric(self.address, ENGINE_PORT, "kvpeer_policy_decisions_total", reason=reason)

    def agent_metric(self, name: str, **labels: str) -> float:
        """The sum of its agent's samples of a metric that have these labels. Raises OSError without an agent."""
        return _metric(self.address, AGENT_PORT, name, **labels)

    def has_agent(self) -> bool:
        """Whether its agent answers."""
        try:
            return self.agent_metric("kvpeer_agent_info") == 1
        except OSError:
            return False

    def log(self, container: str = "engine", n_lines: int = 60) -> str:
        """What a container wrote last."""
        return kubectl("logs", self.name, "-n", self.namespace, "-c", container, f"--tail={n_lines}")


def wait_ready(name: str, namespace: str, deadline_s: float = START_DEADLINE_S) -> EnginePod:
    """The pod, once it is ready. Fails with its engine's last words when a container of it has ended."""

    def is_ready() -> bool:
        pod = get("pod", name, namespace)
        assert pod is not None, f"there is no pod {name}"
        states = [each for each in pod["status"].get("containerStatuses") or () if each["name"] == "engine"]
        assert not any(each["restartCount"] for each in states), kubectl(
            "logs", name, "-n", namespace, "-c", "engine", "--previous", "--tail=60"
        )
        return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])

    eventually(is_ready, f"pod {name} is ready", deadline_s, seen=lambda: (get("pod", name, namespace) or {})["status"])
    pod = get("pod", name, namespace)
    assert pod is not None
    return EnginePod(name, namespace, pod["status"]["podIP"])


def _metric(address: str, port: int, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [each for family in families for each in family.samples if each.name in (name, f"{name}_total")]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def _joining(cluster: str) -> dict[str, str]:
    return {CLUSTER_LABEL: cluster} if cluster else {}


def _pod(name: str, labels: dict[str, str], spec: Object) -> Object:
    pod = _object("v1", "Pod", name, spec=spec)
    annotations = {"kvpeer.io/engine": "vllm", "kvpeer.io/engine-version": "0.32.0"}
    pod["metadata"].update({"labels": labels, "annotations": annotations})
    return pod


def _object(api_version: str, kind: str, name: str, **more: Any) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **more}
