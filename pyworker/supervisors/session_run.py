"""The supervisor of functions that run a trainer inside the caller's session, most of them on the rows of a query.

It runs in the middle of the caller's transaction, so nothing is committed, and waiting keeps the transaction's
snapshots: the coroutines are those of a background worker, but `Session.drive` waits for what they await, by
tensile_worker._session_wait. The query's rows are read with the caller's rights (tensile_worker._session_feed has the
query already).
Cancel and time-out are raised by a wait or by the query; in every case, the trainer is gone when `run` returns.

The kind of trainer decides what it needs before the rows (`OPENINGS`). Its RESULT frames have the rows of the public
function's result. Errors are returned as columns, not raised: PL/Python would put its exception's name in front of the
message.

Standard library only.
"""

from __future__ import annotations

import json
import time
import traceback
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.evaluation import Result, drain, send_version
from pyworker.supervisors.failures import ChildDied, Failure, failure_of_sql
from pyworker.supervisors.job.spec import choose_threads, session_spec
from pyworker.supervisors.server import Server
from pyworker.supervisors.supervisor import Request, Wait
from pyworker.wire import FrameType, ProtocolError

TICK = 1.0  # seconds of a wait
ONNX_NOTICE, ONNX_LIMIT = 30.0, 600.0  # seconds: an export says that it continues, the time doubled each time, and ends
CONNECTION_ERRORS = "08"  # a class of SQLSTATEs
UNEXPLAINED = ("08", "38", "58", "XX")
ERROR_COLUMNS = ("sqlstate", "message", "hint", "detail", "traceback")

Value = TypeVar("Value")


class Session(Server):
    """An ordinary session, whose transaction is the caller's to end."""

    def drive(self, supervisor: Coroutine[Request, Wait, Value]) -> Value:
        """Run the coroutine and return its result.

        An error of a wait is raised where the coroutine waits, so that it ends its child.
        """
        resume: Callable[[], Request] = partial(supervisor.send, None)  # type: ignore[arg-type]
        while True:
            try:
                request = resume()
            except StopIteration as end:
                return cast(Value, end.value)
            try:
                bits = self.call("tensile_worker._session_wait(int4,int4,bool)", *request)
                resume = partial(supervisor.send, Wait(bits))
            except self.plpy.SPIError as error:
                resume = partial(supervisor.throw, error)

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass


def run(plpy: Any, spec: str) -> dict[str, Any]:
    """Return the columns of `tensile_internal._session_run(spec, folder)`."""
    server = Session(plpy)
    try:
        rows = server.drive(_run_trainer(server, json.loads(spec)))
    except ChildDied as death:
        hint = "The server's log may say more."
        return _error(server, Failure("58000", death.reason, hint=hint, traceback=death.traceback))
    except Failure as failure:
        return _error(server, failure)
    except ProtocolError as error:
        return _error(server, Failure("08P01", f"the trainer broke the protocol: {error}"))
    except plpy.SPIError as error:
        return _error(server, failure_of_sql(error))
    except Exception as error:
        return _error(server, Failure("XX000", f"the supervisor failed: {error!r}", traceback=traceback.format_exc()))
    return {"result": [_text(server, value) for row in rows for value in row]} | dict.fromkeys(ERROR_COLUMNS)


def _text(server: Server, value: Any) -> str | None:
    """Return a value of the result as SQL's input functions take it."""
    return server.text(value if value is None or isinstance(value, str) else server.json(value))


def _error(server: Server, failure: Failure) -> dict[str, Any]:
    """Return the columns of an error, with the child's traceback only if its cause is not explained otherwise."""
    if failure.sqlstate[:2] not in UNEXPLAINED and "traceback" not in (failure.hint or ""):
        failure.traceback = None
    return {"result": None} | {column: server.text(getattr(failure, column)) for column in ERROR_COLUMNS}


async def _run_trainer(server: Server, request: dict[str, Any]) -> list[list[Any]]:
    """Run a trainer for the request, which a function such as `_explain_training` has made; return the rows."""
    threads = choose_threads(server, request["options"])
    timeout = float(server.number("pg_tensile.executor_timeout"))
    is_light = request["kind"] == "evaluate" and request["evaluator"] is not None
    child = Child(server, "trainer", threads=threads, timeout=timeout, forked=True, is_light=is_light)
    result = Result()
    try:
        server.check_version()
        await child.start()
        await OPENINGS[request["kind"]](server, child, request, threads, result)
        await drain(child, result)
        await _feed(server, child, result)
        await _finish(server, child, request["kind"], result)
        return result.rows
    finally:
        await child.close()


async def _finish(server: Server, child: Child, kind: str, result: Result) -> None:
    """Wait for the result. Making an ONNX graph may take minutes, so there are notices, and a limit."""
    started, notice = time.monotonic(), ONNX_NOTICE
    while not result.complete:
        result.add(await child.receive(TICK))
        seconds = time.monotonic() - started
        if kind != "export_model" or seconds < notice:
            continue
        if seconds > ONNX_LIMIT:
            hint = "Export it in the format tensile or torch."
            raise Failure("54000", f"the ONNX graph was not finished within {ONNX_LIMIT:.0f} s", hint=hint)
        server.plpy.notice(f"export_model has been making the ONNX graph for {seconds:.0f} s")
        notice = min(2 * notice, ONNX_LIMIT)


async def _open_explanation(
    server: Server, child: Child, request: dict[str, Any], threads: int, result: Result
) -> None:
    """Send the JOB frame of explain_training."""
    models = server.rows("SELECT device, models FROM tensile_worker._explain_latency_models()")
    running = server.rows("SELECT * FROM tensile_worker._explain_running()")
    header = session_spec(server, request, threads) | {
        "ray": json.loads(server.call("tensile_worker._explain_ray(jsonb)", request["options"])),
        "latency_models": [row["device"] for row in models],
        "running": [json.loads(row["description"]) for row in running],
    }
    buffers = [row["models"] for row in models]
    for row in running:
        if row["trace"] is not None:
            buffers += [row["trace"], array("f", row["average"] or []).tobytes()]
    child.queue(FrameType.JOB, header=header, buffers=buffers)


async def _open_evaluation(server: Server, child: Child, request: dict[str, Any], threads: int, result: Result) -> None:
    """Send the JOB frame of a function that uses a version, and the version."""
    await send_version(server, child, session_spec(server, request, threads), "tensile_worker._session_weights", result)


OPENINGS: dict[str, Callable[[Server, Child, dict[str, Any], int, Result], Awaitable[None]]] = {
    "explain": _open_explanation,
    "evaluate": _open_evaluation,
    "import_model": _open_evaluation,
    "export_model": _open_evaluation,
}


async def _feed(server: Server, child: Child, result: Result) -> None:
    """Send the query's rows to the trainer.

    If the trainer dies meanwhile, its error or death is raised, not the broken connection that the query saw.
    """
    try:
        server.call("tensile_worker._session_feed(int4)", child.fd)
    except server.plpy.spiexceptions.QueryCanceled:
        raise
    except server.plpy.SPIError as error:
        failure = failure_of_sql(error)
        if failure.sqlstate.startswith(CONNECTION_ERRORS):
            while (frame := await child.receive(TICK)) is not None:  # one of those left may have the trainer's error
                result.add(frame)
        raise failure from None
    child.restart_timeout()
