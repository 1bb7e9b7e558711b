"""The thread of a model: what must not keep the predictor's loop waiting is done there.

Each model has one, in which it is loaded, planned, asked and closed, so that a model's code runs in one thread only and
models do not wait for each other. Work is a generator that yields between its parts; a thread with several takes them
in turn. PyTorch and numpy release the interpreter's lock while they compute, and the interpreter changes threads every
SWITCH_S, so the loop continues meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

SWITCH_S = 1e-4  # the longest that a thread that does not compute keeps the interpreter from the others

Steps = Generator[None, None, Any]
Wanted = Callable[[], bool]


def one_at_a_time(steps: Steps, lock: threading.Lock) -> Steps:
    """Take each step while the lock is held."""
    while True:
        with lock:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
        yield


class Deliveries:
    """Calls that threads want the loop to make; the descriptor is readable while there are some.

    `expected`: how many are going to come."""

    def __init__(self) -> None:
        self.expected = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def add(self, call: Callable[[], None]) -> None:
        """Have the loop make the call; from any thread."""
        self._calls.append(call)
        os.eventfd_write(self._event, 1)

    def make(self) -> None:
        """Make the calls, in the loop."""
        os.eventfd_read(self._event)  # before the calls are taken, so that none is left without an event
        while self._calls:
            self.expected -= 1
            self._calls.popleft()()


class Result(NamedTuple):
    """Value or exception of a unit of work; both None if it was cancelled."""

    value: Any = None
    error: Exception | None = None


class _Work(NamedTuple):
    steps: Steps
    done: Callable[[Result], None]
    wanted: Wanted


class ModelThread:
    """The thread of one model, in which `context()` is entered."""

    def __init__(self, deliveries: Deliveries, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._deliveries = deliveries
        self._context = context
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="pg_tensile model", daemon=True).start()

    def submit(self, steps: Steps, done: Callable[[Result], None], wanted: Wanted = lambda: True) -> None:
        """Take the steps, in turn with others, as long as `wanted()`, then have the loop call `done(result)`.

        Called by the loop, as is `end`."""
        self._deliveries.expected += 1
        self._queue.put(_Work(steps, done, wanted))

    def end(self) -> None:
        """End the thread after the work that it has."""
        self._queue.put(None)

    def _run(self) -> None:
        with self._context():
            while (work := self._next()) is not None:
                self._take_step(work)
                del work  # which may hold the model
        self.ended.set()

    def _next(self) -> _Work | None:
        """Return the next work, or None at the end."""
        work = self._queue.get()
        while work is None and not self._queue.empty():  # unfinished work has been put behind the end
            self._queue.put(None)
            work = self._queue.get()
        return work

    def _take_step(self, work: _Work) -> None:
        result = Result()
        try:
            if work.wanted():
                next(work.steps)
                self._queue.put(work)
                return
            work.steps.close()
        except StopIteration as end:
            result = Result(end.value)
        except Exception as error:
            result = Result(error=error)
        except BaseException as error:  # a model's code ends the process
            self._deliveries.add(partial(_raise, error))
            return
        self._deliveries.add(partial(work.done, result))


def _raise(error: BaseException) -> None:
    raise error
