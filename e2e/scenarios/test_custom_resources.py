"""The custom resources on a real API server: what it takes, what it refuses, and how it explains them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_objects import BAD, BASE_OF, CLUSTER, GONE, POLICY, changed, id_of
from cluster.control_plane import kubectl
from cluster.folders import REPOSITORY
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster

from scenarios.kube import apply, condition, get, refusal

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CRDS = {"peercacheclusters.kvpeer.io": "pcc", "p2ppolicies.kvpeer.io": "p2p"}
MODEL_OF: dict[str, Any] = {"PeerCacheCluster": PeerCacheCluster, "P2PPolicy": P2PPolicy}
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))

SAID_BY_SERVER = {
    "is a required property": "Required value",
    "does not match": "should match",
    "match": "should match",
    "is not one of": "Unsupported value",
    "is not of type": "must be of type",
    "non-empty": "should",
    "Duplicate": "Duplicate value",
    "too long": "must have at most",
    "too many": "must have at most",
    "less than the minimum": "should be greater than or equal to",
    "greater than the maximum": "should be less than or equal to",
}
"""What the API server says where the emulation says otherwise. Messages of our own rules are the same."""


@pytest.fixture(scope="module", autouse=True)
def definitions(cluster: None) -> Iterator[None]:
    """The custom resource definitions: the chart's where it is installed, else those of crds/, taken away afterwards,
    because a chart would not take them over."""
    if get("crd", "peercacheclusters.kvpeer.io"):
        yield
        return
    kubectl("apply", "--server-side", "-f", str(REPOSITORY / "crds"))
    for name in CRDS:
        kubectl("wait", f"crd/{name}", "--for=condition=Established", "--timeout=30s")
    yield
    kubectl("delete", "-f", str(REPOSITORY / "crds"))


@pytest.mark.parametrize("name", CRDS)
def test_the_api_server_finds_nothing_to_criticise_in_a_definition(name: str) -> None:
    found = get("crd", name)
    assert condition(found, "NamesAccepted")[0] == "True"
    assert condition(found, "NonStructuralSchema")[0] in ("", "False"), condition(found, "NonStructuralSchema")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted_and_means_what_the_models_say(path: Path, namespace: str) -> None:
    kubectl("apply", "--namespace", namespace, "-f", str(path))
    for document in yaml.safe_load_all(path.read_text()):
        kept = get(document["kind"], document["metadata"]["name"], namespace)
        model = MODEL_OF[document["kind"]]
        assert model.model_validate(kept).spec == model.model_validate(document).spec


@pytest.mark.parametrize(
    ("base", "path", "value", "where", "words"), BAD, ids=[id_of(path, value) for _, path, value, *_ in BAD]
)
def test_a_bad_object_is_refused_with_its_path(
    base: str, path: str, value: Any, where: str, words: str, namespace: str
) -> None:
    said = refusal(changed(BASE_OF[base], path, value), namespace)
    assert (path if value is GONE else where) in said, said
    wanted = next((server for emulated, server in SAID_BY_SERVER.items() if emulated in words), words)
    assert wanted in said, said


@pytest.mark.parametrize("base", BASE_OF)
def test_a_good_object_is_accepted(base: str, namespace: str) -> None:
    """Or the refusals would prove nothing."""
    assert refusal(changed(BASE_OF[base], "metadata.name", "good"), namespace) == ""


@pytest.mark.parametrize(
    ("base", "path", "value", "words"),
    [
        (CLUSTER, "spec.directory.replicas", 3, "spec.directory: Invalid value"),
        (CLUSTER, "spec.directory.virtualNodes", 64, "make a new PeerCacheCluster"),
        (POLICY, "spec.clusterRef.name", "other", "spec.clusterRef: Invalid value"),
    ],
)
def test_what_is_fixed_cannot_be_changed(
    base: dict[str, Any], path: str, value: Any, words: str, namespace: str
) -> None:
    old = changed(base, "metadata.name", "fixed")
    apply(old, namespace=namespace)
    with pytest.raises(RuntimeError, match=re.escape(words)):
        apply(changed(old, path, value), namespace=namespace)


def test_a_mode_without_quotes_is_refused_with_what_would_do(namespace: str) -> None:
    """YAML reads `On` as true."""
    text = yaml.safe_dump(changed(POLICY, "spec.mode", "On")).replace("'On'", "On")
    with pytest.raises(RuntimeError, match=r"spec\.mode.*string"):
        kubectl("create", "--namespace", namespace, "--dry-run=server", "-f", "-", text=text)


@pytest.mark.parametrize("name", CRDS)
def test_kubectl_explains_every_field(name: str) -> None:
    resource = CRDS[name]
    for path in _explained(_schema(name)["properties"]["spec"], f"{resource}.spec"):
        said = kubectl("explain", path)
        description = said.partition("DESCRIPTION:")[2].partition("FIELDS:")[0].strip()
        assert len(description) > 3, f"{path}: {said}"
        assert "<empty>" not in description, path


@pytest.mark.parametrize(
    ("resource", "columns"),
    [
        ("pcc", ["NAME", "READY", "AGENTS", "EXPECTED", "POOL", "AGE"]),
        ("p2p", ["NAME", "CLUSTER", "MODE", "PODS", "AGE"]),
    ],
)
def test_kubectl_get_shows_what_people_look_for(resource: str, columns: list[str], namespace: str) -> None:
    apply(changed(CLUSTER, "metadata.name", "shown"), changed(POLICY, "metadata.name", "shown"), namespace=namespace)
    assert kubectl("get", resource, "shown", "--namespace", namespace).splitlines()[0].split() == columns
    assert "shown" in kubectl("get", "kvpeer", "--namespace", namespace)


def test_a_status_that_the_operator_writes_is_kept_whole(namespace: str) -> None:
    apply(changed(CLUSTER, "metadata.name", "judged"), namespace=namespace)
    status = {
        "observedGeneration": 1,
        "members": {"expected": 2, "ready": 1, "outdated": 0, "skipped": 1},
        "triedImages": "0123456789abcdef",
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "AgentsNotReady",
                "message": "agents that do not run: a",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "observedGeneration": 1,
            }
        ],
    }
    patch = json.dumps({"status": status})
    kubectl("patch", "pcc", "judged", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    kept = get("pcc", "judged", namespace)
    assert kept is not None
    assert kept["status"] == status
    assert kubectl("get", "pcc", "judged", "-n", namespace).splitlines()[1].split()[1:4] == ["False", "1", "2"]


def _schema(name: str) -> dict[str, Any]:
    found = get("crd", name)
    assert found is not None
    schema: dict[str, Any] = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _explained(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Paths of all fields below one, and its own."""
    yield path
    for name, part in schema.get("properties", {}).items():
        yield from _explained(part, f"{path}.{name}")
