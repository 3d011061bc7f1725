"""A node: namespaces of its own, in which containerd, the kubelet and kube-proxy run at the paths that they expect.

Its first process is a shell that waits. When that is killed, the kernel ends every process of the node and takes its
mounts and its pods' networks away: a power cut.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.addresses import DNS_ADDRESS, PODS_RANGE, node_address, node_name, pods_range
from cluster.binaries import binary
from cluster.cgroups import cgroup_root, freeze_cgroup, make_cgroups, remove_cgroups
from cluster.folders import state_folder
from cluster.keys import key_file, kubeconfig
from cluster.network import within
from cluster.processes import await_true, forget, log, run, running, start, stop

__all__ = [
    "PAUSE_IMAGE",
    "cut_power",
    "enter",
    "freeze",
    "import_image",
    "proxy_words",
    "start_containerd",
    "start_kubelet",
    "start_node",
]

PAUSE_IMAGE = "localhost/pause:1"

_CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
_BOOTED = b"containerd successfully booted"
_BOOT_DEADLINE_S = 60.0
_INIT_DEADLINE_S = 10.0

_MOUNTS = {
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "cni": "/etc/cni/net.d",
    "pod-logs": "/var/log/pods",
    "container-logs": "/var/log/containers",
    "networks": "/var/lib/cni",
}
"""The node's own folders, and where its programs look for them."""

_KEPT = ("containerd",)
"""What a node that comes up again still has: its images."""

_INIT = """\
set -e
hostname "$2"
mount -t tmpfs tmpfs /run
while read -r own usual; do mkdir -p "$1/$own" "$usual"; mount --bind "$1/$own" "$usual"; done < "$1/mounts"
mount --make-rshared /
touch "$1/is-up"
while :; do sleep 86400 & wait $!; done
"""

_CONTAINERD = f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{_CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  # Without the capability to lower it, which not every machine gives to root, runc could start nothing.
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
"""


def start_node(number: int) -> None:
    """Makes the node's namespaces and starts containerd in them. Its network has to be there."""
    name, folder = node_name(number), _folder(number)
    for each in _MOUNTS:
        (folder / each).mkdir(parents=True, exist_ok=True)
    (folder / "mounts").write_text("".join(f"{own} {usual}\n" for own, usual in _MOUNTS.items()))
    (folder / "cni" / "10-kvpeer.conflist").write_text(json.dumps(_network_plugins(number), indent=1))
    (folder / "containerd.toml").write_text(_CONTAINERD)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (folder / "kubelet.json").write_text(json.dumps(_kubelet_settings(number), indent=1))
    (folder / "is-up").unlink(missing_ok=True)
    make_cgroups(name)
    apart = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--uts", "--ipc"]
    start(f"{name}-init", "bash", "-c", _INIT, "node", folder, name, within=[*within(name), *apart], has_child=True)
    await_true((folder / "is-up").exists, f"{name} is up", _INIT_DEADLINE_S)
    start_containerd(number)


def start_containerd(number: int) -> None:
    """Returns when its API for kubelets answers: a kubelet that comes before that ends."""
    name, file = f"{node_name(number)}-containerd", log(f"{node_name(number)}-containerd")
    written = file.stat().st_size if file.exists() else 0
    program = binary("containerd")
    start(name, program, "-c", _folder(number) / "containerd.toml", within=enter(number), path=[program.parent],
          has_child=True)  # fmt: skip
    await_true(lambda: _BOOTED in file.read_bytes()[written:], f"{name} has booted", _BOOT_DEADLINE_S)


def start_kubelet(number: int) -> None:
    """Starts the kubelet and kube-proxy: the node joins."""
    name = node_name(number)
    settings: list[str | Path] = ["--config", _folder(number) / "kubelet.json", "--kubeconfig", kubeconfig(name)]
    identity = ["--hostname-override", name, "--node-ip", node_address(number)]
    labels = ["--node-labels", f"topology.kubernetes.io/zone=z{number}"]
    start(f"{name}-kubelet", binary("kubelet"), *settings, *identity, *labels, within=enter(number), has_child=True)
    start(f"{name}-proxy", *proxy_words(name, name), within=enter(number), has_child=True)


def proxy_words(place: str, host: str) -> Sequence[str | Path]:
    """The command of a kube-proxy. host: a node's name; for one that the API does not know it waits half a minute."""
    file = state_folder() / f"proxy-{place}.json"
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": host,
        "clientConnection": {"kubeconfig": str(kubeconfig("proxy"))},
        "clusterCIDR": PODS_RANGE,
        # Those are the machine's, and not a namespace's to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "oomScoreAdj": 0,
    }
    file.write_text(json.dumps(settings, indent=1))
    return [binary("kube-proxy"), "--config", file]


def cut_power(number: int) -> None:
    """All that runs on the node is gone, at once and unasked. Its images stay; the rest of its disk does not."""
    name = node_name(number)
    stop(f"{name}-init", signal.SIGKILL)
    for part in ("containerd", "kubelet", "proxy"):
        forget(f"{name}-{part}")
    remove_cgroups(name)
    for each in _MOUNTS:
        if each not in _KEPT:
            run("rm", "-rf", "--one-file-system", _folder(number) / each)


def freeze(number: int, *, is_frozen: bool) -> None:
    """Nothing of the node answers and no connection breaks, as when its kernel hangs; or it goes on as if nothing had
    been. Of its programs and of all that runs in its pods."""
    name = node_name(number)
    pids = [running(f"{name}-{part}") for part in ("kubelet", "proxy", "containerd")]
    freeze_cgroup(name, filter(None, pids), is_frozen=is_frozen)


def enter(number: int) -> list[str]:
    """Words before a command that bring it into the node. Raises RuntimeError if the node has no power."""
    pid = running(f"{node_name(number)}-init")
    if pid is None:
        raise RuntimeError(f"{node_name(number)} is off")
    return ["nsenter", "-t", str(pid), "-m", "-n", "-p", "-u", "-i", "--"]


def import_image(number: int, archive: Path) -> None:
    """The node has the images of a docker or OCI archive. Does nothing if it has had this very file."""
    stamp = _folder(number) / "containerd" / f".has-{archive.name}"
    made = str(archive.stat().st_mtime_ns)
    if not stamp.exists() or stamp.read_text() != made:
        run(*enter(number), binary("ctr"), "-a", _CONTAINERD_SOCKET, "-n", "k8s.io", "images", "import", archive)
        stamp.write_text(made)


def _folder(number: int) -> Path:
    return state_folder() / "nodes" / node_name(number)


def _network_plugins(number: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": pods_range(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "/run/cni-addresses",
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "kvpeer", "plugins": [{**bridge, "ipam": addresses}, ports]}


def _kubelet_settings(number: int) -> dict[str, Any]:
    name = node_name(number)
    certificates = {"clientCAFile": str(key_file("ca.crt"))}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": certificates},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(key_file(f"{name}-serving.crt")),
        "tlsPrivateKeyFile": str(key_file(f"{name}-serving.key")),
        "containerRuntimeEndpoint": f"unix://{_CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root(name),
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(_folder(number) / "resolv.conf"),
        # All nodes have the machine's disk and memory: each thinks them its own.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "maxPods": 200,
        # A lost node is noticed in seconds, and tests do not wait for minutes.
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s",
    }
