"""The supervisor of one job: feeds the executor, keeps the job's state in the catalogue, and decides how the job ends.

Phases, each in transactions of its own: begin (`running` is committed before anything starts), executor and handshake,
the job's spec and the checkpoint that it resumes from, the data (one transaction, committed at once), then listening:
the trace goes to the catalogue, where the scheduler finds it (`waiting`), the plans that the scheduler makes for it to
the executor, progress to shared memory, metrics and checkpoints to the catalogue, and at the end the weights, chunk by
chunk, to a version of the model that becomes complete together with `finished`. A calibration is a job without data:
its result is a device's latency models.

How a job ends, and what its row says:

    DONE                                   finished
    ERROR, a wrong query, model dropped    failed, with the error's own SQLSTATE
    cancel_job, pg_cancel_backend          cancelled, and so is a job whose worker pg_terminate_backend stops
    the executor dies or hangs             interrupted, tried again after a pause, failed after pg_tensile.max_retries
    server stop, another pg_tensile.database   interrupted, with a checkpoint if the executor makes one in time
    role or extension dropped              nothing is written; the controller does the rest

The process runs as the role that submitted the job throughout; the bookkeeping functions identify the job by the
process.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from typing import Any

from pyworker.supervisors.child_environment import cores, spool_folder
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import (
    CancelRequest,
    ChildDied,
    Failure,
    Gone,
    Stopped,
    failure_of_frame,
    failure_of_sql,
)
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType, ProtocolError, StateChunk, StateReader

TICK = 1.0  # seconds between two checks for cancel_job and of the model
STOP_GRACE = 2.0  # seconds that the executor has for its last checkpoint
MOST_LATENCY_BYTES = 64 << 20  # of a calibration's result, which is held in memory
# Columns of the job's row that the JOB frame has unchanged
COPIED = (
    *("attempt", "architecture", "target", "epochs", "batch_size", "optimizer", "learning_rate", "validation", "seed"),
    *("policy", "memory_budget", "options"),
)
# Fields of PROGRESS frames besides phase and epoch, in the order of tensile._report's arguments
REPORTED = (
    *("step", "steps", "loss", "samples_per_s", "device_bytes", "device_peak_bytes", "bytes_swapped", "stall_us"),
    *("passive_swap_ins", "utilisation", "raw_bytes_swapped"),
)
REPORT = "tensile._report(text,int4,int4,int8,int8,float8,float8,int8,int8,int8,int8,int8,float8,int8)"
END = "tensile._job_end(text,text,text,text,text,text,text[],text)"
INTERRUPTED = {"server": "the server was stopped", "launcher": "pg_tensile.database was changed"}
TERMINATED = "its worker was terminated (pg_terminate_backend)"
CANCELLED = "cancelled by pg_cancel_backend"
SILENCE = 300.0  # seconds that an executor may take to answer REFUSE if pg_tensile.executor_timeout is 0
MOST_REFUSALS = 1000  # in a row: the executor follows each with the trace of a smaller batch


class Cancelled(Exception):
    """cancel_job or pg_cancel_backend was called."""


async def run(plpy: Any) -> None:
    """Run the worker process."""
    server = Server(plpy)
    job = server.call("tensile._my_job()")
    try:
        row = json.loads(server.call("tensile._job_begin(int4)", os.getpid()))
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
        self._options: dict[str, Any] = row["options"]
        checkpoint = row["checkpoint"] or {}
        self._generation = int(checkpoint.get("generation", 0)) + 1  # of the next checkpoint
        self._states = StateReader()
        self._most_bytes = server.number("pg_tensile.max_state_size") << 20
        self._version: int | None = None  # id of the model's version
        self._complete = False  # the version has all of its weights
        self._latency_models: list[memoryview] = []
        self._result_meta: dict[str, Any] = {}
        self._generation_sent = 0  # of the newest plan sent to the executor
        self._generation_used = 0
        self._waiting = self._refused = False
        self._refusals = 0  # since the last plan
        self._refused_at = 0.0
        self._listening = False  # the executor has its data
        self._last_look = time.monotonic()
        self._threads = self._choose_threads()
        timeout = float(server.number("pg_tensile.executor_timeout"))
        self._silence = timeout or SILENCE
        self._child = Child(server, "executor", threads=self._threads, timeout=timeout)

    async def run(self) -> None:
        """Train, and record the job's end whatever it is."""
        plpy = self._server.plpy
        try:
            await self._train()
        except Gone:
            return
        except (Cancelled, CancelRequest, plpy.spiexceptions.QueryCanceled):
            self._end("cancelled", reason=CANCELLED)
        except Stopped:
            self._stop()
        except ChildDied as death:
            if self._server.stopping:
                self._stop()
            else:
                self._interrupt(death.reason, retry=True, traceback=death.traceback)
        except Failure as failure:
            self._end("failed", failure)
        except ProtocolError as error:
            message = f"the executor broke the protocol: {error}"
            self._end("failed", Failure("08P01", message, traceback=self._child.output()))
        except plpy.SPIError as error:
            self._end_after(failure_of_sql(error))
        except Exception as error:  # a bug here must not leave the job running
            self._end("failed", Failure("XX000", f"the supervisor failed: {error!r}", traceback=traceback.format_exc()))
        finally:
            await self._child.close()

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Run the job, starting over after an interrupt that turns out to be needless.

        Such an interrupt of the query costs the executor its data, so another executor is started.
        """
        while True:
            try:
                await self._attempt()
                return
            except (CancelRequest, self._server.plpy.spiexceptions.QueryCanceled):
                self._server.rollback()
                if not self._server.call("tensile._take_interrupt()"):
                    raise Cancelled from None
                await self._server.wait(-1, 0)  # raises Gone if the role or the extension was dropped
                self._look()
            if self._listening:  # so late that it may have interrupted the bookkeeping
                self._interrupt("its worker was interrupted", retry=False)
                return
            await self._child.close()

    async def _attempt(self) -> None:
        self._server.check_version()
        self._report({"phase": "starting"})
        await self._child.start()
        self._send_job()
        if self._row["kind"] == "train":
            await self._send_checkpoint()
            await self._drain()
            await self._feed()
        await self._listen()

    def _send_job(self) -> None:
        models = self._server.rows("SELECT device, models FROM tensile._job_latency_models()")
        spec = self._spec() | {"latency_models": [row["device"] for row in models]}
        buffers = [row["models"] for row in models]
        self._server.commit()
        self._child.queue(FrameType.JOB, self._job, header=spec, buffers=buffers)

    def _spec(self) -> dict[str, Any]:
        """Return the JOB frame's header (docs/internals.md, "The job's spec")."""
        interval = self._options.get("checkpoint_interval", self._server.number("pg_tensile.checkpoint_interval"))
        call = self._server.call
        workloads = call("tensile._calibration_workloads()") if self._row["kind"] == "calibrate" else "null"
        return {
            "job": self._job,
            "kind": self._row["kind"],
            "profiles": json.loads(call("tensile._job_profiles()")),
            "codecs": json.loads(call("tensile._job_codecs()")),
            "workloads": json.loads(workloads),
            "latency_weight": float(self._server.setting("pg_tensile.latency_weight")),
            **{key: self._row[key] for key in COPIED},
            "device": self._server.setting("pg_tensile.device"),
            "device_memory_bytes": self._server.number("pg_tensile.device_memory") << 10,
            "plan_events": self._server.number("pg_tensile.plan_events"),
            "threads": self._threads,
            "dataset_cache_bytes": self._server.number("pg_tensile.dataset_cache") << 20,
            "spool_directory": str(spool_folder()),
            "checkpoint_interval_s": interval,
            "resume": self._row["checkpoint"],
        }

    def _choose_threads(self) -> int:
        asked = self._options.get("threads") or self._server.number("pg_tensile.threads")
        return int(asked) or max(1, (cores() - 1) // max(1, self._row["running"]))  # one core is left to the server

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

    def _read_chunk(self, seq: int) -> bytes | None:
        chunk: bytes | None = self._server.call("tensile._job_checkpoint_read(int4)", seq)
        return chunk

    async def _drain(self) -> None:
        async for frame in self._child.drain():
            self._handle(frame)

    async def _feed(self) -> None:
        """Send the query's results to the executor, in one transaction.

        If the executor dies meanwhile, its error or death is raised, not the broken connection that the query saw.
        Cancelling the job, or dropping what it needs, interrupts the query.
        """
        self._report({"phase": "loading"})
        await self._server.wait(-1, 0)  # clears older wake-ups: those from here on interrupt the query
        self._look()
        plpy = self._server.plpy
        row = self._row
        try:
            rows = self._server.call(
                "tensile._feed(int4,text,text,jsonb)", self._child.fd, row["query"], row["target"], row["settings"]
            )
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
        self._server.call("tensile._job_rows(int8)", rows)
        self._server.commit()

    async def _handle_remaining_frames(self, seconds: float) -> None:
        """Handle the frames that are left, so that an error of the executor is raised; wait `seconds` for each."""
        frame = await self._child.receive(seconds)
        while frame is not None:
            self._handle(frame)
            frame = await self._child.receive(seconds)

    async def _listen(self) -> None:
        """Handle frames until the executor is done.

        On SIGTERM the executor is sent STOP with a request for a checkpoint, and has STOP_GRACE seconds; if the worker
        alone was terminated, Stopped is raised at once.
        """
        self._listening = True
        deadline: float | None = None
        while True:
            if self._server.stopping and deadline is None:
                if self._stop_cause() == "terminated":
                    raise Stopped
                deadline = time.monotonic() + STOP_GRACE
                self._child.queue(FrameType.STOP, self._job, header={"checkpoint": True})
            left = TICK if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise Stopped
            frame = await self._child.receive(min(TICK, left))
            if frame is not None and self._handle(frame):
                return
            if self._server.woken or time.monotonic() - self._last_look >= TICK:
                self._look()

    def _look(self) -> None:
        """Forward a new plan, and check whether the job was cancelled or refused, or its model or row deleted."""
        self._last_look = time.monotonic()
        self._server.woken = False
        status = self._server.call("tensile._job_status()")
        self._server.commit()
        self._forward_plan()
        if status == "cancel":
            raise Cancelled
        if status == "no_model":
            name = self._row["model_name"]
            raise Failure("42704", f'model "{name}" was dropped', hint="Register the model again and submit a new job.")
        if status is None:
            raise Gone  # the job's row was deleted
        if status == "refused" and not self._refused:
            self._refused = True
            refusal = json.loads(self._server.call("tensile._job_refusal()"))
            self._server.commit()
            self._child.queue(FrameType.REFUSE, self._job, header=refusal)
            self._refused_at = self._last_look
        self._check_refused()

    def _check_refused(self) -> None:
        """Raise Failure if an executor that was refused memory goes on: it must not keep memory of others."""
        silent = self._refused and time.monotonic() - self._refused_at > self._silence
        if silent or self._refusals > MOST_REFUSALS:
            message = "the executor goes on although there is no device memory for it"
            raise Failure("53200", message, hint="The code of the model may keep it from stopping.")

    # -- memory -------------------------------------------------------------------------------------------------------

    def _forward_plan(self) -> None:
        """Send newer plans to the executor; the first one ends the job's waiting."""
        plans = self._server.rows("SELECT * FROM tensile._fetch_plan($1)", ["int8"], self._generation_sent)
        self._server.commit()
        for plan in plans:
            buffers = [plan.pop("events"), plan.pop("plan_order")]
            self._child.queue(FrameType.PLAN, self._job, header=plan, buffers=buffers)
            self._generation_sent = plan["generation"]
            self._refusals = 0
            if self._waiting:
                self._waiting = False
                self._server.call("tensile._job_admitted()")
                self._server.commit()

    def _keep_trace(self, frame: Frame) -> None:
        """Store a TRACE frame in the catalogue, where the scheduler finds it."""
        header, profile = frame.header, frame.header["profile"]
        graphs = len(header["graphs"])
        traces = [bytes(buffer) for buffer in frame.buffers[:graphs]]
        tables = [bytes(buffer).decode() for buffer in frame.buffers[graphs:]]
        self._server.call(
            "tensile._register_device(text,int8,float8,float8,int8)",
            header["device"],
            profile["memory_bytes"],
            profile["out_bytes_per_s"],
            profile["in_bytes_per_s"],
            header["overhead_bytes"],
        )
        values = (self._server.json(header), traces, tables[0] if tables else None)
        sql = "SELECT tensile._job_trace($1::jsonb, $2, $3::jsonb)"
        self._server.rows(sql, ["text", "bytea[]", "text"], *values)
        self._server.commit()
        self._waiting = self._waiting or self._generation_sent == 0
        if self._refused:
            self._refused = False  # the refusal was of an earlier trace
            self._refusals += 1

    def _keep_latency(self, frame: Frame) -> None:
        columns = [list(memoryview(buffer).cast("f")) for buffer in frame.buffers]
        self._server.call("tensile._job_latency(jsonb,float4[],float4[],float4[])", frame.header, *columns)
        self._server.commit()

    def _keep_sparsity(self, frame: Frame) -> None:
        """Store the statistics of the swapped tensors, and the times of the codecs if the frame has them."""
        measured = frame.header["codecs"]
        if measured is not None:
            self._keep_codecs(measured)
        tensors, *shares, moved = frame.buffers
        columns = (tensors.cast("i").tolist(), *(each.cast("f").tolist() for each in shares), moved.cast("q").tolist())
        signature = "tensile._job_sparsity(int4,int4[],float4[],float4[],float4[],int8[])"
        self._server.call(signature, frame.header["revision"], *columns)
        self._server.commit()

    def _keep_codecs(self, measured: dict[str, Any]) -> None:
        fields = [measured[name] for name in ("device", "times", "relative_error")]
        self._server.call("tensile._job_codec_times(text,jsonb,float8)", *fields)

    def _follow_plan(self, progress: dict[str, Any]) -> None:
        """Record what the executor reports of its plan: an iteration under it, or that it cannot be used."""
        used = progress.get("plan_generation") or 0
        if used > self._generation_used:
            self._generation_used = used
            self._server.call("tensile._acknowledge_plan(int8)", used)
        rejected = progress.get("plan_rejected")
        if rejected is not None:
            reason = self._server.text(rejected["reason"])
            self._server.call("tensile._job_log(text,text,int8)", "rejected", reason, rejected["generation"])

    # -- frames -------------------------------------------------------------------------------------------------------

    def _handle(self, frame: Frame) -> bool:
        """Process a frame; return True after the last one."""
        match frame.type:
            case FrameType.PROGRESS:
                self._report(frame.header)
            case FrameType.METRICS:
                self._server.call("tensile._job_metric(jsonb)", frame.header)
                self._server.commit()
            case FrameType.STATE:
                self._keep(frame)
            case FrameType.ERROR:
                raise failure_of_frame(frame.header)
            case FrameType.DONE if frame.header.get("stopped"):
                raise Stopped
            case FrameType.DONE:
                self._finish(frame.header)
                return True
            case FrameType.TRACE:
                self._keep_trace(frame)
            case FrameType.VERSION:
                self._begin_version(frame.header)
            case FrameType.LATENCY:
                self._keep_latency(frame)
            case FrameType.CHOICE:
                self._server.call("tensile._job_choice(jsonb)", frame.header)
                self._server.commit()
            case FrameType.SPARSITY:
                self._keep_sparsity(frame)
            case _:
                raise ProtocolError(f"unexpected {frame.type.name} frame")
        return False

    def _report(self, progress: dict[str, Any]) -> None:
        """Write live numbers to shared memory; those that are absent stay as they were."""
        self._server.call(
            REPORT,
            progress.get("phase"),
            progress.get("epoch"),
            self._row["epochs"],
            *(progress.get(key) for key in REPORTED),
        )
        self._follow_plan(progress)
        self._server.commit()

    def _keep(self, frame: Frame) -> None:
        """Keep a chunk of a checkpoint, of weights or of latency models."""
        chunk = self._states.chunk(frame)
        calibration = self._row["kind"] == "calibrate"
        most = MOST_LATENCY_BYTES if calibration else self._most_bytes
        if self._states.bytes > most:
            message = f"the executor sent more than {most >> 20} MB of {chunk.kind}"
            hint = "Raise pg_tensile.max_state_size, or train a smaller model."
            raise Failure("54000", message, hint=None if calibration else hint)
        if chunk.kind == "latency_models" and calibration:
            self._latency_models.append(chunk.data)
            self._result_meta = chunk.meta
        elif chunk.kind == "weights" and self._version is not None and not self._complete:
            self._keep_weights(chunk)
        elif chunk.kind == "checkpoint" and not calibration:
            self._keep_checkpoint(chunk)
        else:
            raise ProtocolError(f"unexpected STATE frame of kind {chunk.kind!r}")

    def _keep_checkpoint(self, chunk: StateChunk) -> None:
        """Store a chunk of a checkpoint in the catalogue; the checkpoint before is valid until this one is complete.

        SAVED gives the executor the time of the commit, by the monotonic clock that the machine's processes share, so
        that it can determine the cost of its checkpoints.
        """
        generation = self._generation
        self._server.call("tensile._job_checkpoint(int4,int4,bytea)", generation, chunk.seq, bytes(chunk.data))
        if chunk.last:
            meta = chunk.meta | {"generation": generation}
            self._server.call("tensile._job_checkpoint_done(int4,jsonb)", generation, meta)
            self._generation += 1
        self._server.commit()
        if chunk.last:
            self._child.queue(FrameType.SAVED, self._job, header={"at": time.monotonic()})

    def _begin_version(self, header: dict[str, Any]) -> None:
        """Create the version that the weights belong to; it is invisible before DONE."""
        if self._version is not None:
            raise ProtocolError("a second VERSION frame")
        self._report({"phase": "saving"})
        values = (header[key] for key in ("task", "preprocessing", "metrics", "fingerprint"))
        self._version = self._server.call("tensile._job_version(text,jsonb,jsonb,text)", *values)
        self._server.commit()

    def _keep_weights(self, chunk: StateChunk) -> None:
        """Store a chunk of weights in the version.

        Chunks are stored as they come, because a model may be larger than what a process of the server should hold.
        """
        self._server.call("tensile._job_weights(int8,int4,bytea)", self._version, chunk.seq, bytes(chunk.data))
        self._server.commit()
        self._complete = chunk.last

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _finish(self, done: dict[str, Any]) -> None:
        """Complete the version, or store the calibration, and make the job `finished`, in one transaction."""
        if self._version is not None and not self._complete:
            raise ProtocolError("DONE came before the end of the weights")
        if self._row["kind"] == "calibrate":
            self._report({"phase": "saving"})
            self._save_calibration()
        warnings = [self._server.text(str(warning)) for warning in done.get("warnings") or []]
        self._server.call(END, "finished", None, None, None, None, None, warnings or None, None)
        self._server.commit()

    def _save_calibration(self) -> None:
        meta = self._result_meta
        self._server.call(
            "tensile._calibrate_done(text,jsonb,bytea,int4,int4,float8)",
            meta["device"],
            meta["profile"],
            b"".join(self._latency_models),
            meta["kinds"],
            meta["samples"],
            meta["error"],
        )
        if meta["codecs"] is not None:
            self._keep_codecs(meta["codecs"])

    def _end(self, state: str, failure: Failure | None = None, *, reason: str | None = None) -> None:
        text = self._server.text
        if failure is None:
            self._settle(END, state, None, None, None, None, None, None, reason)
        else:
            fields = (failure.message, failure.hint, failure.detail, failure.traceback)
            self._settle(END, state, failure.sqlstate, *(text(field) for field in fields), None, reason)

    def _stop_cause(self) -> str:
        """Return the cause of SIGTERM: server, launcher or terminated."""
        cause = self._server.call("tensile._stop_cause()")
        self._server.commit()
        return str(cause)

    def _stop(self) -> None:
        """End the attempt after SIGTERM: cancelled by pg_terminate_backend, else interrupted, to be resumed later."""
        self._server.rollback()
        cause = self._stop_cause()
        if cause == "terminated":
            self._end("cancelled", reason=TERMINATED)
        else:
            self._interrupt(INTERRUPTED[cause], retry=False)

    def _end_after(self, failure: Failure) -> None:
        """End the attempt after an SQL error in the bookkeeping.

        The extension may be gone; a full disk or a deadlock may be temporary, so the job is tried again.
        """
        self._server.rollback()
        if not self._server.installed():
            return
        if failure.sqlstate[:2] in ("40", "53"):
            self._interrupt(failure.message, retry=True)
        else:
            self._end("failed", failure)

    def _interrupt(self, reason: str, *, retry: bool, traceback: str | None = None) -> None:
        text = self._server.text
        self._settle("tensile._job_interrupt(text,bool,text)", text(reason), retry, text(traceback))

    def _settle(self, signature: str, *values: Any) -> None:
        """Write the job's last state; a cancel that arrives only now has no effect."""
        for _ in range(3):
            self._server.rollback()
            try:
                self._server.call(signature, *values)
                self._server.commit()
                return
            except self._server.plpy.spiexceptions.QueryCanceled:
                continue
            except self._server.plpy.SPIError:
                self._server.rollback()
                if self._server.installed():
                    raise
                return
