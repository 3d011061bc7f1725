"""The manifests say what the models say, and refuse what no cluster should run with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from admission import admit, schema_of
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster
from kvpeer_operator.schema import CRDS, cluster_crd, policy_crd, render

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
CRD_OF = {"PeerCacheCluster": cluster_crd(), "P2PPolicy": policy_crd()}
MODEL_OF: dict[str, Any] = {"PeerCacheCluster": PeerCacheCluster, "P2PPolicy": P2PPolicy}

CLUSTER = {
    "apiVersion": "kvpeer.io/v1alpha1",
    "kind": "PeerCacheCluster",
    "metadata": {"name": "chat"},
    "spec": {"images": {"agent": "agent:1", "payload": "agent:1"}},
}
POLICY = {
    "apiVersion": "kvpeer.io/v1alpha1",
    "kind": "P2PPolicy",
    "metadata": {"name": "chat"},
    "spec": {"clusterRef": {"name": "chat"}},
}
BASE_OF = {"cluster": CLUSTER, "policy": POLICY}
_GONE = object()

BAD: list[tuple[str, str, Any, str, str]] = [
    # object, path to set, value, path in the refusal, words in the refusal
    ("cluster", "metadata.name", "a" * 41, "metadata.name", "at most 40 characters"),
    ("cluster", "metadata.name", "9lives", "metadata.name", "begin with a letter"),
    ("cluster", "metadata.name", "my.chat", "metadata.name", "no dots"),
    ("cluster", "spec", _GONE, "", "'spec' is a required property"),
    ("cluster", "spec.images", _GONE, "spec", "'images' is a required property"),
    ("cluster", "spec.images.agent", _GONE, "spec.images", "'agent' is a required property"),
    ("cluster", "spec.images.payload", _GONE, "spec.images", "'payload' is a required property"),
    ("cluster", "spec.images.agent", "", "spec.images.agent", "non-empty"),
    ("cluster", "spec.images.agent", "agent :1", "spec.images.agent", "does not match"),
    ("cluster", "spec.images.pullPolicy", "Sometimes", "spec.images.pullPolicy", "is not one of"),
    ("cluster", "spec.images.pullSecrets", "login", "spec.images.pullSecrets", "is not of type 'array'"),
    ("cluster", "spec.images.pullSecrets", ["Login"], "spec.images.pullSecrets[0]", "does not match"),
    ("cluster", "spec.images.pullSecrets", ["a", "a"], "spec.images.pullSecrets[1]", "Duplicate"),
    ("cluster", "spec.images.pullSecrets", list("abcdefghi"), "spec.images.pullSecrets", "too long"),
    ("cluster", "spec.pool.size", "64", "spec.pool.size", "does not match"),
    ("cluster", "spec.pool.size", "64GB", "spec.pool.size", "does not match"),
    ("cluster", "spec.pool.size", "0Gi", "spec.pool.size", "does not match"),
    ("cluster", "spec.pool.size", 64, "spec.pool.size", "is not of type 'string'"),
    ("cluster", "spec.pool.size", "63Mi", "spec.pool.size", "from 64Mi to 16Ti"),
    ("cluster", "spec.pool.size", "17Ti", "spec.pool.size", "from 64Mi to 16Ti"),
    ("cluster", "spec.pool.hugepages", "4Mi", "spec.pool.hugepages", "is not one of"),
    ("cluster", "spec.pool.sise", "64Gi", "spec.pool.sise", "unknown field"),
    ("cluster", "spec.agent.cpu", "0", "spec.agent.cpu", "does not match"),
    ("cluster", "spec.agent.cpu", "1.5", "spec.agent.cpu", "does not match"),
    ("cluster", "spec.agent.memoryOverhead", "256Mi", "spec.agent.memoryOverhead", "from 512Mi to 64Gi"),
    ("cluster", "spec.agent.logLevel", "trace", "spec.agent.logLevel", "is not one of"),
    ("cluster", "spec.directory.replicas", 0, "spec.directory.replicas", "less than the minimum of 1"),
    ("cluster", "spec.directory.replicas", 4, "spec.directory.replicas", "greater than the maximum of 3"),
    ("cluster", "spec.directory.virtualNodes", 8, "spec.directory.virtualNodes", "less than the minimum of 16"),
    ("cluster", "spec.directory.partitionRecordsMax", 1, "spec.directory.partitionRecordsMax", "less than the minimum"),
    ("cluster", "spec.transport.verify", "None", "spec.transport.verify", "is not one of"),
    ("cluster", "spec.transport.mode", "RDMA", "spec.transport.mode", "unknown field"),
    ("cluster", "spec.ports.control", 80, "spec.ports.control", "less than the minimum of 1024"),
    ("cluster", "spec.ports.metrics", 65536, "spec.ports.metrics", "greater than the maximum of 65535"),
    ("cluster", "spec.ports", {"control": 7947}, "spec.ports", "three different ports"),
    ("cluster", "spec.security.mode", "MutualTLS", "spec.security.mode", "is not one of"),
    ("cluster", "spec.security", {"mode": "Insecure", "secretName": "s"}, "spec.security", "remove it or set mode"),
    ("cluster", "spec.security.secretName", "Chat_Secret", "spec.security.secretName", "does not match"),
    (
        "cluster",
        "spec.engineSelector.matchLabels",
        {"app": "not a value"},
        "spec.engineSelector.matchLabels.app",
        "match",
    ),
    ("cluster", "spec.engineSelector.matchLabels", {str(i): "" for i in range(17)}, "spec.engineSelector", "too many"),
    ("policy", "spec.clusterRef", _GONE, "spec", "'clusterRef' is a required property"),
    ("policy", "spec.clusterRef.name", "", "spec.clusterRef.name", "non-empty"),
    ("policy", "spec.clusterRef.name", "Chat", "spec.clusterRef.name", "does not match"),
    ("policy", "spec.clusterRef.namespace", "other", "spec.clusterRef.namespace", "unknown field"),
    ("policy", "spec.mode", True, "spec.mode", "is not one of"),  # what unquoted `On` is in YAML
    ("policy", "spec.mode", "Shadow", "spec.mode", "is not one of"),
    ("policy", "spec.roles", [], "spec.roles", "non-empty"),
    ("policy", "spec.roles", ["Producer", "Producer"], "spec.roles[1]", "Duplicate"),
    ("policy", "spec.roles", ["Reader"], "spec.roles[0]", "is not one of"),
    ("policy", "spec.minCachedTokenDelta", 0, "spec.minCachedTokenDelta", "less than the minimum of 1"),
    ("policy", "spec.minCachedTokenDelta", "Auto", "spec.minCachedTokenDelta", "is not of type 'integer'"),
    ("policy", "spec.maxPullWait", "2", "spec.maxPullWait", "does not match"),
    ("policy", "spec.maxPullWait", "50ms", "spec.maxPullWait", "from 100ms to 60s"),
    ("policy", "spec.maxPullWait", "2m", "spec.maxPullWait", "from 100ms to 60s"),
]


@pytest.mark.parametrize("name", CRDS)
def test_manifests_are_what_the_models_give(name: str) -> None:
    assert (ROOT / "crds" / name).read_text() == render(CRDS[name]()), "run: make crds"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted_and_read(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        admitted = admit(CRD_OF[document["kind"]], document)
        MODEL_OF[document["kind"]].model_validate(admitted)


def test_the_full_example_has_every_field() -> None:
    (document,) = yaml.safe_load_all((ROOT / "examples/peercachecluster-full.yaml").read_text())
    schema = schema_of(CRD_OF["PeerCacheCluster"])["properties"]["spec"]
    assert _fields(document["spec"], schema) == _fields(None, schema)


def _id_of(path: str, value: Any) -> str:
    """The same in every process, which the address of an object is not."""
    return f"no {path}" if value is _GONE else f"{path}={value}"[:60]


@pytest.mark.parametrize(
    ("base", "path", "value", "where", "words"), BAD, ids=[_id_of(path, value) for _, path, value, *_ in BAD]
)
def test_a_bad_object_is_refused_with_its_path(base: str, path: str, value: Any, where: str, words: str) -> None:
    bad = _with(BASE_OF[base], path, value)
    with pytest.raises(ValueError, match=r".") as refusal:
        admit(CRD_OF[bad["kind"]], bad)
    assert any(line.startswith(where) and words in line for line in str(refusal.value).splitlines()), refusal.value


@pytest.mark.parametrize(
    ("base", "path", "value", "words"),
    [
        ("cluster", "spec.directory.replicas", 3, "spec.directory: cannot be changed"),
        ("cluster", "spec.directory.virtualNodes", 64, "make a new PeerCacheCluster"),
        ("policy", "spec.clusterRef.name", "other", "spec.clusterRef: cannot be changed"),
    ],
)
def test_what_is_fixed_cannot_be_changed(base: str, path: str, value: Any, words: str) -> None:
    old = BASE_OF[base]
    admit(CRD_OF[old["kind"]], old, old)
    with pytest.raises(ValueError, match=words):
        admit(CRD_OF[old["kind"]], _with(old, path, value), old)


@pytest.mark.parametrize("kind", CRD_OF)
def test_defaults_of_the_schema_are_those_of_the_model(kind: str) -> None:
    """So an object means the same to the API server, to kubectl explain and to the operator."""
    base = CLUSTER if kind == "PeerCacheCluster" else POLICY
    by_server = MODEL_OF[kind].model_validate(admit(CRD_OF[kind], base))
    assert by_server == MODEL_OF[kind].model_validate(base)


@pytest.mark.parametrize("kind", CRD_OF)
def test_every_field_is_described_and_the_schema_is_structural(kind: str) -> None:
    for path, part in _parts(schema_of(CRD_OF[kind]), ""):
        assert "type" in part, path
        assert path.endswith(("[]", "{}")) or part.get("description"), f"{path} has no description"
        assert not {"$ref", "title", "anyOf", "oneOf", "allOf", "const"} & part.keys(), path
        assert not ("properties" in part and "additionalProperties" in part), path
        assert not path.startswith("status") or "default" not in part, path


@pytest.mark.parametrize("kind", CRD_OF)
def test_rules_have_messages_and_texts_have_limits(kind: str) -> None:
    """The API server charges a rule by the longest text it could meet."""
    for path, part in _parts(schema_of(CRD_OF[kind]), ""):
        for rule in part.get("x-kubernetes-validations", ()):
            assert len(rule["message"]) > 10, path
        if part["type"] == "string" and "enum" not in part and "format" not in part:
            assert part["maxLength"] <= 1024, path
        if part["type"] == "array":
            assert part["maxItems"] <= 16, path


def _parts(schema: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, part in schema.get("properties", {}).items():
        found += _parts(part, f"{path}.{name}".lstrip("."))
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            found += _parts(schema[key], path + mark)
    return found


def _fields(value: Any, schema: dict[str, Any], path: str = "spec") -> set[str]:
    """Paths of the fields of a value, or of the schema if there is none."""
    found = {path}
    for name, part in schema.get("properties", {}).items():
        if value is None or name in value:
            found |= _fields(None if value is None else value[name], part, f"{path}.{name}")
    return found


def _with(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(base)
    *parents, last = path.split(".")
    at = changed
    for name in parents:
        at = at.setdefault(name, {})
    if value is _GONE:
        del at[last]
    else:
        at[last] = value
    return changed
