"""The supervisor of one job: feeds the trainer, keeps the job's state in the catalogue, and decides how the job ends.

Phases, each in transactions of its own: begin (`running` is committed before anything starts), trainer and handshake,
the job's spec (job/spec.py) and the checkpoint that it resumes from, the data (one transaction, committed at once),
then listening: the trace goes to the catalogue, where the scheduler finds it (`waiting`), the plans that the scheduler
makes for it to the trainer (job/memory.py), progress to shared memory (job/progress.py), metrics and checkpoints to
the catalogue, and at the end the weights, chunk by chunk, to a version of the model that becomes complete together with
`finished` (job/results.py, job/end.py). A calibration is a job without data: its result is a device's latency models.
An evaluation trains nothing (job/evaluation.py).

The process runs as the role that submitted the job throughout; the bookkeeping functions identify the job by the
process. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from typing import Any

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.evaluation import Trainers
from pyworker.supervisors.failures import (
    CancelRequest,
    ChildDied,
    Failure,
    Gone,
    Stopped,
    end_of_trainer,
    failure_of_sql,
)
from pyworker.supervisors.job.end import CANCELLED, JobEnd
from pyworker.supervisors.job.evaluation import Evaluation
from pyworker.supervisors.job.gate import Gate
from pyworker.supervisors.job.memory import JobMemory
from pyworker.supervisors.job.progress import report_progress
from pyworker.supervisors.job.ranks import JobRanks
from pyworker.supervisors.job.results import JobResults
from pyworker.supervisors.job.spec import choose_threads, job_spec
from pyworker.supervisors.job.waiting import Waiting
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType, ProtocolError

TICK = 1.0  # seconds between two checks for cancel_job and of the model
LOWEST_PRIORITY = 19  # nice value of automatic calibrations
STOP_GRACE = 2.0  # seconds that the trainer has for its last checkpoint


class Cancelled(Exception):
    """cancel_job or pg_cancel_backend was called."""


async def run(plpy: Any) -> None:
    """Run the worker process."""
    server = Server(plpy)
    job = server.call("tensile_worker._my_job()")
    try:
        row = json.loads(server.call("tensile_worker._job_begin(int4)", os.getpid()))
        server.commit()
    except plpy.spiexceptions.ObjectNotInPrerequisiteState:
        return  # cancelled, or reaped because this worker started too late
    await Worker(server, job, row).run()


class Worker:
    """One attempt at one job; `row` is what `_job_begin` returned."""

    def __init__(self, server: Server, job: int, row: dict[str, Any]) -> None:
        self._server = server
        self._job = job
        self._row = row
        self._has_data = False  # True once the trainer has all rows
        self._rows_file: dict[str, Any] | None = None  # of the job's tuning
        self._last_check = time.monotonic()
        self._threads = choose_threads(server, row["options"], row["running"])
        timeout = float(server.number("pg_tensile.executor_timeout"))
        nice = LOWEST_PRIORITY if row["automatic"] else None
        self._child = Child(
            server,
            "trainer",
            threads=self._threads,
            timeout=timeout,
            nice=nice,
            forked=True,
            memory_flow=True,
        )
        waiting = Waiting(server)
        self._memory = JobMemory(server, self._child, waiting, job, row["options"], timeout)
        self._ranks = JobRanks(server, waiting, row["options"])
        self._results = JobResults(server, self._child, job, row)
        trainers = Trainers(server, self._threads, timeout)
        self._gate = Gate(server, row, trainers)
        self._evaluation = Evaluation(server, row, trainers)
        self._done: dict[str, Any] | None = None  # header of DONE, once only the comparison at the gate is left
        self._end = JobEnd(server)

    async def run(self) -> None:
        """Train, and record the job's end whatever it is."""
        plpy, end = self._server.plpy, self._end
        try:
            await self._train()
        except Gone:
            return
        except (Cancelled, CancelRequest, plpy.spiexceptions.QueryCanceled):
            end.cancel(CANCELLED)
        except Stopped:
            end.stop()
        except ChildDied as death:
            if self._server.stopping:
                end.stop()
            else:
                end.interrupt(death.reason, retry=True, traceback=death.traceback)
        except Failure as failure:
            end.fail(failure)
        except ProtocolError as error:
            message = f"the trainer broke the protocol: {error}"
            end.fail(Failure("08P01", message, traceback=self._child.output()))
        except plpy.SPIError as error:
            end.end_after_sql_error(failure_of_sql(error))
        except Exception as error:  # a bug here must not leave the job running
            end.fail(Failure("XX000", f"the supervisor failed: {error!r}", traceback=traceback.format_exc()))
        finally:
            await self._child.close()

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Run the job, starting over after an interrupt that turns out to be needless.

        Such an interrupt of the query costs the trainer its data, so another trainer is started.
        """
        while True:
            try:
                await self._attempt()
                return
            except (CancelRequest, self._server.plpy.spiexceptions.QueryCanceled):
                self._server.rollback()
                if not self._server.call("tensile_worker._take_interrupt()"):
                    raise Cancelled from None
                await self._server.wait(-1, 0)  # raises Gone if the role or the extension was dropped
                self._check_job()
            if self._has_data and self._done is None:  # so late that it may have interrupted the bookkeeping
                self._end.interrupt("its worker was interrupted", retry=False)
                return
            await self._child.close()

    async def _attempt(self) -> None:
        self._server.check_version()
        if self._row["kind"] == "evaluate":
            await self._evaluate()
            return
        if self._row["kind"] == "compare":
            self._done = {}
        if self._done is not None:
            await self._pass_gate(self._done)
            return
        self._report({"phase": "starting"})
        await self._child.start()
        self._send_job()
        if self._row["kind"] == "train":
            await self._send_checkpoint()
            await self._send_start()
            await self._drain()
            await self._feed()
        await self._listen()
        if self._done is not None:
            await self._pass_gate(self._done)

    async def _pass_gate(self, done: dict[str, Any]) -> None:
        """Finish a job whose version is deployed only if it is better than the deployed one."""
        await self._child.close()
        self._report({"phase": "comparing"})
        warning = await self._gate.decide(self._check_job)
        warnings = [*(done.get("warnings") or []), *([] if warning is None else [warning])]
        self._end.finish(done | {"warnings": warnings})

    async def _evaluate(self) -> None:
        """Run a job of a schedule of evaluations."""
        self._done = {}  # there is nothing to train
        self._server.check_version()
        self._report({"phase": "evaluating"})
        await self._evaluation.run(self._check_job)
        self._end.finish({})

    def _send_job(self) -> None:
        models = self._server.rows("SELECT device, models FROM tensile_worker._job_latency_models()")
        spec = job_spec(self._server, self._job, self._row, self._threads)
        self._rows_file = spec["rows_file"]
        spec["latency_models"] = [row["device"] for row in models]
        self._server.commit()
        self._child.queue(FrameType.JOB, self._job, header=spec, buffers=[row["models"] for row in models])

    async def _send_checkpoint(self) -> None:
        if self._row["checkpoint"] is None:
            return
        chunk = self._read_chunk(0)
        seq = 0
        while chunk is not None:
            following = self._read_chunk(seq + 1)
            header = {"kind": "checkpoint", "seq": seq, "last": following is None, "meta": None}
            self._child.queue(FrameType.STATE, self._job, header=header, buffers=[chunk])
            await self._drain()
            chunk, seq = following, seq + 1

    async def _send_start(self) -> None:
        """Send the weights that training begins with. They are needed if a checkpoint cannot be used, too."""
        start = self._row["start"]
        sent = seq = 0
        while start is not None and sent < start["weight_bytes"]:
            chunk = self._server.call("tensile_worker._job_start_weights(int4)", seq)
            self._server.commit()
            if chunk is None:
                message = f"version {start['version']}, with which training was to begin, was dropped"
                raise Failure("42704", message, hint="Submit the job again.")
            sent += len(chunk)
            header = {"kind": "weights", "seq": seq, "last": sent >= start["weight_bytes"], "meta": None}
            self._child.queue(FrameType.STATE, self._job, header=header, buffers=[chunk])
            await self._drain()
            seq += 1

    def _read_chunk(self, seq: int) -> bytes | None:
        chunk: bytes | None = self._server.call("tensile_worker._job_checkpoint_read(int4)", seq)
        return chunk

    async def _drain(self) -> None:
        async for frame in self._child.drain():
            self._handle(frame)

    async def _feed(self) -> None:
        """Send the query's results to the trainer, in one transaction; nothing if it has them in its tuning's file.

        If the trainer dies meanwhile, its error or death is raised, not the broken connection that the query saw.
        Cancelling the job, or dropping what it needs, interrupts the query.
        """
        self._report({"phase": "loading"})
        if self._rows_file is not None and self._rows_file["written"]:
            self._find_sources()
            self._server.call("tensile_worker._job_rows(int8)", self._row["tuning_rows"])
            self._server.commit()
            return
        await self._server.wait(-1, 0)  # clears older wake-ups: those from here on interrupt the query
        if self._server.stopping:  # since an earlier wait; only a SIGTERM from here on ends the query
            raise Stopped
        self._check_job()
        plpy = self._server.plpy
        row = self._row
        try:
            self._find_sources()
            columns = ("query", "target", "settings", "split_by", "validation_query")
            feed = "tensile_worker._feed(int4,text,text,jsonb,text,text)"
            rows = self._server.call(feed, self._child.fd, *(row[column] for column in columns))
            self._server.commit()
        except plpy.spiexceptions.QueryCanceled:
            raise
        except plpy.SPIError as error:
            self._server.rollback()
            failure = failure_of_sql(error)
            disconnected = failure.sqlstate.startswith("08")
            await self._handle_remaining_frames(seconds=1.0 if disconnected else 0.0)
            if disconnected:
                raise ChildDied(failure.message, self._child.output() or None) from None
            raise failure from None
        self._child.restart_timeout()
        if self._rows_file is not None:
            await self._await_rows()
        self._server.call("tensile_worker._job_rows(int8)", rows)
        self._server.commit()

    def _find_sources(self) -> None:
        """Have the server say which relations and columns the queries read."""
        queries = (self._row[column] for column in ("query", "settings", "validation_query"))
        sources = self._server.call("tensile_worker._training_sources(text,jsonb,text)", *queries)
        self._results.sources = json.loads(sources)

    async def _await_rows(self) -> None:
        """Wait until the trainer has all rows, and has written the file of its tuning, for which other trials wait."""
        while True:
            frame = await self._child.receive(TICK)
            if frame is not None:
                self._handle(frame)
                if frame.type == FrameType.PROGRESS and frame.header.get("phase") == "preparing":
                    return
            if self._server.stopping:
                raise Stopped
            self._check_job()

    async def _handle_remaining_frames(self, seconds: float) -> None:
        """Handle the frames that are left, so that an error of the trainer is raised; wait `seconds` for each."""
        frame = await self._child.receive(seconds)
        while frame is not None:
            self._handle(frame)
            frame = await self._child.receive(seconds)

    async def _listen(self) -> None:
        """Handle frames until the trainer is done.

        On SIGTERM the trainer is sent STOP with a request for a checkpoint, and has STOP_GRACE seconds; if the worker
        alone was terminated, Stopped is raised at once.
        """
        self._has_data = True
        deadline: float | None = None
        while True:
            if self._server.stopping and deadline is None:
                if self._end.stop_cause() == "terminated":
                    raise Stopped
                deadline = time.monotonic() + STOP_GRACE
                self._child.queue(FrameType.STOP, self._job, header={"checkpoint": True})
            seconds = TICK if deadline is None else deadline - time.monotonic()
            if seconds <= 0:
                raise Stopped
            frame = await self._child.receive(min(TICK, seconds))
            if frame is not None and self._handle(frame):
                return
            if self._server.woken or time.monotonic() - self._last_check >= TICK:
                self._check_job()

    def _check_job(self) -> None:
        """Forward new plans, and check whether the job was cancelled or refused, or its model or row deleted."""
        self._last_check = time.monotonic()
        self._server.woken = False
        status = self._server.call("tensile_worker._job_status()")
        self._server.commit()
        if self._done is None:
            self._memory.forward_plans()
        if status == "cancel":
            raise Cancelled
        if status == "no_model":
            name = self._row["model"]
            raise Failure("42704", f'model "{name}" was dropped', hint="Register the model again and submit a new job.")
        if status is None:
            raise Gone  # the job's row was deleted
        if self._done is not None:
            return  # the trainer is gone
        if status == "refused":
            self._memory.forward_refusal()
        self._memory.check_refused()

    # -- frames -------------------------------------------------------------------------------------------------------

    def _handle(self, frame: Frame) -> bool:
        """Process a frame; return True after the last one."""
        results = self._results
        match frame.type:
            case FrameType.PROGRESS:
                self._report(frame.header)
            case FrameType.METRICS:
                results.keep_metrics(frame)
            case FrameType.STATE:
                results.keep_chunk(frame)
            case FrameType.ERROR:
                raise end_of_trainer(frame.header)
            case FrameType.DONE if frame.header.get("stopped"):
                raise Stopped
            case FrameType.DONE:
                results.complete()
                if self._gate.closed:
                    self._done = frame.header
                else:
                    self._end.finish(frame.header)
                return True
            case FrameType.TRACE:
                self._memory.keep_trace(frame)
            case FrameType.VERSION:
                results.begin_version(frame.header)
            case FrameType.LATENCY:
                results.keep_latency(frame)
            case FrameType.QUERY:
                results.derived = frame.header
            case FrameType.ARCHITECTURE:
                results.keep_architecture(frame)
            case FrameType.SETTINGS:
                results.keep_settings(frame)
            case FrameType.CHOICE:
                results.keep_choice(frame)
            case FrameType.SPARSITY:
                results.keep_sparsity(frame)
            case _:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
        return False

    def _report(self, progress: dict[str, Any]) -> None:
        """Publish live numbers, and record what they say of the job's plan and its ranks."""
        report_progress(self._server, progress)
        self._memory.record_use(progress)
        self._ranks.record(progress)
        self._server.commit()
