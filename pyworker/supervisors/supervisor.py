"""The coroutine of a background worker: started and resumed by CALLs of tensile_worker._step.

A supervisor is a coroutine inside a background worker. `step` starts and resumes it, once in each CALL of
tensile_worker._step; what it awaits (`Server.wait`) is that CALL's row, and the process waits for it when the CALL has
ended (csrc/processes/worker.c). Waiting is `await`, nothing else, and it ends the transaction: so no snapshot and no
xmin is held while a child works, and the statistics of what was written are reported.

Each process has a module of its name here (controller, scheduler, worker, inference; explain runs in a session). They
share this one, the server (server.py), children (child_process.py, child_environment.py) and failures.py. A supervisor
never imports heavy modules: its child does, whose death is an event like any other.

Standard library only.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Generator
from enum import IntFlag
from typing import Any, NamedTuple


class Wait(IntFlag):
    """Causes of the end of a wait (csrc/processes/wait.h)."""

    READABLE = 1
    WRITABLE = 2
    LATCH = 4
    TIMEOUT = 8
    STOP = 16
    GONE = 32
    CANCEL = 64
    FLOW = 128


class Request(NamedTuple):
    """Arguments of the wait that follows a step of a supervisor."""

    fd: int
    timeout_ms: int | None  # None means that there is no next step
    writable: bool


DONE = Request(-1, None, False)


@types.coroutine
def suspend(request: Request) -> Generator[Request, Wait, Wait]:
    """End the step; return what ended the wait that follows it."""
    return (yield request)


_supervisor: types.CoroutineType[Request, Wait, None] | None = None  # of this process; None before its first step


def step(plpy: Any, process: str, bits: int) -> Request:
    """Start or resume this process's supervisor: the body of `tensile_worker._step`.

    The module `pyworker.supervisors.<process>` has the coroutine `run(plpy)`; `bits` are those of the wait that has
    ended.
    """
    global _supervisor
    if _supervisor is None:
        _supervisor = importlib.import_module(f"pyworker.supervisors.{process}").run(plpy)
        return _resume(_supervisor, None)
    if _supervisor.cr_frame is None:
        return DONE  # it ended with an error that did not end the process
    return _resume(_supervisor, Wait(bits))


def _resume(supervisor: types.CoroutineType[Request, Wait, None], bits: Wait | None) -> Request:
    try:
        return supervisor.send(bits)  # type: ignore[arg-type]
    except StopIteration:
        return DONE
