"""The supervisor of explain_training: a dry run of a job's executor inside the caller's session.

It runs in the middle of the caller's transaction, so nothing is committed, and waiting keeps the transaction's
snapshots: the coroutines are those of a background worker, but `Session.drive` waits for what they await, by
tensile._explain_wait. The query's rows are read with the caller's rights (tensile._explain_feed has the query already).
Cancel and time-out are raised by a wait or by the query; in every case, the executor is gone when `run` returns.

Errors are returned as columns, not raised: PL/Python would put its exception's name in front of the message.

Standard library only.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied, Failure, failure_of_frame, failure_of_sql
from pyworker.supervisors.job.spec import choose_threads, explanation_spec
from pyworker.supervisors.server import Server
from pyworker.supervisors.supervisor import Request, Wait
from pyworker.wire import FrameType, ProtocolError

TICK = 1.0  # seconds of a wait
CONNECTION_ERRORS = "08"  # a class of SQLSTATEs
UNEXPLAINED = ("08", "38", "58", "XX")
ERROR_COLUMNS = ("sqlstate", "message", "hint", "detail", "traceback")

Result = TypeVar("Result")


class Session(Server):
    """An ordinary session, whose transaction is the caller's to end."""

    def drive(self, supervisor: Coroutine[Request, Wait, Result]) -> Result:
        """Run the coroutine and return its result.

        An error of a wait is raised where the coroutine waits, so that it ends its child.
        """
        resume: Callable[[], Request] = partial(supervisor.send, None)  # type: ignore[arg-type]
        while True:
            try:
                request = resume()
            except StopIteration as end:
                return cast(Result, end.value)
            try:
                bits = self.call("tensile._explain_wait(int4,int4,bool)", *request)
                resume = partial(supervisor.send, Wait(bits))
            except self.plpy.SPIError as error:
                resume = partial(supervisor.throw, error)

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass


def run(plpy: Any, spec: str) -> dict[str, Any]:
    """Return the columns of `tensile._explain(spec, folder)`; `spec` is made by tensile._explain_training."""
    server = Session(plpy)
    request = json.loads(spec)
    try:
        header = server.drive(_dry_run(server, request))
    except ChildDied as death:
        hint = "The server's log may say more."
        return _error(server, Failure("58000", death.reason, hint=hint, traceback=death.traceback))
    except Failure as failure:
        return _error(server, failure)
    except ProtocolError as error:
        return _error(server, Failure("08P01", f"the executor broke the protocol: {error}"))
    except plpy.SPIError as error:
        return _error(server, failure_of_sql(error))
    except Exception as error:
        return _error(server, Failure("XX000", f"the supervisor failed: {error!r}", traceback=traceback.format_exc()))
    lines = header["lines"] if request["format"] == "text" else [json.dumps(header["explanation"])]
    return {"lines": [server.text(line) for line in lines]} | dict.fromkeys(ERROR_COLUMNS)


def _error(server: Server, failure: Failure) -> dict[str, Any]:
    """Return the columns of an error, with the child's traceback only if its cause is not explained otherwise."""
    if failure.sqlstate[:2] not in UNEXPLAINED and "traceback" not in (failure.hint or ""):
        failure.traceback = None
    return {"lines": None} | {column: server.text(getattr(failure, column)) for column in ERROR_COLUMNS}


async def _dry_run(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """Run the executor; return the header of its EXPLANATION frame."""
    threads = choose_threads(server, request["options"])
    timeout = float(server.number("pg_tensile.executor_timeout"))
    child = Child(server, "executor", threads=threads, timeout=timeout)
    try:
        server.check_version()
        await child.start()
        models = server.rows("SELECT device, models FROM tensile._explain_latency_models()")
        header = explanation_spec(server, request, threads) | {"latency_models": [row["device"] for row in models]}
        child.queue(FrameType.JOB, header=header, buffers=[row["models"] for row in models])
        async for frame in child.drain():
            _is_explanation(frame.type, frame.header)
        await _feed(server, child)
        return await _listen(child)
    finally:
        await child.close()


async def _feed(server: Server, child: Child) -> None:
    """Send the query's rows to the executor.

    If the executor dies meanwhile, its error or death is raised, not the broken connection that the query saw.
    """
    try:
        server.call("tensile._explain_feed(int4)", child.fd)
    except server.plpy.spiexceptions.QueryCanceled:
        raise
    except server.plpy.SPIError as error:
        failure = failure_of_sql(error)
        if failure.sqlstate.startswith(CONNECTION_ERRORS):
            await _handle_remaining_frames(child)
        raise failure from None
    child.restart_timeout()


async def _handle_remaining_frames(child: Child) -> None:
    """Read the frames that are left, so that an error of the executor is raised."""
    while (frame := await child.receive(TICK)) is not None:
        _is_explanation(frame.type, frame.header)


async def _listen(child: Child) -> dict[str, Any]:
    while True:
        frame = await child.receive(TICK)
        if frame is not None and _is_explanation(frame.type, frame.header):
            return frame.header


def _is_explanation(type: FrameType, header: dict[str, Any]) -> bool:
    """Return whether the frame is the explanation. Raises what the executor raised."""
    if type == FrameType.ERROR:
        raise failure_of_frame(header)
    if type not in (FrameType.PROGRESS, FrameType.EXPLANATION):
        raise ProtocolError(f"unexpected {type.name} frame")
    return type == FrameType.EXPLANATION
