"""Order between host threads: Python's locks, as the race detector sees them."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.emulated.emulated.native import native


class WatchedLock:
    """A lock that tells the detector: what came before a release has ended for whoever acquires the lock next."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._key = id(lock)
        weakref.finalize(self, native.host_forgets_lock, self._key).atexit = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            native.host_acquires(self._key)
        return taken

    def release(self) -> None:
        native.host_releases(self._key)
        self._lock.release()

    def locked(self) -> bool:
        """Return whether it is taken. False tells the caller that it was released, so this is an order, too."""
        taken = self._lock.locked()
        if not taken:
            native.host_acquires(self._key)
        return taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:  # what threading.Condition asks an RLock for
        return getattr(self._lock, name)


@contextlib.contextmanager
def watch_threads() -> Iterator[None]:
    """Tell host threads apart in the block, and see their order from the locks that are made in it.

    Those are threading.Lock, RLock and what is made of them: Condition, Event, Semaphore, Thread's start and join,
    queue.Queue, queue.SimpleQueue and executors. Without this, nothing tells what threads know of each other, and the
    detector takes all of them for one."""
    plain_lock, plain_rlock, plain_join = threading.Lock, threading.RLock, threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        plain_join(thread, timeout)
        if not thread.is_alive():
            native.host_acquires(id(thread))

    plain_run = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        try:
            plain_run(thread)
        finally:
            native.host_releases(id(thread))

    native.watch_threads(True)
    try:
        with (
            mock.patch.object(threading, "Lock", lambda: WatchedLock(plain_lock())),
            mock.patch.object(threading, "RLock", lambda: WatchedLock(plain_rlock())),
            mock.patch.object(threading.Thread, "join", join),
            mock.patch.object(threading.Thread, "run", run),
            mock.patch.object(queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        native.watch_threads(False)
