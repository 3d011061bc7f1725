"""How much memory this process may still take before its container or host runs out."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes", "limit_bytes"]


def available_bytes(root: Path = Path("/")) -> int | None:
    """The smaller of what the container's limit and the host leave; None where neither can be read.

    Page cache that the kernel would drop under pressure counts as available, as it does for the kubelet. Works with
    cgroup v2 and v1; `root` is there for tests. Reads a few small files: not for a hot path.
    """
    groups = root / "sys/fs/cgroup"
    candidates = (
        _left(groups, "memory.max", "memory.current", "inactive_file"),
        _left(groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        _host_bytes(root / "proc/meminfo", "MemAvailable:"),
    )
    return min((left for left in candidates if left is not None), default=None)


def limit_bytes(root: Path = Path("/")) -> int | None:
    """The smaller of the container's limit and the host's memory; None where neither can be read."""
    groups = root / "sys/fs/cgroup"
    limits = (_limit(groups / "memory.max"), _limit(groups / "memory/memory.limit_in_bytes"))
    candidates = (*limits, _host_bytes(root / "proc/meminfo", "MemTotal:"))
    return min((limit for limit in candidates if limit is not None), default=None)


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _left(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    try:
        limit, usage = (group / limit_name).read_text().strip(), (group / usage_name).read_text().strip()
        statistics = (group / "memory.stat").read_text()
    except OSError:
        return None
    if not (limit.isdecimal() and usage.isdecimal()):  # "max": no limit
        return None
    reclaimable_bytes = _field(statistics, reclaimable_name) or 0
    return max(0, int(limit) - max(0, int(usage) - reclaimable_bytes))


def _host_bytes(meminfo: Path, name: str) -> int | None:
    try:
        kilobytes = _field(meminfo.read_text(), name)
    except OSError:
        return None
    return None if kilobytes is None else kilobytes * 1024


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
