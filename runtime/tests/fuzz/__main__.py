"""`python -m fuzz TARGET [options and folders of libFuzzer]`: fuzzes one of the targets in Python."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from random import Random

import atheris

PLAIN = 0.5


def main() -> None:
    name, arguments = sys.argv[1], sys.argv[2:]
    logging.disable(logging.CRITICAL)  # what is logged about bad input would cost most of the time
    with atheris.instrument_imports(include=["kvpeer", "fuzz", "http.server", "http.client", "email.feedparser"]):
        target = importlib.import_module(f"fuzz.{name}")
    mutators = {"custom_mutator": mutator(target.changed)} if hasattr(target, "changed") else {}
    atheris.Setup([sys.argv[0], *arguments], target.take, **mutators)
    atheris.Fuzz()


def mutator(changed: Callable[[bytes, Random], bytes]) -> Callable[[bytes, int, int], bytes]:
    """Half of the inputs by the fuzzer's own means, half by those of the target."""

    def mutated(data: bytes, n_bytes_max: int, seed: int) -> bytes:
        random = Random(seed)
        if not data or random.random() < PLAIN:
            return bytes(atheris.Mutate(data, n_bytes_max))
        return changed(data, random)[:n_bytes_max]

    return mutated


if __name__ == "__main__":
    main()
