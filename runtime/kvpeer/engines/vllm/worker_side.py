"""The connector's worker side: one rank's loads and publishes, as the scheduler side ordered them.

`begin_step`, `load`, `publish` and `collect` are called by the engine's thread in that order within a step, and never
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvpeer.engines.vllm.copies import Loads, PageClient, Publishes
from kvpeer.engines.vllm.metadata import StepOrders, StepReport
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.vllm.tally import Tally

__all__ = ["Collected", "WorkerSide"]


class ConnectedClient(PageClient, Protocol):
    """A rank's client, which the worker side closes at its end."""

    def close(self) -> None: ...


class Fences(Protocol):
    """The part of `kvpeer.client.device.Copier` that orders copies after the engine's own work."""

    def fence(self) -> object: ...
    def wait_for(self, fence: object) -> None: ...
    def seconds_since(self, fence: object) -> float: ...


class Collected:
    """What is over since the last call: requests sent, requests received, blocks that were not loaded."""

    def __init__(self, sent: set[str], received: set[str], failed_blocks: set[int]) -> None:
        self.sent = sent
        self.received = received
        self.failed_blocks = failed_blocks


class WorkerSide:
    """See the module docstring. `is_writer`: whether this rank's part is not already written by a rank with the same
    KV."""

    def __init__(
        self,
        client: ConnectedClient,
        fences: Fences,
        *,
        part_bytes: int,
        is_writer: bool,
        settings: Settings,
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self._client = client
        self._fences = fences
        self._is_writer = is_writer
        self._loads = Loads(
            client, fences.wait_for, fences.seconds_since, part_bytes=part_bytes, clock=clock, tally=tally
        )
        self._publishes = Publishes(
            client,
            fences.wait_for,
            part_bytes=part_bytes,
            queue_pages_max=settings.publish_queue_pages_max,
            clock=clock,
            tally=tally,
        )

    def begin_step(self, orders: StepOrders) -> None:
        """Before the step writes to any block: revokes copies of preempted requests."""
        for request in orders.preempted:
            self._publishes.revoke(request)

    def load(self, orders: StepOrders) -> None:
        """Starts the step's loads. They begin after the work that the engine has queued so far, which may still use
        the blocks.

        Raises what the device's fence raises; the loads are failed then, and collected as such.
        """
        if not orders.loads:
            return
        try:
            fence = self._fences.fence()
        except Exception:
            # Whatever it was, a load that is not reported hangs its request for ever.
            for order in orders.loads:
                self._loads.fail(order)
            raise
        for order in orders.loads:
            self._loads.start(order, fence)

    def publish(self, orders: StepOrders) -> None:
        """After the step's forward pass: starts its publishes."""
        if orders.publishes and self._is_writer:
            fence = self._fences.fence()
            for order in orders.publishes:
                self._publishes.start(order, fence)

    def collect(self, orders: StepOrders, finished: Iterable[str]) -> Collected:
        """Returns what is over. finished: requests that ended; a load that they still have stops early and is
        collected later."""
        for request in orders.held:
            self._publishes.hold(request)
        for request in finished:
            self._loads.abort(request)
            if request not in orders.held:
                # Its blocks were freed when it ended, so nothing more is committed from them.
                self._publishes.revoke(request)
        received, failed_blocks = self._loads.collect()
        return Collected(self._publishes.collect(), received, failed_blocks)

    def report(self, orders: StepOrders) -> StepReport:
        """Returns what the scheduler side learns with this step's output; after `collect`, so that no load is over
        there before it is reported here."""
        return StepReport(orders.step, self._loads.reports())

    def close(self) -> None:
        """Ends all copies and the connection. Blocks for a bounded time."""
        self._loads.close()
        self._publishes.close()
        self._client.close()
