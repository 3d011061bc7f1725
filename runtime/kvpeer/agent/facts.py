"""What the host and the container allow this process, tried where nothing tells it."""

from __future__ import annotations

import fcntl
import os
import resource

from kvpeer.agent.memory import available_bytes, limit_bytes
from kvpeer.agent.numa import refused_calls
from kvpeer.agent.sysfs import Tree
from kvpeer.core.topology import HostFacts

__all__ = ["read_facts"]

_IPC_LOCK = 1 << 14
_SHM = "/dev/shm"  # noqa: S108 - its size is looked at, nothing is put there
_HUGEPAGES = "sys/kernel/mm/hugepages"
_SECCOMP = {"0": "off", "1": "strict", "2": "filter"}


def read_facts() -> HostFacts:
    """The facts of this process's host and container. Blocks for a millisecond; changes nothing."""
    tree = Tree()
    status = dict(tree.fields("proc/self/status"))
    memlock_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        memlock_bytes=None if memlock_bytes == resource.RLIM_INFINITY else memlock_bytes,
        has_ipc_lock=bool(int(status.get("CapEff", "0"), 16) & _IPC_LOCK),
        memory_bytes=limit_bytes(),
        memory_left_bytes=available_bytes(),
        shm_bytes=_shm_bytes(),
        is_memfd_sealable=_is_memfd_sealable(),
        refused=refused_calls(),
        hugepages=tuple(_hugepages(tree)),
        seccomp=_SECCOMP.get(status.get("Seccomp", ""), "unknown"),
    )


def _shm_bytes() -> int | None:
    try:
        statistics = os.statvfs(_SHM)
    except OSError:
        return None
    return statistics.f_blocks * statistics.f_frsize


def _is_memfd_sealable() -> bool:
    """As the pool's files are made and sealed."""
    try:
        fd = os.memfd_create("kvpeer-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _hugepages(tree: Tree) -> list[tuple[int, int]]:
    """Reserved ones by size in bytes, in order."""
    found = []
    for name in tree.names(_HUGEPAGES):
        kilobytes = name.removeprefix("hugepages-").removesuffix("kB")
        n_reserved = tree.number(f"{_HUGEPAGES}/{name}/nr_hugepages")
        if kilobytes.isdecimal() and n_reserved is not None:
            found.append((int(kilobytes) * 1024, n_reserved))
    return sorted(found)
