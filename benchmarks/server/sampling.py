"""Sampling at intervals while a benchmark runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sampled(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` every `every_s` seconds in a thread of its own, until the block is left.

    Raises at the end what `look` has raised, after which it was not called again."""
    ended = threading.Event()
    failed: list[Exception] = []

    def run() -> None:
        try:
            while not ended.wait(every_s):
                look()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]
