from __future__ import annotations

from pathlib import Path

from kvpeer.agent.memory import available_bytes, limit_bytes

MiB = 1 << 20


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group(root: Path, folder: str, names: tuple[str, str], limit: str, usage_mib: int, stat: str) -> None:
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(limit + "\n")
    (path / names[1]).write_text(f"{usage_mib * MiB}\n")
    (path / "memory.stat").write_text(stat)


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_the_limit_of_the_container_counts_without_its_reclaimable_cache(tmp_path: Path) -> None:
    group(tmp_path, ".", V2, str(1000 * MiB), 900, f"anon 1\ninactive_file {300 * MiB}\n")
    assert available_bytes(tmp_path) == 400 * MiB


def test_cgroup_v1_is_read_too(tmp_path: Path) -> None:
    group(tmp_path, "memory", V1, str(1000 * MiB), 900, f"total_inactive_file {50 * MiB}\n")
    assert available_bytes(tmp_path) == 150 * MiB


def test_the_smaller_of_container_and_host_wins(tmp_path: Path) -> None:
    group(tmp_path, ".", V2, str(1000 * MiB), 100, "")
    write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert available_bytes(tmp_path) == 2 * MiB


def test_no_limit_leaves_what_the_host_has(tmp_path: Path) -> None:
    group(tmp_path, ".", V2, "max", 100, "")
    write(tmp_path, proc__meminfo="MemAvailable: 1024 kB\n")
    assert available_bytes(tmp_path) == MiB


def test_nothing_readable_is_nothing_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    group(tmp_path, ".", V2, str(10 * MiB), 20, "")
    assert available_bytes(tmp_path) == 0, "over the limit there is nothing left, not less than nothing"


def test_a_limit_is_the_containers_or_else_the_hosts_memory(tmp_path: Path) -> None:
    assert limit_bytes(tmp_path) is None
    write(tmp_path, proc__meminfo="MemTotal: 2048 kB\nMemAvailable: 1 kB\n")
    assert limit_bytes(tmp_path) == 2 * MiB
    group(tmp_path, "memory", V1, str(9223372036854771712), 1, "")  # no limit, in cgroup v1
    assert limit_bytes(tmp_path) == 2 * MiB
    group(tmp_path, ".", V2, str(MiB), 100, "")
    assert limit_bytes(tmp_path) == MiB
