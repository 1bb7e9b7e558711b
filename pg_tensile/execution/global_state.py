"""A lock for what a process has only once: PyTorch's random numbers, its profiler, and what capturing replaces.

A model that is built draws random numbers, and may be built beside others. Capturing a model, measuring workspaces and
seeding have to be alone: capturing fails if a random number is drawn meanwhile. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changed = threading.Condition()
_sharing = 0  # threads
_owner: int | None = None  # the thread that is alone


@contextmanager
def shared() -> Iterator[None]:
    """Wait until no other thread is alone, and let none be until the end."""
    global _sharing
    with _changed:
        _changed.wait_for(lambda: _owner in (None, threading.get_ident()))
        _sharing += 1
    try:
        yield
    finally:
        with _changed:
            _sharing -= 1
            _changed.notify_all()


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread is here, and keep others out until the end. A thread that is alone may enter again."""
    global _owner
    with _changed:
        entered = _owner != threading.get_ident()
        if entered:
            _changed.wait_for(lambda: _owner is None and _sharing == 0)
            _owner = threading.get_ident()
    try:
        yield
    finally:
        if entered:
            with _changed:
                _owner = None
                _changed.notify_all()
