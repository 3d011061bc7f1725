"""An engine without a model: blocks whose content is a function of the page's number, and a real client.

Runs as `python engine.py <json settings>` and takes commands by lines of JSON; or is used within a test's own process.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
from kvpeer.client import Client, ClientSettings, EngineLayout, NativeCopier, Registration
from kvpeer.core.chain import Chain, ChainSlice, namespace_digest
from kvpeer.model import Outcome

PAGE_BYTES = 96 << 10
N_BLOCKS = 64


def namespace_of(name: str) -> bytes:
    return namespace_digest({"model": name})


def chain_of(namespace: bytes, *numbers: int) -> ChainSlice:
    """A slice whose pages are these numbers, in this order; a number is the same page whatever its neighbours."""
    chain = Chain(namespace)
    chain.extend(number.to_bytes(8, "big") for number in numbers)
    return chain.slice(0, len(numbers))


def content(number: int, part: int, n_bytes: int) -> np.ndarray:
    return np.random.default_rng([number, part]).integers(0, 256, n_bytes, dtype=np.uint8)


class PausingCopier(NativeCopier):
    """Stops before each copy until it is told to go on."""

    def __init__(self, layout: EngineLayout) -> None:
        super().__init__(layout)
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def gather(self, *arguments: Any) -> Any:
        self._pause()
        return super().gather(*arguments)

    def scatter(self, *arguments: Any) -> Any:
        self._pause()
        return super().scatter(*arguments)

    def _pause(self) -> None:
        self.reached.set()
        assert self.go_on.wait(30)


class Engine:
    """One rank: blocks in two segments, as K and V."""

    def __init__(
        self,
        socket: str,
        n_parts: int = 1,
        part: int = 0,
        page_bytes: int = PAGE_BYTES,
        namespace: str = "tiny",
        settings: ClientSettings | None = None,
        n_blocks: int = N_BLOCKS,
    ) -> None:
        self.namespace = namespace_of(namespace)
        self.part = part
        self.part_bytes = page_bytes // n_parts
        half = self.part_bytes // 2
        self.memory = np.zeros((2, n_blocks, half), dtype=np.uint8)
        layout = EngineLayout(
            np.array([self.memory[0].ctypes.data, self.memory[1].ctypes.data], np.uint64),
            np.array([half, half], np.uint64),
            np.array([half, half], np.uint32),
        )
        registration = Registration(
            f"engine-{part}",
            self.namespace,
            {"model": namespace},
            page_bytes,
            n_parts,
            part,
            part * self.part_bytes,
            self.part_bytes,
        )
        self.client = Client.connect(settings or ClientSettings(socket=socket, start_timeout_s=5), registration)
        self.copier = PausingCopier(layout)
        self.last_fetch_s = 0.0
        self.client.register_layout(layout, self.copier)

    def publish(self, *numbers: int, deadline_s: float = 5.0, is_current: bool = True) -> tuple[int, int, int]:
        blocks = np.arange(len(numbers), dtype=np.int64)
        for block, number in enumerate(numbers):
            self.memory[:, block] = content(number, self.part, self.part_bytes).reshape(2, -1)
        result = self.client.publish(chain_of(self.namespace, *numbers), blocks, deadline_s, lambda: is_current)
        return result.n_written, result.n_present, result.n_refused

    def fetch(self, *numbers: int, deadline_s: float = 5.0, request: str = "request", source: bytes = b"") -> list[str]:
        """The outcome of each page. A hit with other bytes than were published is called WRONG."""
        blocks = np.arange(len(numbers), dtype=np.int64)[::-1].copy()
        self.memory[:] = 0
        started = time.monotonic()
        outcomes = self.client.fetch(chain_of(self.namespace, *numbers), blocks, request, deadline_s, source=source)
        self.last_fetch_s = time.monotonic() - started
        names = []
        for number, block, outcome in zip(numbers, blocks, outcomes, strict=True):
            expected = content(number, self.part, self.part_bytes).reshape(2, -1)
            is_right = np.array_equal(self.memory[:, block], expected)
            names.append("WRONG" if outcome == Outcome.HIT and not is_right else Outcome(int(outcome)).name)
        return names

    def locate(self, *numbers: int, deadline_s: float = 1.0, request: str = "request") -> list[int]:
        result = self.client.locate(chain_of(self.namespace, *numbers), request, deadline_s)
        return result.statuses.tolist()


def main() -> None:
    engine = Engine(**json.loads(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        numbers = command.get("numbers", [])
        if command["do"] == "publish":
            answer: Any = engine.publish(*numbers)
        elif command["do"] == "fetch":
            answer = engine.fetch(*numbers)
        elif command["do"] == "pause":
            engine.copier.go_on.clear()
            threading.Thread(target=engine.publish, args=numbers, daemon=True).start()
            answer = engine.copier.reached.wait(10)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
