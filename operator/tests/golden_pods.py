"""Pods of common charts, made by hand in their shape, and what becomes of them.

`PYTHONPATH=operator:operator/tests python -m golden_pods` writes the golden files anew; read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonpatch
import yaml
from kvpeer_operator.injection import Patch, inject, skip_patch
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster

HERE = Path(__file__).parent
PODS = sorted((HERE / "pods").glob("*.yaml"))
GOLDEN = HERE / "golden"

TRIED = {"type": "ImagesReady", "status": "True", "reason": "Tried", "lastTransitionTime": "2026-01-01T00:00:00Z"}
READY = {"conditions": [TRIED]}


def cluster(status: dict[str, Any] = READY, **spec: Any) -> PeerCacheCluster:
    """The cluster `chat` whose images were tried."""
    images = {"agent": "kvpeer/agent:0.1.0", "payload": "kvpeer/agent:0.1.0", "pullSecrets": ["registry-login"]}
    spec = {"images": images, "pool": {"size": "64Gi"}, **spec}
    return PeerCacheCluster.model_validate(
        {"metadata": {"name": "chat", "namespace": "models"}, "spec": spec, "status": status}
    )


def policy(**spec: Any) -> P2PPolicy:
    """A policy that is on."""
    given = {"clusterRef": {"name": "chat"}, "mode": "On", **spec}
    return P2PPolicy.model_validate({"metadata": {"name": "chat"}, "spec": given})


def apply(pod: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """The pod after the patch, as the API server applies it."""
    changed: dict[str, Any] = jsonpatch.apply_patch(pod, list(patch.operations))
    return changed


def outcome(pod: dict[str, Any]) -> str:
    """What becomes of the pod, to read."""
    result = inject(pod, cluster(), policy())
    if isinstance(result, Patch):
        head, after = "an agent", apply(pod, result)
    else:
        head, after = f"{result.reason.value}: {result.message}", apply(pod, skip_patch(pod, result))
    text = yaml.dump(after, Dumper=_Dumper, sort_keys=False, width=120, default_flow_style=None)
    return f"# {head}\n{text}"


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def main() -> None:
    """Writes the golden files."""
    for path in PODS:
        (GOLDEN / path.name).write_text(outcome(yaml.safe_load(path.read_text())))


if __name__ == "__main__":
    main()
