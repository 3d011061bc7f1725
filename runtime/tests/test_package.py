"""What the package carries besides its code."""

from __future__ import annotations

from processes.handles import RUNTIME


def test_the_packages_licence_is_the_workspaces() -> None:
    # A copy, because a package's files must lie below it, and a link would not survive in a source archive.
    assert (RUNTIME / "LICENSE").read_bytes() == (RUNTIME.parent / "LICENSE").read_bytes()
