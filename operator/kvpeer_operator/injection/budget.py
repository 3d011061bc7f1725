"""Whether a namespace's ResourceQuotas and LimitRanges would refuse a pod because of the containers that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from kvpeer_operator.injection.reasons import Skip, SkipReason
from kvpeer_operator.quantities import parse_quantity

__all__ = ["budget_refusal"]

_REQUESTS, _LIMITS = "requests", "limits"


def budget_refusal(
    pod: Mapping[str, Any], payload: Mapping[str, Any], agent: Mapping[str, Any], budgets: Iterable[Mapping[str, Any]]
) -> Skip | None:
    """Why one of the namespace's budgets (ResourceQuota and LimitRange objects) would refuse the pod with an agent;
    None: none would.

    Scopes are not looked at, and a budget that refuses the pod alone counts too: this may leave a pod without an agent
    that could have one, and never keeps a pod from being made.
    """
    for budget in budgets:
        check = _quota_faults if budget["kind"] == "ResourceQuota" else _range_faults
        fault = next(check(budget, pod, payload, agent), None)
        if fault:
            named = f"{budget['kind']} {budget['metadata']['name']}"
            return Skip(SkipReason.QUOTA, f"{named} {fault}: change it, or spec.agent and spec.pool of the cluster")
    return None


def _quota_faults(
    quota: Mapping[str, Any], pod: Mapping[str, Any], payload: Mapping[str, Any], agent: Mapping[str, Any]
) -> Iterator[str]:
    status = quota.get("status") or {}
    used = status.get("used") or {}
    for name, hard in (status.get("hard") or {}).items():
        kind, resource = _counted(name)
        if not resource:
            continue
        for container in (payload, agent):
            if resource in ("cpu", "memory") and resource not in _amounts([container], kind):
                yield f"wants {name} of every container, and {container['name']} has none"
        # The payload's container ends before the agent starts, and needs less.
        more = _amounts([agent], kind).get(resource, Decimal(0))
        left = parse_quantity(hard) - parse_quantity(used.get(name, 0))
        if more and more + _amounts(pod["spec"]["containers"], kind).get(resource, Decimal(0)) > left:
            yield f"has {left:f} of {name} left, and the agent needs {more:f} beside the pod"


def _range_faults(
    limits: Mapping[str, Any], pod: Mapping[str, Any], payload: Mapping[str, Any], agent: Mapping[str, Any]
) -> Iterator[str]:
    for item in limits["spec"]["limits"]:
        of_pod = [*pod["spec"]["containers"], agent]
        groups = {"Container": [[payload], [agent]], "Pod": [of_pod]}.get(item["type"], [])
        for group in groups:
            name = group[-1]["name"]
            for resource, most in (item.get("max") or {}).items():
                limit = _amounts(group, _LIMITS).get(resource)
                if limit is None or limit > parse_quantity(most):
                    yield f"allows {most} of {resource} a {item['type']}, and {name} would exceed it or has no limit"
            for resource, least in (item.get("min") or {}).items():
                if _amounts(group, _REQUESTS).get(resource, Decimal(0)) < parse_quantity(least):
                    yield f"wants {least} of {resource} a {item['type']}, and {name} requests less"
            if item.get("maxLimitRequestRatio") and "cpu" not in _amounts(group, _LIMITS):
                yield f"bounds limits by requests, and {name} has no limit of cpu"


def _counted(name: str) -> tuple[str, str]:
    """What an entry of a quota counts: requests or limits, of which resource; empty for objects and storage."""
    if name in ("cpu", "memory") or name.startswith("hugepages-"):
        return _REQUESTS, name
    kind, _, resource = name.partition(".")
    return (kind, resource) if kind in (_REQUESTS, _LIMITS) and resource != "storage" else ("", "")


def _amounts(containers: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Decimal]:
    """What containers request, or are limited to, together; a limit is a request where there is none."""
    total: dict[str, Decimal] = {}
    for container in containers:
        resources = container.get("resources") or {}
        given = {**(resources.get(_LIMITS) or {}), **(resources.get(_REQUESTS) or {})}
        for name, amount in (given if kind == _REQUESTS else resources.get(_LIMITS) or {}).items():
            total[name] = total.get(name, Decimal(0)) + parse_quantity(amount)
    return total
