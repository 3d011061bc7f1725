"""Every input that was kept (seeds, what fuzzing found interesting, what once crashed) is taken by its target."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from kvpeer.wire.messages import Message

FOLDER = Path(__file__).parent
TARGETS = ("wire", "files", "sockets")
NATIVE_TARGETS = ("server", "connection", "slots")
KEPT_BYTES_MAX = 300 << 10
"""Of all inputs together: they are cloned by everybody."""


def inputs(target: str) -> list[Path]:
    return sorted(path for kind in ("corpus", "crashes") for path in (FOLDER / kind / target).glob("*"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_takes_every_kept_input(target: str) -> None:
    take = importlib.import_module(f"fuzz.{target}").take
    paths = inputs(target)
    assert paths
    for path in paths:
        try:
            take(path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path} breaks a promise") from error


@pytest.mark.parametrize("target", NATIVE_TARGETS)
def test_native_targets_have_kept_inputs(target: str) -> None:
    """They are run by ctest."""
    assert inputs(target)


def test_the_kept_inputs_are_small() -> None:
    sizes = [path.stat().st_size for target in TARGETS + NATIVE_TARGETS for path in inputs(target)]
    assert sum(sizes) <= KEPT_BYTES_MAX


def test_every_message_is_among_the_seeds() -> None:
    names = {path.name for path in inputs("wire")}
    nested = {"AgentInfo", "MemberUpdate", "RequestTrace"}
    missing = [
        message.__name__
        for message in Message.__subclasses__()
        if message.__name__ not in nested
        and not names & {f"seed-peer-{message.__name__}", f"seed-client-{message.__name__}"}
    ]
    assert missing == [], "run  make fuzz-seeds"
