"""A cgroup for each node, in every hierarchy of cgroups v1, so that kubelets of one machine do not meet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from cluster.addresses import PREFIX
from cluster.processes import await_true

__all__ = ["cgroup_root", "freeze_cgroup", "make_cgroups", "remove_cgroups"]

_MOUNT = Path("/sys/fs/cgroup")
_EMPTY_DEADLINE_S = 10.0
"""A killed process leaves its cgroup when it has been reaped."""


def cgroup_root(node: str) -> str:
    """The node's cgroup as its kubelet is told."""
    return f"/{PREFIX}/{node}"


def make_cgroups(node: str) -> None:
    """The node's cgroup in each hierarchy."""
    for hierarchy in _hierarchies():
        parent = hierarchy
        for name in (PREFIX, node):
            made = parent / name
            made.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new one, and then no process may enter
                if (made / file).exists():
                    (made / file).write_text((parent / file).read_text())
            parent = made


def freeze_cgroup(node: str, pids: Iterable[int], *, is_frozen: bool) -> None:
    """These processes and all of the node's pods stop where they are, or go on. Unlike a signal, their parents do not
    notice it: an `nsenter` whose child is stopped stops, too, and would not go on with it."""
    folder = _MOUNT / "freezer" / PREFIX / node
    for pid in pids:
        (folder / "cgroup.procs").write_text(str(pid))
    state, wanted = folder / "freezer.state", "FROZEN" if is_frozen else "THAWED"
    state.write_text(wanted)
    await_true(lambda: state.read_text().strip() == wanted, f"{node} is {wanted}", _EMPTY_DEADLINE_S)


def remove_cgroups(node: str = "") -> None:
    """Removes those of one node, or all, once they are empty."""
    for hierarchy in _hierarchies():
        root = hierarchy / PREFIX / node
        await_true(partial(_is_removed, root), f"{root} is empty", _EMPTY_DEADLINE_S)


def _is_removed(root: Path) -> bool:
    if not root.exists():
        return True
    for folder in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):  # not empty yet
            folder.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
    return not root.exists()


def _hierarchies() -> Iterator[Path]:
    if (_MOUNT / "cgroup.controllers").exists():
        raise SystemExit("the local cluster was made for cgroups v1, and this machine has v2 alone")
    yield from (each for each in sorted(_MOUNT.iterdir()) if each.is_dir())
