"""The manifests say what the models say, and refuse what no cluster should run with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from admission import admit, holds, schema_of
from bad_objects import BAD, BASE_OF, CLUSTER, POLICY, changed, id_of
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster
from kvpeer_operator.schema import CRDS, cluster_crd, policy_crd, render

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
CRD_OF = {"PeerCacheCluster": cluster_crd(), "P2PPolicy": policy_crd()}
MODEL_OF: dict[str, Any] = {"PeerCacheCluster": PeerCacheCluster, "P2PPolicy": P2PPolicy}


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


@pytest.mark.parametrize(
    ("base", "path", "value", "where", "words"), BAD, ids=[id_of(path, value) for _, path, value, *_ in BAD]
)
def test_a_bad_object_is_refused_with_its_path(base: str, path: str, value: Any, where: str, words: str) -> None:
    bad = changed(BASE_OF[base], path, value)
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
        admit(CRD_OF[old["kind"]], changed(old, path, value), old)


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
def test_a_default_satisfies_its_rules_before_its_fields_are_filled_in(kind: str) -> None:
    """So the API server judges it, and refuses the whole definition otherwise."""
    for path, part in _parts(schema_of(CRD_OF[kind]), ""):
        rules = [each["rule"] for each in part.get("x-kubernetes-validations", ()) if "oldSelf" not in each["rule"]]
        assert "default" not in part or all(holds(each, part["default"]) for each in rules), path


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
