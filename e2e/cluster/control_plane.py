"""The control plane: plain processes of the host, at its end of the link to the router."""

from __future__ import annotations

import json
import ssl
import urllib.request

from cluster.addresses import (
    API_ADDRESS,
    API_PORT,
    API_URL,
    DNS_ADDRESS,
    ROUTER,
    SERVICES_RANGE,
    node_name,
)
from cluster.binaries import binary
from cluster.folders import state_folder
from cluster.keys import ADMIN, key_file, kubeconfig
from cluster.network import within
from cluster.nodes import proxy_words
from cluster.processes import await_true, run, start

__all__ = ["AUDIT_LOG", "await_api", "kubectl", "start_api", "start_controllers", "start_names"]

ETCD_URL = "http://127.0.0.1:23790"
_ETCD_PEER_URL = "http://127.0.0.1:23800"
_API_DEADLINE_S = 120.0
_PROBE_DEADLINE_S = 2.0

AUDIT_LOG = "audit.log"
"""In the state folder: what service accounts asked the API server for, one JSON object a line."""

_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
    ],
}

# Two blocks: in one, `template` would come before `kubernetes`, whatever the order here, and answer everything.
_COREDNS = """\
cluster.local:53 in-addr.arpa:53 {{
  bind {address}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
    ttl 0
  }}
  loadbalance
}}
.:53 {{
  bind {address}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""


def kubectl(*words: str, text: str | None = None) -> str:
    """What kubectl printed, as the administrator. Raises RuntimeError with what it said when it failed."""
    return run(binary("kubectl"), "--kubeconfig", kubeconfig(ADMIN), *words, text=text)


def start_api() -> None:
    """Starts etcd, empty, and the API server; does not wait for them."""
    state = state_folder()
    run("rm", "-rf", state / "etcd")
    (state / AUDIT_LOG).unlink(missing_ok=True)
    (state / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
    clients = [f"--listen-client-urls={ETCD_URL}", f"--advertise-client-urls={ETCD_URL}"]
    peers = [f"--listen-peer-urls={_ETCD_PEER_URL}", "--log-level=warn", "--unsafe-no-fsync"]
    start("etcd", binary("etcd"), f"--data-dir={state / 'etcd'}", *clients, *peers)
    start(
        "apiserver",
        binary("kube-apiserver"),
        f"--etcd-servers={ETCD_URL}",
        f"--bind-address={API_ADDRESS}",
        f"--advertise-address={API_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={key_file('apiserver.crt')}",
        f"--tls-private-key-file={key_file('apiserver.key')}",
        f"--client-ca-file={key_file('ca.crt')}",
        f"--service-account-key-file={key_file('accounts.pub')}",
        f"--service-account-signing-key-file={key_file('accounts.key')}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-cluster-ip-range={SERVICES_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={key_file('apiserver-kubelet.crt')}",
        f"--kubelet-client-key={key_file('apiserver-kubelet.key')}",
        f"--kubelet-certificate-authority={key_file('ca.crt')}",
        "--kubelet-preferred-address-types=InternalIP",
        # Webhooks are called at their pods: the address of a Service would have to be the API server's own business.
        "--enable-aggregator-routing=true",
        f"--audit-policy-file={state / 'audit-policy.json'}",
        f"--audit-log-path={state / AUDIT_LOG}",
    )


def await_api() -> None:
    """Returns when the API server says that it is ready."""
    trust = ssl.create_default_context(cafile=str(key_file("ca.crt")))
    trust.load_cert_chain(key_file(f"{ADMIN}.crt"), key_file(f"{ADMIN}.key"))

    def is_ready() -> bool:
        with urllib.request.urlopen(f"{API_URL}/readyz", context=trust, timeout=_PROBE_DEADLINE_S) as answer:  # noqa: S310
            return bool(answer.read() == b"ok")

    await_true(is_ready, "the API server is ready", _API_DEADLINE_S)


def start_controllers() -> None:
    """Starts the controller manager and the scheduler. A lost node is noticed after 8 s."""
    start(
        "controller-manager",
        binary("kube-controller-manager"),
        f"--kubeconfig={kubeconfig('controller-manager')}",
        f"--service-account-private-key-file={key_file('accounts.key')}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        f"--root-ca-file={key_file('ca.crt')}",
        "--bind-address=127.0.0.1",
        "--node-monitor-period=1s",
        "--node-monitor-grace-period=8s",
    )
    account = f"--kubeconfig={kubeconfig('scheduler')}"
    start("scheduler", binary("kube-scheduler"), account, "--leader-elect=false", "--bind-address=127.0.0.1")


def start_names() -> None:
    """Starts the name server and the router's kube-proxy, and tells the API of both."""
    file = state_folder() / "Corefile"
    file.write_text(_COREDNS.format(address=API_ADDRESS, kubeconfig=kubeconfig("coredns")))
    start("coredns", binary("coredns"), "-conf", file)
    start("router-proxy", *proxy_words(ROUTER, node_name(1)), within=within(ROUTER))
    kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": _name_objects()}))


def _name_objects() -> list[dict[str, object]]:
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    place = {"name": "kube-dns", "namespace": "kube-system"}
    proxies = {"kind": "User", "name": "system:kube-proxy", "apiGroup": "rbac.authorization.k8s.io"}
    role = {"kind": "ClusterRole", "name": "system:node-proxier", "apiGroup": "rbac.authorization.k8s.io"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": place,
            "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**place, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [API_ADDRESS], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "kube-proxy"},
            "roleRef": role,
            "subjects": [proxies],
        },
    ]
