"""Foundation of all supervisors: the server seen through PL/Python, and one class for every kind of child process.

A supervisor is a coroutine inside a background worker. `step` starts and resumes it, once in each CALL of
tensile._step; what it awaits (`Server.wait`) is that CALL's row, and the process waits for it when the CALL has ended
(csrc/step.c). A supervisor never imports heavy modules: its child does, whose death is an event like any other. Three
rules protect the server:

- Waiting is `await`, nothing else; it ends the transaction. So no snapshot and no xmin is held while a child works, and
  the statistics of what was written are reported.
- Sending never blocks: frames wait in a queue while the child is writing itself, so the two cannot deadlock.
- A child ends with its supervisor, whichever ends first: `Child.close` kills the whole process group and reaps it, and
  the child has the kernel send it SIGKILL when its parent dies (pyworker/child.py).

A child's output goes to a memfd, not a file: nothing is left behind, and its tail shows why a child died.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import inspect
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from enum import IntFlag
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pyworker.child import FD_VARIABLE, LOG_NAME, MEMORY_VARIABLE, NICE_VARIABLE, PARENT_VARIABLE, cut_output
from pyworker.version import VERSION
from pyworker.wire import Buffer, Connection, Frame, FrameType, ProtocolError

HELLO_TIMEOUT = 60.0  # seconds; an interpreter that takes longer to start cannot be used
EXIT_LIMIT = 2.0  # seconds that a child may take to exit when it has closed its connection
KILL_LIMIT = 10.0  # seconds after which SIGKILL has had no effect
BUSY_LIMIT = 1.0  # seconds without a wait, at most; cancel, stop and drop go unnoticed meanwhile
COMPUTING = 0.05  # share of its silence that a child must spend computing so as not to count as hung
MAX_SILENCES = 10  # time-outs after which a silent child is killed even if it computes
LOG_TAIL = 64 << 10  # bytes; a fatal error prints the stacks of all threads, up to 100 lines each
PYTHON_FOLDER = Path(__file__).resolve().parents[2]


class Wait(IntFlag):
    """Causes of the end of a wait (csrc/wait.h)."""

    READABLE = 1
    WRITABLE = 2
    LATCH = 4
    TIMEOUT = 8
    STOP = 16
    GONE = 32
    CANCEL = 64


class Request(NamedTuple):
    """Arguments of the wait that follows a step of a supervisor."""

    fd: int
    timeout_ms: int | None  # None means that there is no next step
    writable: bool


DONE = Request(-1, None, False)


class Gone(Exception):
    """The extension, or the role this process runs as, was dropped: leave at once and touch nothing."""


class CancelRequest(Exception):
    """pg_cancel_backend was called while the supervisor waited."""

    def __init__(self) -> None:
        super().__init__("canceling statement due to user request")


class Stopped(Exception):
    """SIGTERM came before there was anything to save."""


class Failure(Exception):
    """A job or request fails for good; the fields are those of a PostgreSQL error."""

    def __init__(
        self,
        sqlstate: str,
        message: str,
        *,
        hint: str | None = None,
        detail: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message
        self.hint = hint
        self.detail = detail
        self.traceback = traceback


class ChildDied(Exception):
    """The child ended, or had to be killed, without having sent an ERROR frame.

    `traceback` is the tail of its output, `code` its `subprocess.Popen.returncode`; each is None if it is not known.
    """

    def __init__(self, reason: str, traceback: str | None, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.traceback = traceback
        self.code = code


def failure_of_sql(error: Any) -> Failure:
    """Return the PostgreSQL error behind a plpy.SPIError."""
    spidata = getattr(error, "spidata", None) or (None, None, None)
    code, detail, hint = spidata[:3]
    sqlstate = getattr(error, "sqlstate", "XX000") if code is None else unpack_sqlstate(code)
    return Failure(sqlstate, str(error), hint=hint, detail=detail)


def unpack_sqlstate(code: int) -> str:
    """Return the five characters of a SQLSTATE in PostgreSQL's packed form, six bits each."""
    return "".join(chr(ord("0") + (code >> 6 * position & 0x3F)) for position in range(5))


def failure_of_frame(header: Mapping[str, Any]) -> Failure:
    """Return the failure that a child's ERROR frame reports.

    A SQLSTATE that the server could not raise (csrc/owner.c) becomes XX000.
    """
    sqlstate = header.get("sqlstate")
    if not isinstance(sqlstate, str) or not re.fullmatch("(?!0[0-2])[0-9A-Z]{5}", sqlstate):
        sqlstate = "XX000"
    text = {key: str(header[key]) for key in ("hint", "detail", "traceback") if header.get(key)}
    return Failure(sqlstate, str(header.get("message") or "the child gave no message"), **text)


@types.coroutine
def suspend(request: Request) -> Generator[Request, Wait, Wait]:
    """End the step; return what ended the wait that follows it."""
    return (yield request)


_supervisor: Coroutine[Request, Wait, None] | None = None  # of this process; None before its first step


def step(plpy: Any, process: str, bits: int) -> Request:
    """Start or resume this process's supervisor: the body of `tensile._step`.

    The module `pyworker.supervisors.<process>` has the coroutine `run(plpy)`; `bits` are those of the wait that has
    ended.
    """
    global _supervisor
    if _supervisor is None:
        _supervisor = importlib.import_module(f"pyworker.supervisors.{process}").run(plpy)
        return _resume(_supervisor, None)
    if inspect.getcoroutinestate(_supervisor) == inspect.CORO_CLOSED:
        return DONE  # it ended with an error that did not end the process
    return _resume(_supervisor, Wait(bits))


def _resume(supervisor: Coroutine[Request, Wait, None], bits: Wait | None) -> Request:
    try:
        return supervisor.send(bits)  # type: ignore[arg-type]
    except StopIteration:
        return DONE


class Server:
    """The server through PL/Python: prepared calls, commits, waiting. One per process."""

    def __init__(self, plpy: Any) -> None:
        self.plpy = plpy
        self.stopping = False  # SIGTERM has come; never reset
        self.woken = False  # the latch was set: something may have changed; reset by the code that checks
        self.resumed_at = time.monotonic()  # when the last wait ended
        self._plans: dict[str, Any] = {}
        self._logged: set[str] = set()
        row = plpy.execute(
            "SELECT pg_catalog.current_setting('server_encoding') AS encoding, tensile._version() AS library,"
            " (SELECT oid FROM pg_catalog.pg_extension WHERE extname = 'pg_tensile') AS extension"
        )[0]
        self._utf8 = row["encoding"] in ("UTF8", "SQL_ASCII")
        self._library = row["library"]
        self._extension = row["extension"]

    def check_version(self) -> None:
        """Raise Failure unless these files have the version of the library that the server has loaded."""
        if self._library != VERSION:
            message = f"the Python files of pg_tensile have version {VERSION}, the server's library has {self._library}"
            raise Failure("55000", message, hint="Run make install, then restart the server.")

    def rows(self, sql: str, types: Sequence[str] = (), *values: Any) -> list[dict[str, Any]]:
        """Return the rows of a query, which is prepared at its first use."""
        plan = self._plans.get(sql)
        if plan is None:
            plan = self._plans[sql] = self.plpy.prepare(sql, list(types))
        return list(self.plpy.execute(plan, list(values)))

    def call(self, signature: str, *values: Any) -> Any:
        """Return a function's value: `call("tensile._job_metric(jsonb)", {...})`; jsonb is encoded here."""
        name, _, types = signature.rstrip(")").partition("(")
        names = [type for type in types.split(",") if type]
        parameters = ", ".join(f"${number}" for number in range(1, len(names) + 1))
        plain = [self.json(value) if type == "jsonb" else value for type, value in zip(names, values, strict=True)]
        return self.rows(f"SELECT {name}({parameters}) AS value", names, *plain)[0]["value"]

    def setting(self, name: str) -> str:
        return str(self.call("pg_catalog.current_setting(text)", name))

    def number(self, name: str) -> int:
        """Return a numeric setting in its base unit (pg_settings.unit: MB are MB, milliseconds are milliseconds)."""
        sql = "SELECT setting AS value FROM pg_catalog.pg_settings WHERE name = $1"
        return int(self.rows(sql, ["text"], name)[0]["value"])

    def commit(self) -> None:
        self.plpy.commit()

    def rollback(self) -> None:
        self.plpy.rollback()

    def log_once(self, cause: str) -> None:
        """Write one line per cause to the server's log, until `log_again`."""
        if cause not in self._logged:
            self._logged.add(cause)
            self.plpy.log(f"pg_tensile: {cause}")

    def log_again(self) -> None:
        """Have `log_once` log all causes anew: what was wrong is over, so a recurrence is news."""
        self._logged.clear()

    async def wait(self, fd: int, seconds: float, writable: bool = False) -> Wait:
        """End the transaction and wait until the socket is ready, the latch is set or `seconds` have passed.

        An `fd` of -1 means no socket. Raises Gone and CancelRequest.
        """
        bits = await self._suspend(fd, seconds, writable)
        if bits & Wait.GONE:
            raise Gone
        if bits & Wait.CANCEL:
            raise CancelRequest
        return bits

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass, whatever happens meanwhile, or less if the supervisor is to stop. Raises Gone."""
        end = time.monotonic() + seconds
        while not self.stopping and (left := end - time.monotonic()) > 0:
            if await self._suspend(-1, left) & Wait.GONE:
                raise Gone

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Poll the condition until it is true or `seconds` have passed (one if the supervisor is to stop); return it.

        Cancellation and drops raise nothing here, because cleaning up must go on in spite of them.
        """
        start, pause = time.monotonic(), 0.005
        while not (true := condition()):
            if time.monotonic() - start > (min(1.0, seconds) if self.stopping else seconds):
                break
            await self._suspend(-1, pause)
            pause = min(2 * pause, 0.1)
        return true

    async def _suspend(self, fd: int, seconds: float, writable: bool = False) -> Wait:
        bits = await suspend(Request(fd, max(0, math.ceil(seconds * 1000)), writable))
        self.resumed_at = time.monotonic()
        self.stopping = self.stopping or bool(bits & Wait.STOP)
        self.woken = self.woken or bool(bits & Wait.LATCH)
        return bits

    async def loop(self, turn: Callable[[], Awaitable[float]]) -> None:
        """Call `turn` until STOP or GONE, each time sleeping for the seconds that it returns or until the latch is set.

        An SQL error is logged once per cause and ends only its turn; while errors last, the pause doubles up to 30 s.
        """
        try:
            self.check_version()
        except Failure as failure:
            self.plpy.error(failure.message, sqlstate=failure.sqlstate, hint=failure.hint)
        pause = 1.0
        while not self.stopping:
            try:
                await self.wait(-1, await turn())
                pause = 1.0
            except Gone:
                return
            except (self.plpy.SPIError, CancelRequest) as error:
                self.rollback()
                if not self.installed():
                    return
                self.log_once(str(error))
                try:
                    await self.sleep(pause)
                except Gone:
                    return
                pause = min(2 * pause, 30.0)

    def installed(self) -> bool:
        """Return whether the extension still exists; one that was dropped and created again does not count.

        Called after a failure that DROP EXTENSION would explain.
        """
        sql = "SELECT 1 FROM pg_catalog.pg_extension WHERE extname = 'pg_tensile' AND oid = $1"
        return bool(self.rows(sql, ["oid"], self._extension))

    def text(self, value: str | None) -> str | None:
        """Return a child's text as the server can store it."""
        if value is None:
            return None
        errors = ("utf-8", "replace") if self._utf8 else ("ascii", "backslashreplace")
        return value.encode(*errors).decode(errors[0]).replace("\0", "")

    @staticmethod
    def json(value: Any) -> str:
        """Return JSON that jsonb takes: strings without NUL and lone surrogates."""

        def clean(item: Any) -> Any:
            if isinstance(item, str):
                return item.encode("utf-8", "replace").decode().replace("\0", "")
            if isinstance(item, dict):
                return {clean(key): clean(part) for key, part in item.items()}
            return [clean(part) for part in item] if isinstance(item, (list, tuple)) else item

        return json.dumps(clean(value))


unreaped: list[subprocess.Popen[bytes]] = []  # children that SIGKILL has not ended yet


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
        nice: bool = True,
    ) -> None:
        """Prepare to run `pyworker/children/<name>.py` with `threads` computing threads.

        A child that is silent and computes nothing for `timeout` seconds counts as hung (0 means never). `environment`
        has further variables; `nice` says whether pg_tensile.nice applies.
        """
        self._server = server
        self._name = name
        limits = {
            NICE_VARIABLE: str(server.number("pg_tensile.nice") if nice else 0),
            MEMORY_VARIABLE: str(server.number("pg_tensile.child_memory") << 20),
        }
        self._environment = child_environment(threads) | limits | dict(environment or {})
        self._timeout = timeout
        self._python = server.setting("pg_tensile.python")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log = -1
        self._heard = time.monotonic()
        self._silence: tuple[float, float] | None = None  # start of the current time-out, and busy_seconds then

    # -- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the child and exchange HELLO."""
        unreaped[:] = [process for process in unreaped if process.poll() is None]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._connection = Connection(ours)
        self._log = os.memfd_create(LOG_NAME)
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # writes go to the end, even after it was truncated
        with theirs:
            bindings = {FD_VARIABLE: str(theirs.fileno()), PARENT_VARIABLE: str(os.getpid())}
            try:
                self._process = subprocess.Popen(
                    [self._python, "-m", "pyworker", self._name],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env=self._environment | bindings,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # signals to the supervisor's process group must not reach the child
                )
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise self._unusable(f'cannot start "{self._python}": {reason}') from error
        self._connection.queue(FrameType.HELLO, header={"version": VERSION})
        self._check_hello(await self._first_frame())

    async def close(self) -> None:
        """Kill the child with everything it started, and reap it."""
        try:
            await self._end()
        finally:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._log >= 0:
                os.close(self._log)
                self._log = -1

    async def _end(self) -> int | None:
        """Kill the child and return its exit code, or None if there is no child or it cannot be reaped.

        A child that is stuck in a device's driver must not hold up its supervisor: the next start of a child reaps it,
        or init.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if await self._server.until(partial(has_exited, process.pid), KILL_LIMIT):
            return process.wait()  # returns at once
        unreaped.append(process)
        self._server.log_once(f"the {self._name} (PID {process.pid}) does not end: SIGKILL has had no effect")
        return None

    async def _first_frame(self) -> Frame:
        deadline = time.monotonic() + HELLO_TIMEOUT
        while time.monotonic() < deadline:
            try:
                frame = await self.receive(1)
            except ChildDied as death:
                if (death.code or 0) < 0:
                    raise  # killed, which may be temporary
                raise self._unusable(f'"{self._python}" cannot run the {self._name}: {death.reason}') from death
            if frame is not None:
                return frame
            if self._server.stopping:
                raise Stopped
        raise self._unusable(f'"{self._python}" did not start the {self._name} within {HELLO_TIMEOUT:.0f} s')

    def _check_hello(self, frame: Frame) -> None:
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        if frame.type != FrameType.HELLO:
            raise Failure("08P01", f"the {self._name}'s first frame is not HELLO")
        if frame.header.get("version") != VERSION:
            raise Failure(
                "55000",
                f"the {self._name} has version {frame.header.get('version')} of pg_tensile, the server has {VERSION}",
                hint="Run make install, then restart the server.",
            )
        if not frame.header.get("torch"):
            raise self._unusable(f'the Python of the {self._name}, "{self._python}", has no PyTorch')

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
            exited = has_exited(self.pid)  # checked first, so that frames sent before it died are read
            frame = self._poll()
            if frame is None:
                await self._check_alive(exited)
        elif time.monotonic() - self._server.resumed_at > BUSY_LIMIT:
            await self._server.wait(self.fd, 0)
        cut_output(self._log)
        if frame is not None:
            self.patience()
        return frame

    def patience(self) -> None:
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
            message = f"the {self._name} broke the protocol: {error}"
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
        if computed - before < COMPUTING * (now - since):
            reason = f"sent nothing for {self._timeout:.0f} s (pg_tensile.executor_timeout) and was killed"
        elif now - self._heard > MAX_SILENCES * self._timeout:
            reason = f"computed for {now - self._heard:.0f} s without sending anything and was killed"
        else:
            return
        raise ChildDied(f"{self._name} {reason}", self.output() or None)

    async def _death(self) -> ChildDied:
        """Wait for the exit to complete, kill what the child started, and return how it died."""
        reason = "closed its connection and had to be killed"
        # Its socket is closed, so it is exiting. Until it is reaped, its process group's number cannot be reused.
        exited = await self._server.until(partial(has_exited, self.pid), EXIT_LIMIT)
        code = await self._end()
        if exited and code is not None:
            reason = describe_exit(code)
        return ChildDied(f"{self._name} {reason}", self.output() or None, code)

    def output(self) -> str:
        """Return the tail of what the child wrote to its standard output and error."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace").strip()


def has_exited(pid: int) -> bool:
    """Return whether a child has exited, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


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
    """Describe a `subprocess.Popen.returncode` in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


def child_environment(threads: int) -> dict[str, str]:
    """Return the server's environment without PostgreSQL's variables (passwords among them) and another Python's."""
    foreign = ("PG", "PYTHON", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return inherited | {
        "PYTHONPATH": str(PYTHON_FOLDER),
        "PYTHONSAFEPATH": "1",  # keeps the working directory, the data directory, out of sys.path
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Long spinning makes a step ten times as slow when another process wants a core; no spinning makes it twice as
        # slow when none does.
        "GOMP_SPINCOUNT": "5000",
        "MKL_NUM_THREADS": str(threads),
    }


def spool_folder() -> Path:
    """Return the server's folder for temporary files: backups omit it, and a start of the server cleans it."""
    folder = Path.cwd() / "base" / "pgsql_tmp"  # in the data directory
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
