"""Child processes of a supervisor: started by itself, or by the fork server on its behalf.

Both kinds have `pid`, `has_exited`, `kill` and `reap`, none of which blocks. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back from this process, and from those that it starts meanwhile until they are ready for it.

    An interpreter that has just been started would raise KeyboardInterrupt, which ends it with a status, as if it could
    not run; pyworker/child.py has the signal end it, also one that has come before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Process(Protocol):
    """A child process and its process group, which it leads."""

    pid: int

    def has_exited(self) -> bool:
        """Return whether the process has exited, without reaping it."""

    def kill(self) -> None:
        """Send SIGKILL to the process and its group."""

    def reap(self) -> int | None:
        """Return the exit code or the negative number of a signal, once the process has been reaped."""


class SpawnedProcess:
    """A process that this one has started."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], connection: int, log: int, *sockets: int
    ) -> None:
        """Start it with `connection` and `sockets` inherited and `log` as its output. Raises OSError, ValueError."""
        with interrupts_held():
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(connection, *sockets),
                start_new_session=True,  # signals to the supervisor's process group must not reach the child
            )
        self.pid = self._popen.pid

    def has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        return self._popen.poll()


class ForkedProcess:
    """A process that the fork server has forked; that server reaps it (pyworker/fork_server.py)."""

    def __init__(self, answer: bytes, descriptors: list[int], connection: socket.socket) -> None:
        """Take the fork server's answer with its descriptors, and the connection that it came by."""
        (self._pidfd,) = descriptors
        self._connection = connection
        self.pid = int(json.loads(answer)["pid"])

    def has_exited(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone, and the fork server, too
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def reap(self) -> int | None:
        try:
            answer = self._connection.recv(1 << 10)
        except BlockingIOError:
            return None
        except OSError:
            answer = b""
        if not answer and not self.has_exited():
            return None  # the fork server has died, and the kernel has not killed the process yet
        os.close(self._pidfd)
        self._connection.close()
        return int(json.loads(answer)["status"]) if answer else -signal.SIGKILL


def busy_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its reaped children, plus its threads' waiting time for a core.

    0 if the process is gone.
    """
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    delays = 0
    for thread in folder.glob("task/*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # the thread has ended, or the kernel does not count
            delays += int(thread.read_text().split()[1])
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + delays / 1e9


def describe_exit(code: int) -> str:
    """Describe an exit code, or the negative number of a signal, in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"
