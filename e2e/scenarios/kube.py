"""What tests ask of the cluster, through kubectl as an administrator would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cluster.control_plane import kubectl
from engines.harness import eventually

__all__ = ["Object", "annotations", "apply", "await_condition", "condition", "delete", "get", "listed", "refusal"]

Object = dict[str, Any]


def apply(*objects: Object, namespace: str = "") -> None:
    """All of them are there. Raises RuntimeError with the API server's words."""
    place = ["--namespace", namespace] if namespace else []
    kubectl("apply", *place, "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def get(kind: str, name: str, namespace: str = "") -> Object | None:
    """The object; None: there is none."""
    place = ["--namespace", namespace] if namespace else []
    text = kubectl("get", kind, name, *place, "--ignore-not-found", "-o", "json")
    found: Object | None = json.loads(text) if text else None
    return found


def listed(kind: str, namespace: str, labels: str = "") -> list[Object]:
    """The objects with these labels (a selector)."""
    text = kubectl("get", kind, "--namespace", namespace, "--selector", labels, "-o", "json")
    found: list[Object] = json.loads(text)["items"]
    return found


def delete(kind: str, name: str, namespace: str = "") -> None:
    """It is gone, or is being deleted."""
    place = ["--namespace", namespace] if namespace else []
    kubectl("delete", kind, name, *place, "--ignore-not-found", "--wait=false")


def refusal(obj: Object, namespace: str) -> str:
    """Why the API server would not make this object; empty: it would."""
    words = ["create", "--namespace", namespace, "--dry-run=server", "-f", "-"]
    try:
        kubectl(*words, text=json.dumps(obj))
    except RuntimeError as error:
        return str(error)
    return ""


def condition(obj: Object | None, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of one of its conditions; empty texts where there is none."""
    conditions = ((obj or {}).get("status") or {}).get("conditions") or ()
    for each in conditions:
        if each["type"] == kind:
            return each["status"], each.get("reason", ""), each.get("message", "")
    return "", "", ""


def await_condition(
    kind: str, name: str, namespace: str, what: str, status: str = "True", deadline_s: float = 60.0
) -> Object:
    """The object, once its condition `what` has this status."""
    found: list[Object | None] = [None]

    def is_so() -> bool:
        found[0] = get(kind, name, namespace)
        return condition(found[0], what)[0] == status

    seen: Callable[[], object] = lambda: condition(found[0], what)  # noqa: E731 - it says no more than its name
    eventually(is_so, f"{kind} {name} is {what}: {status}", deadline_s, seen=seen)
    assert found[0] is not None
    return found[0]


def annotations(pod: Object) -> dict[str, str]:
    """Of an object; empty for none."""
    return dict(pod["metadata"].get("annotations") or {})
