"""A pod's quality of service, and resources for further containers that do not change it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvpeer_operator.quantities import format_bytes, parse_quantity

__all__ = ["Quality", "agent_resources", "payload_resources", "quality_of"]

_COUNTED = ("cpu", "memory")
"""The resources that the quality of service is made of."""

_PAYLOAD = {"cpu": "100m", "memory": "128Mi"}
"""For copying some megabytes. No node is chosen by it: the pod needs more afterwards."""


class Quality(str, Enum):
    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


def quality_of(spec: Mapping[str, Any]) -> Quality:
    """The class that Kubernetes gives a pod of this spec."""
    given = [
        container.get("resources") or {} for container in (*(spec.get("initContainers") or ()), *spec["containers"])
    ]
    counted = [{kind: _counted(each.get(kind) or {}) for kind in ("requests", "limits")} for each in given]
    if not any(each["requests"] or each["limits"] for each in counted):
        return Quality.BEST_EFFORT
    for each in counted:
        limits = each["limits"]
        # A request that is not given is the limit.
        if set(limits) != set(_COUNTED) or {**limits, **each["requests"]} != limits:
            return Quality.BURSTABLE
    return Quality.GUARANTEED


def agent_resources(quality: Quality, cpu: str, memory_overhead: str, pool_size: str, hugepages: str) -> dict[str, Any]:
    """Resources of the agent's container. hugepages: "None", "2Mi" or "1Gi"; with others than None the pool counts
    there, rounded up to whole pages, and not as memory."""
    if quality is Quality.BEST_EFFORT:
        return {}
    pool_bytes, overhead_bytes = int(parse_quantity(pool_size)), int(parse_quantity(memory_overhead))
    huge: dict[str, str] = {}
    if hugepages != "None":
        page_bytes = int(parse_quantity(hugepages))
        huge = {f"hugepages-{hugepages}": format_bytes(-(-pool_bytes // page_bytes) * page_bytes)}
        pool_bytes = 0
    memory = format_bytes(pool_bytes + overhead_bytes)
    requests = {"cpu": cpu, "memory": memory, **huge}
    # Without a CPU limit the agent is never held back; a Guaranteed pod must have one.
    limits = requests if quality is Quality.GUARANTEED else {"memory": memory, **huge}
    return {"requests": requests, "limits": dict(limits)}


def payload_resources(quality: Quality) -> dict[str, Any]:
    """Resources of the container that copies the payload."""
    return {} if quality is Quality.BEST_EFFORT else {"requests": dict(_PAYLOAD), "limits": dict(_PAYLOAD)}


def _counted(resources: Mapping[str, Any]) -> dict[str, Any]:
    """What counts, as numbers; a zero is as good as nothing."""
    numbers = {name: parse_quantity(value) for name, value in resources.items() if name in _COUNTED}
    return {name: number for name, number in numbers.items() if number}
