"""The controller's fork server, and the requests of other supervisors to it (pyworker/fork_server.py).

Its socket is among the server's temporary files, where only the server's user can connect. Whatever keeps the fork
server from answering, a supervisor starts its child itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from pyworker.supervisors.child_environment import child_environment, spool_folder
from pyworker.supervisors.processes import ForkedProcess, describe_exit, interrupts_held
from pyworker.supervisors.server import Server

SOCKET = "pgsql_tmp.pg_tensile_fork"  # a start of the server removes files with PostgreSQL's prefix
ANSWER_LIMIT = 60.0  # seconds; the imports come before the first answer
FAILURE_PAUSE = 60.0  # seconds before another attempt after a fork server that could not start
BACKLOG = 256  # largest pg_tensile.max_jobs


class ForkServer:
    """The fork server of this database server, kept by the controller."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._python = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._retired: list[subprocess.Popen[bytes]] = []  # those that end with their last child
        self._control: socket.socket | None = None
        self._start_after = 0.0

    def ensure(self) -> None:
        """Have a fork server for the current settings running, or none if they say so."""
        self.reap()
        wanted = self._server.setting("pg_tensile.fork_server") == "on"
        python = self._server.setting("pg_tensile.python")
        if not wanted or python != self._python:
            self.close()
        if python != self._python:  # which may work where the other one has failed
            self._python, self._start_after = python, 0.0
        if wanted and self._process is None and time.monotonic() >= self._start_after:
            self._start(python)

    def reap(self) -> None:
        """Reap fork servers that have ended, and log the end of one that has failed."""
        self._retired = [process for process in self._retired if process.poll() is None]
        code = None if self._process is None else self._process.poll()
        if code is None:
            return
        if code:
            self._server.log_once(f"the fork server of {self._python} {describe_exit(code)}")
        if code > 0:
            self._start_after = time.monotonic() + FAILURE_PAUSE
        self.close()

    def _start(self, python: str) -> None:
        path = spool_folder() / SOCKET
        path.unlink(missing_ok=True)
        ours, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, theirs:
            listener.setblocking(False)
            listener.bind(_address())
            listener.listen(BACKLOG)
            descriptors = listener.fileno(), theirs.fileno()
            try:
                with interrupts_held():
                    self._process = subprocess.Popen(
                        [python, "-m", "pyworker.fork_server", python, _address(), *map(str, descriptors)],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=child_environment(threads=1),
                        pass_fds=descriptors,
                        start_new_session=True,
                    )
            except (OSError, ValueError):
                ours.close()
                path.unlink(missing_ok=True)  # one that has ended removes it as well
                self._start_after = time.monotonic() + FAILURE_PAUSE  # the job's own attempt tells what is wrong
            else:
                self._control = ours

    def close(self) -> None:
        """Have the fork server end as soon as it has no more children."""
        if self._process is not None and self._control is not None:
            (spool_folder() / SOCKET).unlink(missing_ok=True)
            self._control.close()
            self._retired.append(self._process)
            self._process = None


def _address() -> str:
    """Return the socket's path, relative to the data directory because sockets allow 107 bytes."""
    return os.path.relpath(spool_folder() / SOCKET)


async def fork(
    server: Server,
    python: str,
    name: str,
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    limit: float = ANSWER_LIMIT,
) -> ForkedProcess | None:
    """Have the fork server start a child with these descriptors (connection, log, and perhaps the group socket).

    Returns None if there is no fork server, or none that can do it within `limit` seconds. Raises what `Server.wait`
    raises.
    """
    request = {"python": python, "name": name, "supervisor": os.getpid(), "environment": environment}
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.setblocking(False)
        try:
            connection.connect(_address())
            socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        except OSError:
            return None
        answer = None
        deadline = time.monotonic() + limit
        while answer is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or server.stopping:
                return None
            await server.wait(connection.fileno(), remaining)
            try:
                answer, received, _, _ = socket.recv_fds(connection, 1 << 10, 1)
            except BlockingIOError:
                continue
            except OSError:
                return None
        if not answer:
            return None
        stack.pop_all()
        return ForkedProcess(answer, received, connection)
