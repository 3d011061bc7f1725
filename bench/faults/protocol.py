"""What is said to an engine process, and its life. SGLang is imported there alone: that takes seconds."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["CALL_PAGES_MAX", "Backend", "Identity", "Read", "serve"]

CALL_PAGES_MAX = 128
"""SGLang's own limit of a read or a write."""


@dataclass(frozen=True)
class Identity:
    """What an engine is, as far as it decides the bytes that it computes from equal tokens."""

    model: str = "model-a"
    dtype: str = "bfloat16"
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1


@dataclass(frozen=True)
class Backend:
    """What is attached: SGLang's `dynamic` backend with this extra config."""

    module: str
    class_name: str
    extra_config: dict[str, Any]


@dataclass(frozen=True)
class Read:
    """What became of pages that were read. wrong: said to have arrived, with other bytes than this engine's."""

    n_right: int = 0
    n_wrong: int = 0
    n_missed: int = 0
    seconds: float = 0.0

    def __add__(self, other: Read) -> Read:
        return Read(
            self.n_right + other.n_right,
            self.n_wrong + other.n_wrong,
            self.n_missed + other.n_missed,
            self.seconds + other.seconds,
        )


def serve(connection: Connection, identity: Identity, page_bytes: int, folder: Path, log: Path) -> None:
    """The life of an engine process: answers (method, arguments) with (whether it worked, answer).

    folder: for its model, the same for all engines of a cluster.
    """
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ["XDG_CACHE_HOME"] = str(folder)  # what is remembered of checkpoints goes with them
    from faults.engine import Engine

    try:
        engine = Engine(identity, page_bytes, folder)
        connection.send((True, None))
    except Exception:  # noqa: BLE001 - the asking side reports it
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(engine, method)(*arguments)))
        except Exception:  # noqa: BLE001 - the asking side reports it
            connection.send((False, traceback.format_exc()))
