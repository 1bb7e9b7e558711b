"""The lock of a process's global state."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from pg_tensile.execution import global_state


def test_threads_share_or_are_alone() -> None:
    inside = threading.Barrier(2)  # two share
    entered = threading.Event()

    def share() -> None:
        with global_state.shared():
            inside.wait()
            assert not entered.is_set()

    def be_alone() -> None:
        with global_state.alone(), global_state.alone(), global_state.shared():
            entered.set()

    with ThreadPoolExecutor(3) as pool:
        with global_state.shared():
            waiting = pool.submit(be_alone)
            sharing = [pool.submit(share) for _ in range(2)]
            for task in sharing:
                task.result()
            assert not waiting.done()
        waiting.result()
    assert entered.is_set()


def test_an_error_lets_others_in() -> None:
    for context in (global_state.alone, global_state.shared):
        try:
            with context():
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_enter).result()


def _enter() -> None:
    with global_state.alone():
        pass
