"""What every child process does first: bind its life to its supervisor's, shake hands, make exceptions ERROR frames.

A child is started as `<pg_tensile.python> -m pyworker <module>` (pyworker/__main__.py), which gives `main` a body that
imports that module and calls its `run(connection, hello)`.

Phases: die with the supervisor (PR_SET_PDEATHSIG), be the first the OOM killer takes, keep the output short, HELLO in
both directions with a version check, the body. An exception that leaves the body is sent as an ERROR frame and ends the
process with status 1.
Standard library only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.metadata
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from pyworker.version import VERSION
from pyworker.wire import Connection, FrameType, ProtocolError

FD_VARIABLE = "PG_TENSILE_FD"
PARENT_VARIABLE = "PG_TENSILE_PARENT"
LOG_NAME = "pg_tensile"
LOG_LIMIT = 4 << 20  # bytes of output, which are in memory
CUT_INTERVAL = 0.5  # seconds

_PR_SET_PDEATHSIG = 1

# Exceptions that carry a meaning for SQL, by class name: the library knows no SQLSTATE and child.py imports no library.
# The first name found along an exception's class hierarchy counts; the rest is external_routine_exception.
SQLSTATES = {
    "VersionMismatch": "55000",
    "ProtocolError": "08P01",
    "Malformed": "08P01",
    "OutOfMemoryError": "53200",
    "MemoryError": "53200",
    "CancelledError": "57014",
    # pg_tensile/errors.py
    "DataError": "22000",
    "SpoolError": "53100",
    "ArchitectureError": "22023",
    "CheckpointError": "XX001",
    "DeviceError": "55000",
    "OutOfDeviceMemoryError": "53200",
    "BudgetError": "53200",
    "MemoryRefusedError": "53200",
    "BatchSizeError": "53200",
    "ModelRefusedError": "53200",
    "CaptureError": "0A000",
    "NotFiniteError": "22003",
    "TrainingError": "22023",
}
DEFAULT_SQLSTATE = "38000"


class VersionMismatch(Exception):
    """SQL, shim and Python are not of the same version."""

    hint = "Run make install and ALTER EXTENSION pg_tensile UPDATE, then restart the server."


def main(body: Callable[[Connection, dict[str, Any]], None]) -> NoReturn:
    """Runs `body(connection, hello)` as this child's life and exits; `hello` is the supervisor's HELLO header."""
    faulthandler.enable()
    _die_with_parent()
    threading.Thread(target=_keep_output_short, daemon=True).start()
    inherited = int(os.environ.pop(FD_VARIABLE))  # never closed: the supervisor sees the end when the process has ended
    os.set_inheritable(inherited, False)
    connection = Connection(socket.socket(fileno=os.dup(inherited)))
    try:
        body(connection, _shake_hands(connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        traceback.print_exc()  # the supervisor is gone: nobody to tell
        sys.exit(1)
    except Exception as error:
        traceback.print_exc()
        connection.send(FrameType.ERROR, header=error_header(error))
        sys.exit(1)
    sys.exit(0)


def _die_with_parent() -> None:
    """No child outlives its supervisor, and the OOM killer takes it before any server process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ.pop(PARENT_VARIABLE)):
        os._exit(1)  # it died before prctl took effect
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # not everywhere writable (some containers); protection only


def cut_output(fd: int) -> None:
    """Empties the file with a child's output when it has become too long."""
    if os.fstat(fd).st_size > LOG_LIMIT:
        os.ftruncate(fd, 0)


def _keep_output_short() -> None:
    """The supervisor cuts it, too, but not while it runs a job's training query."""
    while os.readlink("/proc/self/fd/1").startswith(f"/memfd:{LOG_NAME}"):
        cut_output(1)
        time.sleep(CUT_INTERVAL)


def _shake_hands(connection: Connection) -> dict[str, Any]:
    try:
        torch: str | None = importlib.metadata.version("torch")  # does not import it
    except importlib.metadata.PackageNotFoundError:
        torch = None
    hello = {"version": VERSION, "python": platform.python_version(), "torch": torch, "pid": os.getpid()}
    connection.send(FrameType.HELLO, header=hello)
    frame = connection.recv()
    if frame is None or frame.type != FrameType.HELLO:
        raise ProtocolError("the supervisor's first frame is not HELLO")
    if frame.header.get("version") != VERSION:
        raise VersionMismatch(f"the server's version is {frame.header.get('version')}, the child's is {VERSION}")
    return frame.header


def error_header(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """The header of the ERROR frame for `error`; exceptions may carry `message`, `hint`, `detail` and `step`."""
    message = getattr(error, "message", None) or str(error)
    named = any(cls.__name__ in SQLSTATES for cls in type(error).__mro__)
    if not named and not hasattr(error, "hint"):
        message = f"{type(error).__name__}: {message}"
    return {
        "sqlstate": sqlstate(error),
        "message": message,
        "hint": getattr(error, "hint", None),
        "detail": getattr(error, "detail", None),
        "traceback": "".join(traceback.format_exception(error)),
        "step": getattr(error, "step", step),
    }


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE that `error` stands for."""
    for cls in type(error).__mro__:
        if cls.__name__ in SQLSTATES:
            return SQLSTATES[cls.__name__]
    return DEFAULT_SQLSTATE
