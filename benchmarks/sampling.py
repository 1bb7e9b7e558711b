"""Looks at something again and again while a benchmark runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sampled(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Calls `look` in a thread of its own, so many seconds apart, until the block is left."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
