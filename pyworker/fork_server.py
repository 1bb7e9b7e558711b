"""The fork server: a process that has imported what jobs need, and forks a process for each job.

Importing PyTorch takes a second or more of computing, which a fork saves. The controller starts the server as
`<pg_tensile.python> -m pyworker.fork_server <python> <path> <listening socket> <control socket>`, the sockets as
descriptors (supervisors/fork_server.py). Each supervisor connects to it for itself and sends one request. On that
connection (SOCK_SEQPACKET):

- request: JSON `{python, name, supervisor, environment}`, with two or three descriptors: the child's end of its
  connection to the supervisor, the file that takes its output, and its end of the socket on which it asks for memory
- answer: JSON `{pid}`, with a descriptor of the child (pidfd). A request that cannot be answered is closed, and the
  supervisor starts its child itself.
- at the child's end: JSON `{status}`, its exit code or the negative number of a signal, when its process group is gone

The child and all that it has started are killed when the supervisor shuts down or closes its end, and so when it dies.
When the fork server dies, the kernel kills its children. When the controller closes the control socket, or ends, the
server takes no more requests and ends with the last child. It also ends after `IDLE` seconds without a child.

No thread and no device survives a fork, so the server imports and forks, and does nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pyworker import child
from pyworker.__main__ import run

IDLE = 300.0  # seconds
MAX_REQUEST = 1 << 20  # bytes; larger than what the kernel sends as one packet
CHILD_DESCRIPTORS = 5  # that a child begins with, at most
# What jobs import: these and, on their first use, parts of PyTorch
PRELOADS = (
    "numpy.ma",
    "numpy.random",
    "pg_tensile.execution.capture.early_update",
    "pg_tensile.execution.models.registry",
    "pg_tensile.execution.runtime.host",
    "pg_tensile.execution.training.trainer",
    "pg_tensile.execution.training.uncertainty",
    "pg_tensile.planning.latency.model_bytes",
    "pg_tensile.queries.prediction",
    "pyworker.children.evaluate",
    "pyworker.children.trainer",
    "scipy.optimize",  # imported by the first validation of a classifier
    "sqlglot.dialects.postgres",
    "torch.fx.experimental.symbolic_shapes",  # imported by the first fake tensor
    "torch.distributed.tensor",  # imported by the first decomposition
)


class _Child:
    """A forked process."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.pidfd = os.pidfd_open(pid)
        self.reaped = False

    def kill(self) -> None:
        """Kill the process, which may not have a group of its own yet, and its group."""
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Serves requests until it is told to end or idle."""

    def __init__(self, python: str, listener: socket.socket, control: socket.socket) -> None:
        self._python = python
        self._listener = listener
        self._children: dict[int, _Child] = {}  # by process ID
        self._closing = False
        self._installed = _installed_files()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(control, selectors.EVENT_READ, self._close)

    def run(self) -> None:
        while not self._closing or self._children:
            events = self._selector.select(None if self._children else IDLE)
            if not events and not self._children:
                return
            for key, _ in events:
                key.data(key.fileobj)

    def _close(self, control: Any = None) -> None:
        """Take no more requests."""
        if not self._closing:
            self._closing = True
            self._selector.unregister(self._listener)
            self._listener.close()
        if control is not None:
            self._selector.unregister(control)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer is gone, or the socket was closed at the same moment
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        """Fork a child for the request that has come."""
        self._selector.unregister(connection)
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
        except OSError:
            message, descriptors = b"", []
        request = json.loads(message) if message and self._is_current() else None
        if request is not None and request["python"] == self._python:
            self._fork(request, connection, descriptors)
        else:
            connection.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _is_current(self) -> bool:
        """Return whether the installed files are those that were imported; else take no more requests."""
        if _installed_files() == self._installed:
            return True
        self._close()
        return False

    def _fork(self, request: dict[str, Any], connection: socket.socket, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError:
            connection.close()
            return
        if pid == 0:
            _become_child(request, *descriptors)
        try:
            process = self._children[pid] = _Child(pid, connection)
        except OSError:  # no descriptor is left
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
            return
        self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._reap, process))
        self._selector.register(connection, selectors.EVENT_READ, partial(self._kill, process))
        try:
            socket.send_fds(connection, [json.dumps({"pid": pid}).encode()], [process.pidfd])
        except OSError:
            process.kill()

    def _kill(self, process: _Child, connection: socket.socket) -> None:
        """End a child whose supervisor has ended the connection."""
        if not process.reaped:  # by an event of the same moment
            self._selector.unregister(connection)
            process.kill()

    def _reap(self, process: _Child, pidfd: int) -> None:
        process.kill()  # what it has started; its group's number is not reused before it is reaped
        _, status = os.waitpid(process.pid, 0)
        process.reaped = True
        with contextlib.suppress(OSError):
            process.connection.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.connection)
        process.connection.close()
        del self._children[process.pid]


def _become_child(request: dict[str, Any], connection: int, log: int, groups: int | None = None) -> NoReturn:
    """Turn the forked process into the child that was asked for."""
    try:
        server = os.getppid()
        os.setsid()  # signals to the server's process group must not reach the child
        os.dup2(log, 1)
        os.dup2(log, 2)
        bindings = {child.PARENT_VARIABLE: str(server)}
        if groups is not None:
            groups = fcntl.fcntl(groups, fcntl.F_DUPFD, CHILD_DESCRIPTORS)  # out of the way of the next line
        inherited = os.dup2(connection, 3)
        bindings[child.FD_VARIABLE] = str(inherited)
        if groups is not None:
            inherited = os.dup2(groups, inherited + 1)
            bindings[child.GROUPS_VARIABLE] = str(inherited)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > inherited:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"] | bindings)
        arguments = [request["name"], str(request["supervisor"])]
        sys.argv[1:] = arguments
        _show([request["python"], "-m", "pyworker", *arguments])
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP has read that of the fork server
        child.main(run)
    finally:
        os._exit(1)


def _show(arguments: list[str]) -> None:
    """Have ps and /proc show these arguments, by overwriting those of this process as far as they reach."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(arguments).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _installed_files() -> list[tuple[int, int]]:
    """Identify the installed versions of pg_tensile and PyTorch by a file of each; none while one is missing."""
    import torch

    try:
        files = [Path(module.__file__ or "").stat() for module in (child, torch)]
    except OSError:  # an update is under way
        return []
    return [(file.st_ino, file.st_mtime_ns) for file in files]


def preload() -> None:
    """Import what jobs need, and capture once. Raises RuntimeError or OSError if this process is of no use to forks."""
    from pyworker.children.libraries import import_libraries

    gc.disable()
    import_libraries()
    for module in PRELOADS:
        importlib.import_module(module)
    importlib.import_module("pg_tensile.execution.training.warm_up").warm_up()
    child.versions()
    gc.freeze()  # a collection in a child would copy the pages of all that is imported
    gc.enable()
    os.close(os.pidfd_open(os.getpid()))  # raises OSError where the system has none
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"imports have started {threads - 1} threads, which do not survive a fork")


def main() -> None:
    """Run the fork server on the sockets of the command line."""
    child.die_of_interrupts()  # and so do the children, from their first moment
    python, path, listener, control = sys.argv[1:]
    mine = os.stat(path)
    try:
        preload()
        ForkServer(python, socket.socket(fileno=int(listener)), socket.socket(fileno=int(control))).run()
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), mine):  # not that of the next fork server
                os.unlink(path)


if __name__ == "__main__":
    main()
