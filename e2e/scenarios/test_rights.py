"""The operator's rights are those that it uses: its ClusterRoles beside what the API server noted of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cluster.control_plane import AUDIT_LOG
from cluster.folders import state_folder

from scenarios.installation import ACCOUNT
from scenarios.kube import get

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

FORBIDDEN = 403

NEVER_NOTED = {
    # Asked for by admission, where owner references are enforced.
    ("kvpeer.io", "peercacheclusters/finalizers", "update"),
    # Asked for within a patch that makes the object.
    ("", "services", "create"),
}
"""Rights that are needed and that no request of their own is noted for."""


def test_the_operator_is_never_forbidden_anything(installed: str) -> None:
    refused = {
        (_right(each), each["requestURI"])
        for each in _requests()
        if each["responseStatus"]["code"] == FORBIDDEN
        # In a namespace that is being deleted nobody may make anything.
        and "being terminated" not in each["responseStatus"].get("message", "")
    }
    # What a quota or pod security forbids is not a lack of rights.
    assert {right for right, _ in refused} <= {("", "pods", "create")}, refused


def test_the_operator_has_no_right_that_it_does_not_use(installed: str) -> None:
    """In all that the scenarios before this one made it do."""
    used = {_right(each) for each in _requests()}
    assert set(_granted()) - used <= NEVER_NOTED


def _requests() -> list[dict[str, object]]:
    lines = (state_folder() / AUDIT_LOG).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    noted = [each for each in events if each["user"]["username"] == ACCOUNT and "objectRef" in each]
    assert noted, "the API server noted nothing of the operator"
    return noted


def _right(event: dict[str, object]) -> tuple[str, str, str]:
    about = event["objectRef"]
    resource = about["resource"] + (f"/{about['subresource']}" if "subresource" in about else "")
    return about.get("apiGroup", ""), resource, event["verb"]


def _granted() -> Iterator[tuple[str, str, str]]:
    roles = [get("clusterrole", "kvpeer"), get("clusterrole", "kvpeer-webhook")]
    roles.append(get("role", "kvpeer-webhook", "kvpeer-system"))
    for role in roles:
        assert role is not None
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                yield from ((group, resource, verb) for resource in rule["resources"] for verb in rule["verbs"])
