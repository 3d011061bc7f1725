#!/usr/bin/env bash
# install.sh: what a cluster on this machine needs (Debian, as root), beside Go: an OCI runtime, CNI plugins, and what makes images.
set -euo pipefail

sentence="a Kubernetes on this machine needs root, namespaces and cgroups v1; without them, run the other targets that 'make help' lists"
if [ "$(id -u)" != 0 ] || [ -e /sys/fs/cgroup/cgroup.controllers ] || ! unshare --mount --net --pid --uts --ipc --fork true 2>/dev/null; then
    echo "$sentence" >&2
    exit 1
fi

missing=()
command -v runc >/dev/null || missing+=(runc)
[ -e /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
command -v iptables >/dev/null || missing+=(iptables)
command -v nft >/dev/null || missing+=(nftables)
command -v conntrack >/dev/null || missing+=(conntrack)
command -v ip >/dev/null || missing+=(iproute2)
command -v buildah >/dev/null || missing+=(buildah)
command -v debootstrap >/dev/null || missing+=(debootstrap)
if [ ${#missing[@]} -gt 0 ]; then
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >/dev/null
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
