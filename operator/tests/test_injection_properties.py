"""For any pod: injecting twice is injecting once, and what the user set is kept."""

from __future__ import annotations

import copy
from typing import Any

from golden_pods import apply, cluster, policy
from hypothesis import given
from hypothesis import strategies as st
from kvpeer_operator.injection import Patch, inject, skip_patch
from kvpeer_operator.injection.quality import quality_of

_NAMES = st.sampled_from(["a", "b", "engine", "proxy", "kvpeer-agent", "kvpeer-run"])
_AMOUNTS = st.sampled_from(["0", "500m", "1", "64Gi", "1000M"])
_RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        kind: st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu"]), _AMOUNTS)
        for kind in ("requests", "limits")
    },
)
_WORDS = st.lists(
    st.sampled_from(["vllm", "serve", "m", "--port", "8000", "-pp", "2", "--kv-transfer-config", "sh", "-c", "a b 'c"]),
    max_size=5,
)
_STARTS = st.sampled_from(
    [
        ["vllm", "serve"],
        ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        ["sh", "-c", 'exec vllm serve m; echo "$X"'],
        ["sglang", "serve", "--enable-hierarchical-cache"],
        [],
    ]
)
_PLAIN_VARIABLES = st.builds(
    lambda name, value: {"name": name, "value": value},
    st.sampled_from(["A", "PYTHONPATH", "KVPEER_CONNECTOR_MODE"]),
    st.text(max_size=5),
)
_REFERENCE = {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
_VARIABLES = st.lists(st.one_of(_PLAIN_VARIABLES, st.just(_REFERENCE)), max_size=3, unique_by=lambda each: each["name"])


@st.composite
def _containers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    images = ["vllm/vllm-openai:v0.32.0", "lmsysorg/sglang:v0.5.23", "nginx:1"]
    container: dict[str, Any] = {"name": name, "image": draw(st.sampled_from(images))}
    split = draw(st.integers(0, 3))
    words = [*draw(_STARTS), *draw(_WORDS)]
    for key, value in (("command", words[:split]), ("args", words[split:]), ("env", draw(_VARIABLES))):
        if value or draw(st.booleans()):
            container[key] = value
    if draw(st.booleans()):
        container["resources"] = draw(_RESOURCES)
    if draw(st.booleans()):
        container["volumeMounts"] = [{"name": "data", "mountPath": draw(st.sampled_from(["/data", "/opt/kvpeer"]))}]
    return container


@st.composite
def _pods(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    n_init = draw(st.integers(0, len(names) - 1))
    made = [draw(_containers(name)) for name in names]
    spec: dict[str, Any] = {"containers": made[n_init:], "terminationGracePeriodSeconds": 30}
    if n_init:
        spec["initContainers"] = made[:n_init]
    if draw(st.booleans()):
        spec["volumes"] = [{"name": name, "emptyDir": {}} for name in ("data", draw(_NAMES))]
    if draw(st.booleans()):
        spec["imagePullSecrets"] = [{"name": "own"}]
    metadata: dict[str, Any] = {"name": "p", "labels": {"kvpeer.io/cluster": "chat", "app": "x"}}
    if draw(st.booleans()):
        metadata["annotations"] = {"kvpeer.io/engine-version": "0.32.0", "mine": "kept"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@given(_pods())
def test_twice_is_once_and_what_the_user_set_is_kept(pod: dict[str, Any]) -> None:
    before = copy.deepcopy(pod)
    result = inject(pod, cluster(), policy())
    assert pod == before
    after = apply(pod, result if isinstance(result, Patch) else skip_patch(pod, result))
    second = inject(after, cluster(), policy())
    assert (second if isinstance(second, Patch) else skip_patch(after, second)) == Patch(())
    if not isinstance(result, Patch):
        assert after["spec"] == before["spec"]
        return
    assert quality_of(after["spec"]) is quality_of(before["spec"])
    _assert_kept(before, after)
    _assert_names_are_unique(after["spec"])


def _assert_kept(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["metadata"].get("annotations", {}).items() <= after["metadata"]["annotations"].items()
    assert {**before["metadata"]["labels"], "kvpeer.io/member": "chat"} == after["metadata"]["labels"]
    for key, value in before["spec"].items():
        if key == "containers":
            continue
        # Lists are only longer; everything else is as it was.
        assert (after["spec"][key][: len(value)] if isinstance(value, list) else after["spec"][key]) == value
    pairs = zip(before["spec"]["containers"], after["spec"]["containers"], strict=True)
    changed = [(old, new) for old, new in pairs if old != new]
    ((old, new),) = changed
    for key, value in old.items():
        if key in ("name", "image", "resources"):
            assert new[key] == value
    assert new["volumeMounts"][: len(old.get("volumeMounts", ()))] == old.get("volumeMounts", [])
    for own, now in zip(old.get("env", ()), new["env"], strict=False):
        assert now == own or (own["name"] == "PYTHONPATH" and now["value"].endswith(own["value"]))
    old_words = [word for key in ("command", "args") for word in old.get(key, ())]
    new_words = [word for key in ("command", "args") for word in new.get(key, ())]
    for word, now in zip(old_words, new_words, strict=False):
        assert now == word or ("vllm serve" in word and now.replace(_added(word, now), "", 1) == word)


def _assert_names_are_unique(spec: dict[str, Any]) -> None:
    """The API server refuses a pod in which they are not."""
    containers = [*spec["initContainers"], *spec["containers"]]
    for named in (containers, spec["volumes"], spec["imagePullSecrets"], *(each.get("env", []) for each in containers)):
        names = [each["name"] for each in named]
        assert len(names) == len(set(names))
    for container in containers:
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        assert len(paths) == len(set(paths))


def _added(word: str, now: str) -> str:
    """What stands in a script that did not stand there before."""
    start = word.index("vllm serve") + len("vllm serve")
    return now[start : start + len(now) - len(word)]
