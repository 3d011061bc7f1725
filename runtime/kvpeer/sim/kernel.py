"""Virtual time: events in the order of (time, number), coroutines that wait for futures, processes with own clocks.

One thread, no real clock: what happens depends on the events alone. A process can be frozen (SIGSTOP: what comes in
waits, its timers ring when it goes on), killed, and its clock can jump or stand still while everybody else's goes on.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

from kvpeer.model import KvPeerError, PeerUnavailableError

__all__ = ["Future", "Kernel", "Process", "StuckError", "Task"]

INSTANT_EVENTS_MAX = 20_000
"""Events without any time passing: beyond, something waits in a loop for what cannot happen. A ring change of 64 agents
is some thousand."""

FROZEN_ACTIONS_MAX = 4096
"""What waits for a frozen process: socket buffers of the kernel are finite; what comes later is lost."""

T = TypeVar("T")

Action = Callable[[], None]


class StuckError(Exception):
    """Events follow each other for ever at one moment."""


class Future(Generic[T]):
    """A value that comes later, or an error. Awaited by any number of tasks."""

    __slots__ = ("_callbacks", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Action] = []

    @property
    def is_failed(self) -> bool:
        return self._error is not None

    def set(self, value: T) -> None:
        """Does nothing when it is done already."""
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        """As `set`, with an error that `result` raises."""
        self._finish(None, error)

    def result(self) -> T:
        """The value; raises the error."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def then(self, callback: Action) -> None:
        """Calls back when done: now if it is."""
        if self.is_done:
            callback()
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self.is_done:
            yield self
        return self.result()

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        if self.is_done:
            return
        self.is_done, self._value, self._error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Task(Future[T]):
    """A coroutine of a process; done with its result or its KvPeerError. Any other error ends the run."""

    __slots__ = ("_coroutine", "_process")

    def __init__(self, process: Process, coroutine: Coroutine[Any, None, T]) -> None:
        super().__init__()
        self._process = process
        self._coroutine = coroutine

    def step(self) -> None:
        """Runs the coroutine to its next wait."""
        if self.is_done or self._process.is_dead:
            return
        try:
            awaited: Future[Any] = self._coroutine.send(None)
        except StopIteration as stop:
            self._process.tasks.pop(self, None)
            self.set(stop.value)
            return
        except KvPeerError as error:
            self._process.tasks.pop(self, None)
            self.fail(error)
            return
        awaited.then(self._wake)

    def close(self) -> None:
        """Ends it where it waits."""
        self._coroutine.close()
        self.fail(PeerUnavailableError("it was ended before it was done"))

    def _wake(self) -> None:
        """Goes on soon, not inside of whoever finished the future."""
        kernel = self._process.kernel
        kernel.at(kernel.now, self._go_on)

    def _go_on(self) -> None:
        self._process.post(self.step)


class Kernel:
    """The order of everything that happens. `now` is the world's time, which no process sees."""

    def __init__(self) -> None:
        self.now = 0.0
        self.n_events = 0
        self.processes: list[Process] = []
        self._events: list[tuple[float, int, Action]] = []
        self._n_scheduled = 0

    def close(self) -> None:
        """Ends all processes: nothing runs any more, whatever still refers to them."""
        for process in self.processes:
            process.kill()
        self._events.clear()

    def at(self, time: float, action: Action) -> None:
        """Runs the action then (never before now), after all that was scheduled earlier for the same moment."""
        self._n_scheduled += 1
        heapq.heappush(self._events, (max(time, self.now), self._n_scheduled, action))

    def run_until(self, end: float) -> None:
        """Lets time pass.

        Raises:
            StuckError: time does not pass any more.
        """
        n_at_once = 0
        while self._events and self._events[0][0] <= end:
            time, _, action = heapq.heappop(self._events)
            n_at_once = n_at_once + 1 if time == self.now else 0
            if n_at_once > INSTANT_EVENTS_MAX:
                raise StuckError(f"more than {INSTANT_EVENTS_MAX} events at {time:.6f} s")
            self.now = time
            self.n_events += 1
            action()
        self.now = end


class Process:
    """One process on one machine: timers, tasks and a clock of its own."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        self.disturbed_at = -1.0
        """When it was last frozen, thawed or given another time, on the world's clock."""
        self.tasks: dict[Task[Any], None] = {}
        self._offset_s = 0.0
        self._stopped_at: float | None = None  # what the clock shows while it stands still
        self._waiting: deque[Action] = deque()
        self._timers: list[tuple[float, int, Action]] = []
        self._n_timers = 0
        self._alarm_at = float("inf")
        kernel.processes.append(self)

    # ---- time

    def clock(self) -> float:
        """Monotonic seconds as this process sees them."""
        return self.kernel.now + self._offset_s if self._stopped_at is None else self._stopped_at

    def call_at(self, time: float, action: Action) -> None:
        """Runs the action when the own clock shows this time."""
        self._n_timers += 1
        heapq.heappush(self._timers, (time, self._n_timers, action))
        self._arm()

    def sleep(self, seconds: float) -> Future[None]:
        """Done when this much time has passed on the own clock."""
        done: Future[None] = Future()
        self.call_at(self.clock() + max(0.0, seconds), lambda: done.set(None))
        return done

    async def wait_any(self, futures: Iterable[Future[Any]], until: float) -> None:
        """Returns when one of the futures is done, or at this time on the own clock."""
        woken: Future[None] = Future()

        def wake() -> None:
            woken.set(None)

        for future in futures:
            future.then(wake)
        if not woken.is_done:
            self.call_at(until, wake)
        await woken

    def jump(self, seconds: float) -> None:
        """The own clock goes forward at once."""
        self.disturbed_at = self.kernel.now
        if self._stopped_at is None:
            self._offset_s += seconds
            self._arm(is_changed=True)

    def stop_clock(self) -> None:
        """The own clock stands still until `start_clock`; the process runs."""
        self.disturbed_at = self.kernel.now
        self._stopped_at = self.clock()

    def start_clock(self) -> None:
        """The own clock goes on from where it stood."""
        self.disturbed_at = self.kernel.now
        if self._stopped_at is not None:
            self._offset_s = self._stopped_at - self.kernel.now
            self._stopped_at = None
            self._arm(is_changed=True)

    # ---- running

    def spawn(self, coroutine: Coroutine[Any, None, T]) -> Task[T]:
        """Starts a task; its first step runs soon, not now."""
        task = Task(self, coroutine)
        self.tasks[task] = None
        task._wake()
        return task

    def post(self, action: Action) -> None:
        """Runs what came from outside: now, when the process goes on, or never. Also where a task goes on."""
        if self.is_dead:
            return
        if not self.is_frozen:
            action()
        elif len(self._waiting) < FROZEN_ACTIONS_MAX:
            self._waiting.append(action)

    def cancel(self, task: Task[Any]) -> None:
        """Ends a task where it waits."""
        if self.tasks.pop(task, task) is None:
            task.close()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True
        self.disturbed_at = self.kernel.now

    def thaw(self) -> None:
        """SIGCONT."""
        if not self.is_frozen or self.is_dead:
            return
        self.is_frozen = False
        self.disturbed_at = self.kernel.now
        waiting, self._waiting = self._waiting, deque()
        for action in waiting:
            self.kernel.at(self.kernel.now, lambda action=action: self.post(action))  # type: ignore[misc]
        self._arm(is_changed=True)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        self.is_dead = True
        self._waiting.clear()
        self._timers.clear()
        tasks, self.tasks = self.tasks, {}
        for task in tasks:
            task.close()

    def _arm(self, is_changed: bool = False) -> None:
        """Schedules the next timer, where that is earlier than what is scheduled or the clock has changed."""
        if not self._timers or self._stopped_at is not None:
            return
        due = max(self.kernel.now, self._timers[0][0] - self._offset_s)
        while due + self._offset_s < self._timers[0][0]:  # rounded down: the own clock would not show the time yet
            due = math.nextafter(due, math.inf)
        if due < self._alarm_at or is_changed:
            self._alarm_at = due
            self.kernel.at(due, lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if due != self._alarm_at or self.is_dead or self.is_frozen or self._stopped_at is not None:
            return
        self._alarm_at = float("inf")
        now = self.clock()
        while self._timers and self._timers[0][0] <= now and not self.is_dead:
            heapq.heappop(self._timers)[2]()
        self._arm()
