"""A supervisor's child process and the connection to it: one class for every kind of child.

Two rules protect the server:

- Sending never blocks: frames wait in a queue while the child is writing itself, so the two cannot deadlock.
- A child ends with its supervisor, whichever ends first: `Child.close` kills the whole process group and has it reaped,
  and when the supervisor dies, the kernel kills the child (pyworker/child.py), or the fork server does that has started
  it (pyworker/fork_server.py).

A child's output goes to a memfd, not a file: nothing is left behind, and its tail shows why a child died.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pyworker.child import (
    FD_VARIABLE,
    GROUPS_VARIABLE,
    LOG_NAME,
    MEMORY_VARIABLE,
    NICE_VARIABLE,
    PARENT_VARIABLE,
    cut_output,
)
from pyworker.connection import Connection
from pyworker.supervisors.child_environment import child_environment
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_frame
from pyworker.supervisors.fork_server import ANSWER_LIMIT, fork
from pyworker.supervisors.processes import Process, SpawnedProcess, busy_seconds, describe_exit
from pyworker.supervisors.server import Server
from pyworker.version import VERSION
from pyworker.wire import Buffer, Frame, FrameType, ProtocolError

HELLO_TIMEOUT = 60.0  # seconds; an interpreter that takes longer to start cannot be used
LIGHT_LIMIT = 0.3  # seconds for the fork server to answer; starting a light child takes as long
EXIT_LIMIT = 2.0  # seconds that a child may take to exit when it has closed its connection
KILL_LIMIT = 10.0  # seconds after which SIGKILL has had no effect
BUSY_LIMIT = 1.0  # seconds without a wait, at most; cancel, stop and drop go unnoticed meanwhile
COMPUTING = 0.05  # share of its silence that a child must spend computing so as not to count as hung
MAX_SILENCES = 10  # time-outs after which a silent child is killed even if it computes
MODEL_PATH_VARIABLE = "PG_TENSILE_MODEL_PATH"  # the folder of pretrained models
LOG_TAIL = 64 << 10  # bytes; a fatal error prints the stacks of all threads, up to 100 lines each

unreaped: list[Process] = []  # children that SIGKILL has not ended yet


class Child:
    """One child process and the connection to it.

    `start` spawns it and shakes hands; `queue` and `receive` exchange frames; `close` ends it, always. Raises Failure
    if it cannot be started, ChildDied whenever it ends by itself or hangs.
    """

    def __init__(
        self,
        server: Server,
        name: str,
        *,
        threads: int,
        timeout: float = 0,
        environment: Mapping[str, str] | None = None,
        nice: int | None = None,
        forked: bool = False,
        is_light: bool = False,
        memory_flow: bool = False,
    ) -> None:
        """Prepare to run `pyworker/children/<name>.py` with `threads` computing threads.

        A child that is silent and computes nothing for `timeout` seconds counts as hung (0 means never). `environment`
        has further variables. `nice` lowers its priority, by default by pg_tensile.nice. `forked` has the fork server
        start it, if there is one; a child that imports little by itself (`is_light`) does not wait for one that is
        still importing. `memory_flow` gives it a socket on which it may ask for memory
        (csrc/processes/memory_flow_socket.c).
        """
        self._server = server
        self._name = name
        self._called = name.replace("_", " ")  # in messages
        limits = {
            NICE_VARIABLE: str(server.number("pg_tensile.nice") if nice is None else nice),
            MEMORY_VARIABLE: str(server.number("pg_tensile.child_memory") << 20),
            MODEL_PATH_VARIABLE: server.setting("pg_tensile.model_path"),
        }
        self._environment = child_environment(threads) | limits | dict(environment or {})
        self._timeout = timeout
        self._python = server.setting("pg_tensile.python")
        self._forked = forked
        self._fork_limit = LIGHT_LIMIT if is_light else ANSWER_LIMIT
        self._memory_flow = memory_flow
        self._groups: socket.socket | None = None  # on which it asks for memory
        self._process: Process | None = None
        self._connection: Connection | None = None
        self._log = -1
        self._heard = time.monotonic()
        self.torch: str | None = None  # its version of PyTorch
        self._silence: tuple[float, float] | None = None  # start of the current time-out, and busy_seconds then

    # -- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the child and exchange HELLO."""
        unreaped[:] = [process for process in unreaped if process.reap() is None]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._connection = Connection(ours)
        self._log = os.memfd_create(LOG_NAME)
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # writes go to the end, even after it was truncated
        with theirs, contextlib.ExitStack() as stack:
            sockets = [theirs.fileno()]
            if self._memory_flow:
                sockets.append(stack.enter_context(self._open_groups()).fileno())
            if self._forked:
                descriptors = sockets[0], self._log, *sockets[1:]
                request = self._python, self._name, self._environment, descriptors
                self._process = await fork(self._server, *request, self._fork_limit)
            if self._process is None:
                self._process = self._spawn(*sockets)
        self._connection.queue(FrameType.HELLO, header={"version": VERSION})
        self._check_hello(await self._first_frame())

    def _open_groups(self) -> socket.socket:
        """Have the process serve the child's requests for memory while it waits; return the child's end."""
        self._groups, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.call("tensile_worker._group_socket(int4)", self._groups.fileno())
        self._server.commit()
        return theirs

    def _spawn(self, connection: int, *groups: int) -> SpawnedProcess:
        bindings = {FD_VARIABLE: str(connection), PARENT_VARIABLE: str(os.getpid())}
        if groups:
            bindings[GROUPS_VARIABLE] = str(groups[0])
        command = [self._python, "-m", "pyworker", self._name, str(os.getpid())]
        try:
            return SpawnedProcess(command, self._environment | bindings, connection, self._log, *groups)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise self._unusable(f'cannot start "{self._python}": {reason}') from error

    async def close(self) -> None:
        """Kill the child with everything it started, and reap it."""
        try:
            await self._end()
        finally:
            self._close_groups()
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    def _close_groups(self) -> None:
        """Give back the memory that the child held, which is gone."""
        if self._groups is None:
            return
        try:
            self._server.call("tensile_worker._group_socket(int4)", -1)
            self._server.commit()
        except self._server.plpy.SPIError:
            self._server.rollback()
            return  # the extension was dropped: the process ends, and its socket must be valid until then
        self._groups.close()
        self._groups = None

    async def _end(self) -> int | None:
        """Kill the child and return its exit code, or None if there is no child or it cannot be reaped.

        A child that is stuck in a device's driver must not hold up its supervisor: the next start of a child reaps it,
        or init.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        code: int | None = None

        def reaped() -> bool:
            nonlocal code
            code = process.reap()
            return code is not None

        if await self._server.until(reaped, KILL_LIMIT):
            return code
        unreaped.append(process)
        self._server.log_once(f"the {self._called} (PID {process.pid}) does not end: SIGKILL has had no effect")
        return None

    async def _first_frame(self) -> Frame:
        deadline = time.monotonic() + HELLO_TIMEOUT
        while time.monotonic() < deadline:
            try:
                frame = await self.receive(1)
            except ChildDied as death:
                if death.code is None or death.code < 0:
                    raise  # killed, which may be temporary
                raise self._unusable(f'"{self._python}" cannot run the {self._called}: {death.reason}') from death
            if frame is not None:
                return frame
            if self._server.stopping:
                raise Stopped
        raise self._unusable(f'"{self._python}" did not start the {self._called} within {HELLO_TIMEOUT:.0f} s')

    def _check_hello(self, frame: Frame) -> None:
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        if frame.type != FrameType.HELLO:
            raise Failure("08P01", f"the {self._called}'s first frame is not HELLO")
        if frame.header.get("version") != VERSION:
            raise Failure(
                "55000",
                f"the {self._called} has version {frame.header.get('version')} of pg_tensile, the server has {VERSION}",
                hint="Run make install, then restart the server.",
            )
        if not frame.header.get("torch"):
            raise self._unusable(f'the Python of the {self._called}, "{self._python}", has no PyTorch')
        self.torch = str(frame.header["torch"])

    def _unusable(self, message: str) -> Failure:
        hint = "Set pg_tensile.python to a Python 3.11 or later that has PyTorch and that the server's user can run."
        return Failure("58P01", message, hint=hint, traceback=self.output() or None)

    # -- frames -------------------------------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Supervisor's end of the connection: a non-blocking socket's descriptor."""
        assert self._connection is not None
        return self._connection.fileno()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _has_exited(self) -> bool:
        assert self._process is not None
        return self._process.has_exited()

    def queue(
        self,
        type: FrameType,
        job: int = 0,
        rank: int = 0,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        """Append a frame to the queue, which `receive` and `drain` send."""
        assert self._connection is not None
        self._connection.queue(type, job, rank, header, buffers)

    async def drain(self) -> AsyncIterator[Frame]:
        """Send the whole queue, yielding the frames that arrive meanwhile. Raises Stopped."""
        while not self._flush():
            frame = await self.receive(1)
            if frame is not None:
                yield frame
            if self._server.stopping:
                raise Stopped

    async def receive(self, seconds: float) -> Frame | None:
        """Return the child's next frame, or None if something else ended the wait (time-out, latch, STOP).

        Raises ChildDied.
        """
        frame = self._poll()
        if frame is None:
            await self._server.wait(self.fd, seconds, writable=not self._flush())
            exited = self._has_exited()  # checked first, so that frames sent before it died are read
            frame = self._poll()
            if frame is None:
                await self._check_alive(exited)
            self._check_requests()
        elif time.monotonic() - self._server.resumed_at > BUSY_LIMIT:
            await self._server.wait(self.fd, 0)
        cut_output(self._log)
        if frame is not None:
            self.restart_timeout()
        return frame

    def restart_timeout(self) -> None:
        """Restart the child's time-out: it was heard, or the supervisor was busy and did not listen."""
        self._heard = time.monotonic()
        self._silence = None

    def _poll(self) -> Frame | None:
        assert self._connection is not None
        try:
            return self._connection.poll()
        except ProtocolError as error:
            if self._connection.closed:
                return None  # it died within a frame
            message = f"the {self._called} broke the protocol: {error}"
            raise Failure("08P01", message, traceback=self.output() or None) from error

    def _flush(self) -> bool:
        assert self._connection is not None
        try:
            return self._connection.flush()
        except OSError:
            return True  # its end is closed: reading will return its last frames and show how it died

    async def _check_alive(self, exited: bool) -> None:
        assert self._connection is not None
        if exited or self._connection.closed:
            raise await self._death()
        if self._timeout:
            self._check_hung()

    def _check_hung(self) -> None:
        """Raise ChildDied if the child has been silent for the time-out without computing.

        While it captures a graph, or in one long step, it sends nothing; but it computes, which a deadlock does not. A
        child that computes without end is killed, too, after MAX_SILENCES times the time-out.
        """
        now, computed = time.monotonic(), busy_seconds(self.pid)
        since, before = self._silence = self._silence or (now, computed)
        if now - since <= self._timeout:
            return
        self._silence = (now, computed)
        if self._waits_for_memory():
            self.restart_timeout()
            return
        if computed - before < COMPUTING * (now - since):
            reason = f"sent nothing for {self._timeout:.0f} s (pg_tensile.executor_timeout) and was killed"
        elif now - self._heard > MAX_SILENCES * self._timeout:
            reason = f"computed for {now - self._heard:.0f} s without sending anything and was killed"
        else:
            return
        raise ChildDied(f"{self._called} {reason}", self.output() or None)

    def _waits_for_memory(self) -> bool:
        """Return whether the child has asked for memory that it does not have yet."""
        return self._groups is not None and bool(self._flow_state()["waits"])

    def _flow_state(self) -> dict[str, Any]:
        (state,) = self._server.rows("SELECT * FROM tensile_worker._flow_state()")
        self._server.commit()
        return state

    def _check_requests(self) -> None:
        """Raise what it means that the child's requests for memory are not served any more."""
        if self._groups is None or not self._server.flow_fault:
            return
        self._server.flow_fault = False
        state = self._flow_state()
        if state["late"]:
            raise ChildDied(f"{self._called} {state['fault']}", self.output() or None)
        if state["fault"] is not None:
            message = f"the {self._called} broke the protocol: {state['fault']}"
            raise Failure("08P01", message, traceback=self.output() or None)

    async def _death(self) -> ChildDied:
        """Wait for the exit to complete, kill what the child started, and return how it died."""
        reason = "closed its connection and had to be killed"
        # Its socket is closed, so it is exiting. Until it is reaped, its process group's number cannot be reused.
        exited = await self._server.until(self._has_exited, EXIT_LIMIT)
        code = await self._end()
        if exited and code is not None:
            reason = describe_exit(code)
        return ChildDied(f"{self._called} {reason}", self.output() or None, code)

    def output(self) -> str:
        """Return the tail of what the child wrote to its standard output and error."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace").strip()
