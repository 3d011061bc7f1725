#!/usr/bin/env bash
# install.sh FOLDER: what the guest needs (Debian, as root): an emulator, RDMA libraries for the tests, and a kernel package that is
# unpacked in FOLDER and not installed.
set -euo pipefail
folder=$1

if [ "$(id -u)" != 0 ] || ! apt-cache show linux-image-amd64 >/dev/null 2>&1 && ! apt-get update -qq >/dev/null 2>&1; then
    echo "the small machine with RDMA devices needs root and Debian's packages on x86-64; without them, run the other targets that 'make help' lists" >&2
    exit 1
fi

missing=()
command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
[ -e /usr/include/infiniband/verbs.h ] || missing+=(libibverbs-dev)
ls /usr/lib/*/libibverbs/librxe-*.so >/dev/null 2>&1 || missing+=(ibverbs-providers)
command -v ib_read_bw >/dev/null || missing+=(perftest)
command -v rdma >/dev/null || missing+=(iproute2)
command -v depmod >/dev/null || missing+=(kmod)
command -v cpio >/dev/null || missing+=(cpio)
command -v xz >/dev/null || missing+=(xz-utils)
[ -x /bin/busybox ] || missing+=(busybox-static)
export DEBIAN_FRONTEND=noninteractive
if [ ${#missing[@]} -gt 0 ]; then
    echo "== installing ${missing[*]}"
    apt-get update -qq >/dev/null
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

rm -rf "$folder" && mkdir -p "$folder" && cd "$folder"
package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/ {print $2}')
if [ -z "$package" ]; then
    apt-get update -qq >/dev/null
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ {print $2}')
fi
apt-get -o APT::Sandbox::User=root download -qq "$package" >/dev/null
dpkg -x "$package"_*.deb kernel
rm "$package"_*.deb
depmod -b kernel "$(ls kernel/lib/modules)"
