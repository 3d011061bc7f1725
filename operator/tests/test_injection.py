"""What a pod gets, what is left alone and why; nothing of the user's is lost."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_pods import GOLDEN, PODS, TRIED, apply, cluster, outcome, policy
from kvpeer.agent.config import load
from kvpeer.engines.sglang.settings import load_settings as load_sglang
from kvpeer.engines.vllm.settings import load_settings as load_vllm
from kvpeer_operator.injection import Patch, Skip, SkipReason, inject, skip_patch
from kvpeer_operator.injection.quality import Quality, quality_of
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster

VLLM = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model", "m"]}
SGLANG = {
    "name": "sglang",
    "image": "lmsysorg/sglang:v0.5.23",
    "command": ["python3", "-m", "sglang.launch_server", "--enable-hierarchical-cache"],
}


def pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"generateName": "engine-", "labels": {"kvpeer.io/cluster": "chat"}}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": copy.deepcopy(list(containers)), **spec},
    }


def injected(given: dict[str, Any], of: PeerCacheCluster | None = None, by: P2PPolicy | None = None) -> dict[str, Any]:
    result = inject(given, of or cluster(), by or policy())
    assert isinstance(result, Patch), result
    return apply(given, result)


def _agent(given: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in given["spec"]["initContainers"] if each["name"] == "kvpeer-agent")


def _environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "10.0.0.7") for each in container["env"]}


# ---- pods of common charts


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_pods_of_common_charts_become_what_the_golden_files_say(path: Path) -> None:
    assert outcome(yaml.safe_load(path.read_text())) == (GOLDEN / path.name).read_text()


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_a_second_time_changes_nothing(path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    first = inject(given, cluster(), policy())
    after = apply(given, first if isinstance(first, Patch) else skip_patch(given, first))
    second = inject(after, cluster(), policy())
    assert (second if isinstance(second, Patch) else skip_patch(after, second)) == Patch(())


# ---- reasons

_SKIPS: dict[SkipReason, tuple[dict[str, Any], dict[str, Any]]] = {
    # reason -> pod, and what else differs from a ready cluster and a policy that is on
    SkipReason.NO_CLUSTER: (pod(VLLM), {"cluster": None}),
    SkipReason.NOT_SELECTED: (pod(VLLM), {"cluster": cluster(engineSelector={"matchLabels": {"app": "chat"}})}),
    SkipReason.IMAGES_NOT_READY: (pod(VLLM), {"cluster": cluster(status={})}),
    SkipReason.POD_SECURITY: (
        pod(VLLM),
        {"cluster": cluster(status={"conditions": [{**TRIED, "status": "False", "reason": "PodSecurity"}]})},
    ),
    SkipReason.QUOTA: (
        pod(VLLM | {"resources": {"requests": {"memory": "16Gi"}}}),
        {
            "budgets": [
                {
                    "kind": "ResourceQuota",
                    "metadata": {"name": "team"},
                    "status": {"hard": {"requests.memory": "100Gi"}, "used": {"requests.memory": "20Gi"}},
                }
            ]
        },
    ),
    SkipReason.UNKNOWN_ENGINE: (pod({"name": "a", "image": "nginx:1"}), {}),
    SkipReason.SEVERAL_ENGINES: (pod(VLLM, VLLM | {"name": "second"}), {}),
    SkipReason.COMMAND_OVERRIDE: (pod(VLLM | {"command": ["/start.sh"]}), {}),
    SkipReason.ENVIRONMENT_OVERRIDE: (pod(VLLM | {"env": [{"name": "KVPEER_SOCKET", "value": "/x"}]}), {}),
    SkipReason.CONFLICTING_KV_TRANSFER_CONFIG: (pod(VLLM | {"args": ["m", "--kv_transfer_config={}"]}), {}),
    SkipReason.CONFLICTING_HICACHE_BACKEND: (
        pod(SGLANG | {"args": ["--hicache-storage-backend", "mooncake"]}),
        {},
    ),
    SkipReason.HIERARCHICAL_CACHE_OFF: (pod(SGLANG | {"command": ["sglang", "serve", "m"]}), {}),
    SkipReason.UNSUPPORTED_OPTION: (pod(VLLM | {"args": ["m", "--pipeline-parallel-size", "2"]}), {}),
    SkipReason.UNKNOWN_VERSION: (pod(VLLM | {"image": "vllm/vllm-openai:latest"}), {}),
    SkipReason.UNSUPPORTED_VERSION: (pod(VLLM | {"image": "vllm/vllm-openai:v0.11.0"}), {}),
    SkipReason.HOST_NETWORK_PORT_CLASH: (pod(VLLM, hostNetwork=True), {}),
    SkipReason.PORT_CLASH: (pod(VLLM | {"ports": [{"containerPort": 7947}]}), {}),
    SkipReason.NAME_CLASH: (pod(VLLM, {"name": "kvpeer-agent", "image": "x"}), {}),
    SkipReason.POD_LEVEL_RESOURCES: (pod(VLLM, resources={"limits": {"memory": "1Gi"}}), {}),
    SkipReason.HUGEPAGES_IN_BEST_EFFORT: (pod(VLLM), {"cluster": cluster(pool={"hugepages": "2Mi"})}),
    SkipReason.POLICY_OFF: (pod(SGLANG), {"policy": None}),
    SkipReason.POLICY_NOT_FOR_ENGINE: (pod(SGLANG), {"policy": policy(roles=["Producer"])}),
}


@pytest.mark.parametrize("reason", SkipReason, ids=lambda reason: reason.value)
def test_each_reason_leaves_the_pod_alone_and_says_so(reason: SkipReason) -> None:
    given, differences = _SKIPS[reason]
    before = copy.deepcopy(given)
    arguments = {"cluster": cluster(), "policy": policy(), **differences}
    result = inject(given, arguments["cluster"], arguments["policy"], arguments.get("budgets", ()))
    assert isinstance(result, Skip)
    assert (result.reason, given) == (reason, before)
    assert len(result.message) > 20
    noted = apply(given, skip_patch(given, result))
    notes = {"kvpeer.io/skipped": reason.value, "kvpeer.io/skipped-because": result.message}
    assert noted["metadata"].pop("annotations") == notes
    assert noted == before


@pytest.mark.parametrize(
    ("image", "annotation", "reason"),
    [
        ("vllm/vllm-openai:v0.32.4", None, None),
        ("registry.example:5000/mirror/vllm/vllm-openai:v0.32.0-cu129", None, None),
        ("vllm/vllm-openai-cpu:0.32.0", None, None),
        ("vllm/vllm-openai:v0.320.0", None, SkipReason.UNSUPPORTED_VERSION),
        ("vllm/vllm-openai", None, SkipReason.UNKNOWN_VERSION),
        ("vllm/vllm-openai@sha256:0", None, SkipReason.UNKNOWN_VERSION),
        ("vllm/vllm-openai@sha256:0", "0.32.0", None),
        ("lmcache/vllm-openai:v0.32.0", None, SkipReason.UNKNOWN_VERSION),  # the tag is another project's version
        ("own/engine:7", "v0.32.1", None),
        ("own/engine:7", "newest", SkipReason.UNKNOWN_VERSION),
    ],
)
def test_the_version_is_that_of_a_known_image_or_of_the_annotation(
    image: str, annotation: str | None, reason: SkipReason | None
) -> None:
    notes = {"kvpeer.io/engine-version": annotation} if annotation else None
    engine = {"name": "engine", "image": image, "command": ["vllm", "serve", "m"]}
    result = inject(pod(engine, annotations=notes), cluster(), policy())
    assert (result.reason if isinstance(result, Skip) else None) == reason


def test_annotations_name_the_engine_where_nothing_else_does() -> None:
    own = {"name": "own", "image": "own/engine:7", "args": ["--model", "m"]}
    notes = {"kvpeer.io/engine": "vllm", "kvpeer.io/container": "own", "kvpeer.io/engine-version": "0.32.0"}
    after = injected(pod({"name": "proxy", "image": "envoy"}, own, annotations=notes))
    assert "--kv-transfer-config" in after["spec"]["containers"][1]["args"]
    assert after["spec"]["containers"][0] == {"name": "proxy", "image": "envoy"}


@pytest.mark.parametrize("folder", ["/run/kvpeer", "/opt/kvpeer"])
def test_a_mount_where_ours_would_be_is_a_clash(folder: str) -> None:
    result = inject(pod(VLLM | {"volumeMounts": [{"name": "data", "mountPath": folder}]}), cluster(), policy())
    assert isinstance(result, Skip)
    assert result.reason is SkipReason.NAME_CLASH
    assert folder in result.message


# ---- budgets of the namespace

_BURSTABLE = VLLM | {"resources": {"requests": {"memory": "16Gi"}}}


def _quota(**hard: str) -> dict[str, Any]:
    named = {key.replace("_", "."): value for key, value in hard.items()}
    return {"kind": "ResourceQuota", "metadata": {"name": "team"}, "status": {"hard": named}}


def _range(kind: str, **bounds: dict[str, str]) -> dict[str, Any]:
    return {"kind": "LimitRange", "metadata": {"name": "team"}, "spec": {"limits": [{"type": kind, **bounds}]}}


@pytest.mark.parametrize(
    ("budget", "is_refused"),
    [
        (_quota(requests_memory="81Gi"), False),  # 64Gi pool, 1Gi overhead, 16Gi engine
        (_quota(requests_memory="80Gi"), True),
        (_quota(memory="80Gi"), True),
        (_quota(limits_memory="64Gi"), True),
        (_quota(limits_cpu="100"), True),  # the agent has no limit of cpu, and the quota wants one of everybody
        (_quota(requests_cpu="500m"), True),
        (_quota(requests_cpu="8"), False),
        (_quota(pods="1", requests_storage="1Gi", **{"count/pods": "1"}), False),
        (_range("Container", max={"memory": "64Gi"}), True),
        (_range("Container", max={"memory": "65Gi"}), False),
        (_range("Container", max={"cpu": "4"}), True),
        (_range("Container", min={"memory": "256Mi"}), True),
        (_range("Pod", max={"memory": "64Gi"}), True),
        (_range("PersistentVolumeClaim", max={"storage": "1Gi"}), False),
    ],
)
def test_a_budget_without_room_is_a_reason_to_skip(budget: dict[str, Any], is_refused: bool) -> None:
    result = inject(pod(_BURSTABLE), cluster(), policy(), [budget])
    assert isinstance(result, Skip) == is_refused
    if isinstance(result, Skip):
        assert result.reason is SkipReason.QUOTA
        assert "team" in result.message


# ---- what agent and engine are told


def test_the_agent_understands_its_environment() -> None:
    """Judged by the agent's own settings: a renamed variable is an error there."""
    settings = load(None, _environment(_agent(injected(pod(VLLM)))))
    assert settings.agent.cluster == "chat"
    assert settings.agent.seeds == ("chat-kvpeer-agents.models.svc:7946",)
    assert (settings.agent.control_port, settings.agent.data_port, settings.metrics.port) == (7946, 7947, 7948)
    assert settings.pool.size_bytes == 64 << 30
    assert settings.security.mode == "shared_secret"
    assert settings.agent.socket == "/run/kvpeer/agent.sock"


@pytest.mark.parametrize("hugepages", ["2Mi", "1Gi"])
def test_huge_pages_are_requested_and_the_agent_can_use_them(hugepages: str) -> None:
    of = cluster(pool={"size": "65Gi", "hugepages": hugepages}, security={"mode": "Insecure"})
    agent = _agent(injected(pod(_BURSTABLE), of))
    assert load(None, _environment(agent)).pool.hugepages == hugepages
    assert agent["resources"]["limits"] == {"memory": "1Gi", f"hugepages-{hugepages}": "65Gi"}


def test_without_security_no_secret_is_mounted() -> None:
    after = injected(pod(VLLM), cluster(security={"mode": "Insecure"}))
    assert load(None, _environment(_agent(after))).security.mode == "insecure"
    assert "secret" not in json.dumps(after["spec"]["volumes"])


@pytest.mark.parametrize(
    ("by", "mode", "publish"),
    [
        (None, "off", True),
        (policy(), "on", True),
        (policy(mode="Off"), "off", True),
        (policy(roles=["Producer"]), "off", True),
        (policy(roles=["Consumer"]), "on", False),
    ],
)
def test_a_vllm_engine_understands_the_policy(by: P2PPolicy | None, mode: str, publish: bool) -> None:
    result = inject(pod(VLLM), cluster(), by)
    assert isinstance(result, Patch)
    (engine,) = apply(pod(VLLM), result)["spec"]["containers"]
    settings = load_vllm({}, _environment(engine))
    assert (settings.mode, settings.publish, settings.load_timeout_s) == (mode, publish, 2.0)
    assert settings.min_cached_token_delta == 512


def test_an_sglang_engine_understands_the_policy() -> None:
    (engine,) = injected(pod(SGLANG), by=policy(maxPullWait="1500ms"))["spec"]["containers"]
    assert load_sglang({}, _environment(engine)).get_timeout_max_s == 1.5


def test_settings_of_the_pod_win_over_the_policy() -> None:
    own = {"name": "KVPEER_CONNECTOR_MODE", "value": "off"}
    (engine,) = injected(pod(VLLM | {"env": [own]}))["spec"]["containers"]
    assert [each for each in engine["env"] if each["name"] == own["name"]] == [own]


# ---- the agent can neither stop nor evict the engine


def test_nothing_waits_for_the_agent() -> None:
    agent = _agent(injected(pod(VLLM)))
    assert agent["restartPolicy"] == "Always"
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & agent.keys()


def test_what_the_agent_mounts_is_optional_and_the_engine_cannot_read_the_secret() -> None:
    after = injected(pod(VLLM))
    (secret,) = [each["secret"] for each in after["spec"]["volumes"] if "secret" in each]
    assert secret["optional"] is True
    assert secret["defaultMode"] & 0o007 == 0
    (engine,) = after["spec"]["containers"]
    assert {each["name"] for each in engine["volumeMounts"]} == {"kvpeer-run", "kvpeer-payload"}
    assert all(each["readOnly"] for each in engine["volumeMounts"])


def test_the_container_runs_on_when_the_agent_ends_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """Or the pod would not be ready as long as the agent does not run."""
    script = _agent(injected(pod(VLLM)))["command"][2]
    log = tmp_path / "log"
    # The third one stays, and ends a little after it was told to.
    stays = f"trap 'sleep 0.2; echo over >> {log}; exit 0' TERM; echo up >> {log}; while :; do sleep 0.05; done"
    _stub(tmp_path / "kvpeer", f'echo "$1" >> {log}; [ $(grep -c agent {log}) -lt 3 ] || {{ {stays}; }}')
    _stub(tmp_path / "sleep", f'[ "$1" != 10 ] && exec /bin/sleep "$1"; echo "slept $1" >> {log}')
    container = subprocess.Popen(["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    try:
        end = time.monotonic() + 10
        while not (log.exists() and "up" in log.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        container.terminate()
        container.wait(10)
    finally:
        container.kill()
    assert log.read_text().split("\n") == ["agent", "slept 10", "agent", "slept 10", "agent", "up", "over", ""]


def _stub(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_both_containers_are_fit_for_the_restricted_standard() -> None:
    for each in injected(pod(VLLM))["spec"]["initContainers"]:
        context = each["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("resources", "quality"),
    [
        ({}, Quality.BEST_EFFORT),
        ({"limits": {"nvidia.com/gpu": "1"}}, Quality.BEST_EFFORT),
        ({"requests": {"cpu": "1"}}, Quality.BURSTABLE),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}, Quality.BURSTABLE),
        ({"limits": {"cpu": "2", "memory": "1Gi"}}, Quality.GUARANTEED),
        (
            {"requests": {"cpu": "2000m", "memory": "1024Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
            Quality.GUARANTEED,
        ),
    ],
)
def test_the_quality_of_service_is_kept(resources: dict[str, Any], quality: Quality) -> None:
    given = pod(VLLM | {"resources": resources})
    assert quality_of(given["spec"]) is quality
    assert quality_of(injected(given)["spec"]) is quality
