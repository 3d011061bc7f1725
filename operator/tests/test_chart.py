"""What the chart installs, rendered by a real helm (`make chart-test`). Golden files in chart/; write them anew with
`PYTHONPATH=operator:operator/tests python -m test_chart` and read the difference."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvpeer_operator import main, reconciler
from kvpeer_operator.injection.names import CLUSTER_LABEL
from kvpeer_operator.injection.quality import Quality
from kvpeer_operator.injection.sidecar import agent_container
from kvpeer_operator.models import PeerCacheCluster
from kvpeer_operator.reconciler import Reconciler, admit_pod
from store import KEY, SECRET, TIME, Store, cluster_object, pod_object, policy_object

pytestmark = pytest.mark.chart

HERE = Path(__file__).parent / "chart"
ROOT = HERE.parents[2]
CHART = ROOT / "helm" / "kvpeer"
NAMES = sorted(path.name.partition(".")[0] for path in HERE.glob("*.values.yaml"))


def _helm() -> str:
    found = os.environ.get("KVPEER_TEST_HELM") or shutil.which("helm") or str(ROOT / "build" / "bin" / "helm")
    assert Path(found).exists(), "there is no helm: run  make chart-test  (it builds one)"
    return found


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [_helm(), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}  # nobody's kubeconfig or plugins
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)


def rendered(*arguments: str, release: str = "kvpeer") -> list[dict[str, Any]]:
    """The objects that would be installed."""
    run = _run("template", release, str(CHART), "--namespace", "kvpeer-system", "--kube-version", "1.34.0", *arguments)
    assert run.returncode == 0, run.stderr
    return [each for each in yaml.safe_load_all(run.stdout) if each]


def golden(name: str) -> str:
    """The objects for one set of values, without those whose content is compared with its source."""
    objects = rendered("--values", str(HERE / f"{name}.values.yaml"))
    kept = [each for each in objects if each["kind"] not in _FROM_FILES]
    return yaml.safe_dump_all(kept, sort_keys=False, width=120)


_FROM_FILES = ("CustomResourceDefinition", "PrometheusRule", "ConfigMap")


def _one(objects: list[dict[str, Any]], kind: str, name: str = "kvpeer") -> dict[str, Any]:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_gives_what_the_golden_files_say(name: str) -> None:
    assert golden(name) == (HERE / f"{name}.golden.yaml").read_text()


def test_the_definitions_are_those_of_the_models_and_are_kept() -> None:
    objects = {each["metadata"]["name"]: each for each in rendered() if each["kind"] == "CustomResourceDefinition"}
    for path in (ROOT / "crds").glob("*.yaml"):
        assert (CHART / "files" / path.name).read_text() == path.read_text(), "run: make crds"
        definition = yaml.safe_load(path.read_text())
        installed = objects.pop(definition["metadata"]["name"])
        assert installed["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert installed["spec"] == definition["spec"]
    assert objects == {}


def test_the_webhook_sees_only_pods_that_opted_in_and_breaks_none() -> None:
    objects = rendered()
    (hook,) = _one(objects, "MutatingWebhookConfiguration", "kvpeer-injection")["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    assert hook["timeoutSeconds"] == 5
    assert (hook["sideEffects"], hook["reinvocationPolicy"]) == ("None", "Never")
    assert hook["objectSelector"]["matchExpressions"] == [{"key": CLUSTER_LABEL, "operator": "Exists"}]
    (excluded,) = hook["namespaceSelector"]["matchExpressions"]
    assert {"kube-system", "kvpeer-system"} <= set(excluded["values"])
    assert "caBundle" not in hook["clientConfig"]  # an upgrade must not overwrite what the operator wrote
    service = _one(objects, "Service", hook["clientConfig"]["service"]["name"])
    (port,) = service["spec"]["ports"]
    container = _one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    (target,) = [each for each in container["ports"] if each["name"] == port["targetPort"]]
    assert target["containerPort"] == main.WEBHOOK_PORT
    assert service["spec"]["selector"].items() <= (
        _one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize("release", ["kvpeer", "prod", "a-release-with-a-name-that-is-too-long-for-objects"])
def test_the_operator_finds_what_helm_named(release: str) -> None:
    objects = rendered(release=release)
    container = _one(objects, "Deployment", _name(objects))["spec"]["template"]["spec"]["containers"][0]
    told = {each["name"]: each.get("value") for each in container["env"]}["KVPEER_OPERATOR_RELEASE"]
    for kind, suffix in (("Secret", "webhook-certificate"), ("Service", "webhook")):
        assert _one(objects, kind, f"{told}-{suffix}")
    assert _one(objects, "MutatingWebhookConfiguration", f"{told}-injection")
    assert all(len(each["metadata"]["name"]) <= 63 for each in objects)


def _name(objects: list[dict[str, Any]]) -> str:
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    return str(deployment["metadata"]["name"])


def test_the_operator_runs_without_privileges() -> None:
    spec = _one(rendered(), "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_helm_finds_nothing_to_complain_of() -> None:
    """It renders the notes, too, which `helm template` leaves out."""
    run = _run("lint", "--strict", str(CHART), "--kube-version", "1.34.0")
    assert run.returncode == 0, run.stdout


# ---- monitoring


def _monitored() -> list[dict[str, Any]]:
    return rendered("--values", str(HERE / "monitored.values.yaml"))


def test_dashboards_and_rules_are_those_of_the_project() -> None:
    objects = _monitored()
    maps = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ConfigMap"}
    shown = {name: text for each in maps.values() for name, text in each["data"].items()}
    files = {path.name: path.read_text().strip() for path in (CHART / "files" / "dashboards").iterdir()}
    assert shown == files
    for name, each in maps.items():
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "kvpeer"}
        assert len(name) <= 63
    rules = {each["metadata"]["name"]: each for each in objects if each["kind"] == "PrometheusRule"}
    for path in (ROOT / "dashboards" / "rules").glob("*.yaml"):
        installed = rules.pop(f"kvpeer-{path.stem}")
        assert installed["spec"] == yaml.safe_load(path.read_text())
        assert installed["metadata"]["labels"]["release"] == "prometheus"
    assert rules == {}


def test_prometheus_finds_the_ports_that_operator_and_agents_have() -> None:
    objects = _monitored()
    (endpoint,) = _one(objects, "ServiceMonitor", "kvpeer-operator")["spec"]["endpoints"]
    service = _one(objects, "Service", "kvpeer-metrics")
    (port,) = [each for each in service["spec"]["ports"] if each["name"] == endpoint["port"]]
    (container,) = _one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    (target,) = [each for each in container["ports"] if each["name"] == port["targetPort"]]
    assert target["containerPort"] == main.METRICS_PORT
    assert {"port": "metrics", "protocol": "TCP"} in _one(objects, "NetworkPolicy")["spec"]["ingress"][0]["ports"]

    monitor = _one(objects, "PodMonitor", "kvpeer-agents")["spec"]
    agent = agent_container(PeerCacheCluster.model_validate(cluster_object()), Quality.BURSTABLE)
    (pod_endpoint,) = monitor["podMetricsEndpoints"]
    assert pod_endpoint["port"] in {each["name"] for each in agent["ports"]}
    assert monitor["selector"]["matchExpressions"] == [{"key": CLUSTER_LABEL, "operator": "Exists"}]


def test_without_being_asked_nothing_needs_the_prometheus_operator() -> None:
    kinds = {each["kind"] for each in rendered()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}


# ---- rights


class Recorder(Store):
    """Notes what an API server would be asked whether it is allowed."""

    def __init__(self, *objects: Any) -> None:
        super().__init__(*objects)
        self.asked: set[tuple[str, str]] = set()

    def get(self, kind: str, namespace: str, name: str) -> Any:
        self._ask(kind, "get")
        return super().get(kind, namespace, name)

    def list(self, kind: str, namespace: str, labels: str = "") -> Any:
        self._ask(kind, "list")
        return super().list(kind, namespace, labels)

    def apply(self, obj: Any) -> None:
        # Server-side apply of what is not there is a creation, too.
        self._ask(obj["kind"], "patch", "create")
        super().apply(obj)

    def create(self, obj: Any) -> None:
        self._ask(obj["kind"], "create")
        super().create(obj)

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self._ask(kind, "delete")
        super().delete(kind, namespace, name, uid)

    def apply_status(self, obj: Any) -> None:
        self.asked.add((f"{_RESOURCES[obj['kind']]}/status", "patch"))
        super().apply_status(obj)

    def _ask(self, kind: str, *verbs: str) -> None:
        self.asked |= {(_RESOURCES[kind], verb) for verb in verbs}


_RESOURCES = {
    "LimitRange": "limitranges",
    "P2PPolicy": "p2ppolicies",
    "PeerCacheCluster": "peercacheclusters",
    "Pod": "pods",
    "ResourceQuota": "resourcequotas",
    "Secret": "secrets",
    "Service": "services",
}
_WATCHED = ("peercacheclusters", "p2ppolicies", "pods")
_OF_OWNER_REFERENCES = {("peercacheclusters/finalizers", "update")}


def test_the_rights_are_those_that_are_used() -> None:
    store = Recorder(cluster_object(), policy_object())
    operator: reconciler.Api = store
    for _ in range(6):
        Reconciler(operator, lambda words: [True] * len(words)).look(KEY, 0.0, TIME, SECRET)
        trial = store.objects.get(("Pod", "chat-kvpeer-trial"))
        if trial:
            trial["status"] = {"phase": "Succeeded"}
    admit_pod(operator, pod_object(), "models")
    used = store.asked | {(resource, verb) for resource in _WATCHED for verb in ("list", "watch")}
    given = {
        (resource, verb)
        for rule in _one(rendered(), "ClusterRole")["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert given == used | _OF_OWNER_REFERENCES


def test_the_test_is_there_for_two_engines_and_is_no_part_of_the_webhook_service() -> None:
    assert not [each for each in rendered() if each["kind"] == "Pod"]
    objects = rendered("--set", "test.engines={http://a:8000,http://b:8000}")
    (pod,) = [each for each in objects if each["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["containers"][0]["args"] == ["http://a:8000", "http://b:8000"]
    selector = _one(objects, "Service", "kvpeer-webhook")["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items()


def test_with_namespaces_given_it_has_no_rights_elsewhere() -> None:
    objects = rendered("--values", str(HERE / "namespaced.values.yaml"))
    bindings = [each for each in objects if each["kind"] == "ClusterRoleBinding"]
    assert [each["metadata"]["name"] for each in bindings] == ["kvpeer-webhook"]
    served = {each["metadata"]["namespace"] for each in objects if each["kind"] == "RoleBinding"}
    assert served == {"team-chat", "team-code", "kvpeer-system"}


# ---- values


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("replicas=0", "replicas"),
        ("replicas=two", "replicas"),
        ("replica=2", "replica"),
        ("image.repository=", "image"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("namespaces={Team}", "namespaces"),
        ("namespaces=team", "namespaces"),
        ("crds.instal=false", "crds"),
        ("networkPolicy.enabled=maybe", "networkPolicy"),
        ("monitoring.scrape.interval=often", "interval"),
        ("monitoring.dashboard.enabled=true", "dashboard"),
        ("test.engines={http://a:8000}", "engines"),
        ("test.engines={a,b}", "engines"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(value: str, where: str) -> None:
    run = _run("template", "kvpeer", str(CHART), "--kube-version", "1.34.0", "--set", value)
    assert run.returncode != 0
    assert where in run.stderr


def test_an_older_kubernetes_is_refused() -> None:
    """Its API server would drop the restartPolicy of native sidecars, and engines would wait for the agent to end."""
    run = _run("template", "kvpeer", str(CHART), "--kube-version", "1.28.9")
    assert run.returncode != 0
    assert "1.29" in run.stderr


def write_golden() -> None:
    """Writes the golden files."""
    for name in NAMES:
        (HERE / f"{name}.golden.yaml").write_text(golden(name))


if __name__ == "__main__":
    write_golden()
