"""Startup of every child process: tie its life to its supervisor's, shake hands, send exceptions as ERROR frames.

A child is started as `<pg_tensile.python> -m pyworker <module>` (pyworker/__main__.py), which passes `main` a body that
imports that module and calls its `run(connection, hello)`.

Phases: die with the supervisor (PR_SET_PDEATHSIG), become the first victim of the OOM killer, limit resources to the
settings (pg_tensile.nice, pg_tensile.child_memory), keep the output short, exchange HELLO with a version check, run the
body. An exception that leaves the body is sent as an ERROR frame and ends the process with status 1. Standard library
only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from pyworker.connection import Connection
from pyworker.version import VERSION
from pyworker.wire import FrameType, ProtocolError

FD_VARIABLE = "PG_TENSILE_FD"
GROUPS_VARIABLE = "PG_TENSILE_GROUPS_FD"
PARENT_VARIABLE = "PG_TENSILE_PARENT"
NICE_VARIABLE = "PG_TENSILE_NICE"
MEMORY_VARIABLE = "PG_TENSILE_MEMORY"  # bytes; 0 means no limit
LOG_NAME = "pg_tensile"
LOG_LIMIT = 4 << 20  # bytes of output, which is held in memory
CUT_INTERVAL = 0.5  # seconds

_PR_SET_PDEATHSIG = 1

# SQLSTATEs of exceptions by class name: the library defines none, and child.py does not import the library.
# The first name found along an exception's class hierarchy counts; all others are external_routine_exception.
SQLSTATES = {
    "VersionMismatch": "55000",
    "ProtocolError": "08P01",
    "Malformed": "08P01",
    "AcceleratorError": "58000",  # PyTorch's
    "OutOfMemoryError": "53200",
    "MemoryError": "53200",
    "CancelledError": "57014",
    # pg_tensile/errors.py
    "DataError": "22000",
    "SpoolError": "53100",
    "ArchitectureError": "22023",
    "OptionError": "22023",
    "CheckpointError": "XX001",
    "ModelFileError": "22P03",
    "ExportError": "0A000",
    "DeviceError": "55000",
    "DeviceFaultError": "58000",
    "OutOfDeviceMemoryError": "53200",
    "BudgetError": "53200",
    "MemoryRefusedError": "53200",
    "BatchSizeError": "53200",
    "ModelRefusedError": "53200",
    "CaptureError": "0A000",
    "NotFiniteError": "22003",
    "TrainingError": "22023",
    # pyworker/ranks/errors.py
    "RayMissingError": "0A000",
    "RayTokenError": "28000",
    "RayVersionError": "55000",
    "RayConnectionError": "08006",
    "RankLostError": "08006",
}
DEFAULT_SQLSTATE = "38000"
OUT_OF_MEMORY = "53200"
# Texts of exceptions that are not MemoryError: PyTorch's CPU allocator and the start of a thread raise RuntimeError
ALLOCATION_FAILURES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")


_groups: socket.socket | None = None


class VersionMismatch(Exception):
    """SQL, shim and Python do not have the same version."""

    hint = "Run make install and ALTER EXTENSION pg_tensile UPDATE, then restart the server."


def group_socket() -> socket.socket | None:
    """Return the socket on which this child asks for memory (csrc/processes/memory_flow_socket.c); None without one."""
    return _groups


def main(body: Callable[[Connection, dict[str, Any]], None]) -> NoReturn:
    """Run `body(connection, hello)` in this child, and exit; `hello` is the header of the supervisor's HELLO."""
    faulthandler.enable()
    die_of_interrupts()
    _die_with_parent()
    _limit_resources()
    threading.Thread(target=_keep_output_short, daemon=True).start()
    inherited = int(os.environ.pop(FD_VARIABLE))  # never closed: the stream ends when the process has ended
    os.set_inheritable(inherited, False)
    connection = Connection(socket.socket(fileno=os.dup(inherited)))
    _take_groups()
    try:
        body(connection, _shake_hands(connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        traceback.print_exc()  # the supervisor is gone: there is nowhere to send an ERROR frame
        _exit(1)
    except Exception as error:
        traceback.print_exc()
        connection.send(FrameType.ERROR, header=error_header(error))
        _exit(1)
    except SystemExit as end:  # raised by the code of a model
        _exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    _exit(0)


def die_of_interrupts() -> None:
    """Have SIGINT end this process as every other signal does, rather than raise KeyboardInterrupt.

    Where that is raised decides what becomes of it: a handler, an exit status, or nothing. The supervisor has held
    SIGINT back so far (supervisors/processes.py)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _take_groups() -> None:
    global _groups
    inherited = os.environ.pop(GROUPS_VARIABLE, None)
    if inherited is not None:
        _groups = socket.socket(fileno=int(inherited))
        _groups.set_inheritable(False)


def _exit(status: int) -> NoReturn:
    """Exit without the interpreter's finalization: with PyTorch, it takes half a second of computing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent() -> None:
    """Tie the child's life to its supervisor's, and make it the OOM killer's first choice."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ.pop(PARENT_VARIABLE)):
        os._exit(1)  # the supervisor died before prctl took effect
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # not writable in some containers; it only protects other processes


def _limit_resources() -> None:
    """Apply the niceness and the limit of private memory that the supervisor has set.

    RLIMIT_DATA counts private memory: the heap and private writable mappings. RLIMIT_AS would count mapped files, too,
    and the address space that CUDA reserves. A process without privileges cannot raise its limits again.
    """
    os.nice(int(os.environ.pop(NICE_VARIABLE, "0")))
    limit = int(os.environ.pop(MEMORY_VARIABLE, "0"))
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _memory_limit() -> int:
    """Return the limit of private memory in bytes; 0 means no limit."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return 0 if limit == resource.RLIM_INFINITY else limit


def cut_output(fd: int) -> None:
    """Truncate the file with a child's output when it has become too long."""
    if os.fstat(fd).st_size > LOG_LIMIT:
        os.ftruncate(fd, 0)


def _keep_output_short() -> None:
    """Truncate the output from time to time, for the supervisor does not while it runs a training query."""
    while os.readlink("/proc/self/fd/1").startswith(f"/memfd:{LOG_NAME}"):
        cut_output(1)
        time.sleep(CUT_INTERVAL)


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the versions of Python and PyTorch, which is not imported.

    Supervisors import this module and need none of these libraries, which take longer than all others."""
    import importlib.metadata
    import platform

    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {"python": platform.python_version(), "torch": torch}


def _shake_hands(connection: Connection) -> dict[str, Any]:
    hello = {"version": VERSION, **versions(), "pid": os.getpid()}
    connection.send(FrameType.HELLO, header=hello)
    frame = connection.recv()
    if frame is None or frame.type != FrameType.HELLO:
        raise ProtocolError("the supervisor's first frame is not HELLO")
    if frame.header.get("version") != VERSION:
        raise VersionMismatch(f"the server's version is {frame.header.get('version')}, the child's is {VERSION}")
    return frame.header


def error_header(error: BaseException) -> dict[str, Any]:
    """Return the ERROR frame's header for `error`, which may have `message`, `hint`, `detail` and `step`."""
    message = getattr(error, "message", None) or str(error)
    named = any(cls.__name__ in SQLSTATES for cls in type(error).__mro__)
    if not named and not hasattr(error, "hint"):
        message = f"{type(error).__name__}: {message}"
    hint = getattr(error, "hint", None)
    code = sqlstate(error)
    if _memory_limit() and is_out_of_memory(error):
        code = OUT_OF_MEMORY
        limit = f"{_memory_limit() >> 20} MB"
        hint = f"A process may allocate {limit}: raise pg_tensile.child_memory, or use a smaller model or batch_size."
    return {
        "sqlstate": code,
        "message": message,
        "hint": hint,
        "detail": getattr(error, "detail", None),
        "traceback": "".join(traceback.format_exception(error)),
        "step": getattr(error, "step", None),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error, or what caused it, is a lack of host memory."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in ALLOCATION_FAILURES):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE that `error` stands for."""
    for cls in type(error).__mro__:
        if cls.__name__ in SQLSTATES:
            return SQLSTATES[cls.__name__]
    return DEFAULT_SQLSTATE
