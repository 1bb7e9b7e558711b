"""The planner process: makes the plans, where numpy may be imported. Its supervisor is the scheduler.

It keeps the traces of the jobs that the scheduler has sent, and cached results of planning them; anything else
comes with each request. The frames (docs/internals.md, "Memory"):

- TRACE: a job's trace of the training step, in one buffer. Replaces the one before. `load`: that of the device by
  others, that its latencies stand for (0 … 1; null: not known).
- LATENCY: the job's latencies now, float32[operators] in µs, and their `load`.
- SPARSITY: statistics of the job's tensors: int32 tensor, float32 for each field of Statistics.
- SCHEDULE: `request`, `device` (the fields of DeviceState, the profile as its fields; `latency_models`: whether models
  come with it), `may_be_brief`, `thorough_s`, `jobs` (those of JobState; `traced` instead of the trace; `load` that
  others put on the device now, null: not known; `given` null or {`known`, `granted_bytes`, `link_share`, `flows`}) →
  the device's latency models if they are new; for each job in this order, the rows, order and groups of its plan if
  that is known, and the rows and order of the plan that a search has found for it (`found`). Traces of the device's
  jobs that are not among `jobs` are dropped. Jobs are planned with their latencies under the load now
  (latency/current_load.py).
- SCHEDULED, the answer: `request`, `device` (its name), `seconds`, `brief` (memory was divided in few passes, as
  `may_be_brief` allows where more would take long), `totals_us` {job: µs}, `notes` [{job, reason}], `lacking` and
  `slowed_bytes` (those of Schedule), `codings` {job: [{tensor, codec, coded_bytes, coded_us, plain_us, compressed}]} of
  jobs with compression, `jobs` [{job, decision: planned, kept, waits, refused or failed, and its fields}] → for each
  plan: rows, its order, then of each step under it: int32 operator, int64 bytes planned, int64 bytes without a plan;
  then its groups, empty for a constant grant. A request that may not be brief is abandoned for a newer one, and after
  `thorough_s`: then the answer has only `request`, `device` and `abandoned`, "newer" or "time".

An error in one job's data (a damaged trace) is a decision about that job, and one in the device's profile about all of
them; any other ends the process with ERROR.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from pg_tensile.errors import CodecError, DeviceError, MeasurementError, TraceError
from pg_tensile.planning.compression.codec_times import CodecTimes
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.planner import AbandonedError
from pg_tensile.planning.latency import model_bytes
from pg_tensile.planning.latency.current_load import CurrentLoad
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.scheduling.decisions import Decision, DeviceState, Given, JobState, Planned, Schedule
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.trace.trace import Trace
from pyworker.connection import Connection
from pyworker.wire import Buffer, Frame, FrameType, ProtocolError


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the process: answer until the scheduler ends it."""
    planner = Planner(connection)
    while True:
        planner.handle(planner.next_frame())


class Planner:
    """State of the jobs, by their numbers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._traces: dict[int, Trace] = {}
        self._loads: dict[int, float | None] = {}  # that the traces' latencies stand for
        self._current_loads: dict[str, CurrentLoad] = {}  # by device that has latency models
        self._faults: dict[int, str] = {}  # reasons why traces cannot be used
        self._devices: dict[int, str] = {}
        self._statistics: dict[int, dict[int, Statistics]] = {}  # by job and tensor
        self._schedulers: dict[str, DeviceScheduler] = {}
        self._arrived: deque[Frame] = deque()  # while a request was carried out

    def next_frame(self) -> Frame:
        """Wait for the next frame. Raises EOFError once the scheduler has closed the connection."""
        if self._arrived:
            return self._arrived.popleft()
        frame = self._connection.recv()
        assert frame is not None  # no time-out
        return frame

    def _is_replaced(self, device: str) -> bool:
        """Return whether a request has arrived that takes the place of the present one, or none can any more.

        Those of other devices do so if they may be brief; thorough ones would take the place of each other for ever."""
        while (frame := self._connection.poll()) is not None:
            self._arrived.append(frame)
        requests = (frame.header for frame in self._arrived if frame.type == FrameType.SCHEDULE)
        replaces = any(header["may_be_brief"] or header["device"]["name"] == device for header in requests)
        return replaces or self._connection.closed

    def handle(self, frame: Frame) -> None:
        match frame.type:
            case FrameType.TRACE:
                self._keep_trace(frame)
            case FrameType.LATENCY:
                self._keep_latency(frame)
            case FrameType.SPARSITY:
                self._keep_sparsity(frame)
            case FrameType.SCHEDULE:
                self._schedule(frame)
            case _:
                raise ProtocolError(f"unexpected {frame.type.name} frame")

    def _keep_trace(self, frame: Frame) -> None:
        self._forget(frame.job)
        self._devices[frame.job] = frame.header["device"]
        self._loads[frame.job] = frame.header.get("load")
        try:
            self._traces[frame.job] = Trace.from_bytes(bytes(frame.buffers[0]))
        except TraceError as error:
            self._faults[frame.job] = f"its trace cannot be read: {error}"

    def _keep_latency(self, frame: Frame) -> None:
        trace = self._traces.get(frame.job)
        latency_us = np.frombuffer(frame.buffers[0], "<f4").astype(np.float64)
        if trace is None or len(latency_us) != trace.operator_count:
            return  # of a trace that was replaced meanwhile
        self._loads[frame.job] = frame.header.get("load")
        measured = np.isfinite(latency_us) & (latency_us >= 0)
        self._traces[frame.job] = trace.with_latencies(np.where(measured, latency_us, trace.latency_us))

    def _keep_sparsity(self, frame: Frame) -> None:
        kinds = ("<i4", "<f4", "<f4", "<f4")
        columns = [np.frombuffer(buffer, kind).tolist() for buffer, kind in zip(frame.buffers, kinds, strict=True)]
        self._statistics[frame.job] = {tensor: Statistics(*shares) for tensor, *shares in zip(*columns, strict=True)}

    def _forget(self, job: int) -> None:
        for by_job in (self._traces, self._loads, self._faults, self._devices, self._statistics):
            by_job.pop(job, None)

    # ---- requests and answers ----

    def _schedule(self, frame: Frame) -> None:
        started = time.monotonic()
        request, jobs = frame.header, frame.header["jobs"]
        name = request["device"]["name"]
        listed = {job["job"] for job in jobs}
        for job in [job for job, device in self._devices.items() if device == name and job not in listed]:
            self._forget(job)
        faults = {
            job["job"]: self._faults.get(job["job"], "its trace has not come")
            for job in jobs
            if job["traced"] and job["job"] not in self._traces
        }
        buffers_in = iter(frame.buffers)
        if request["device"].get("latency_models"):
            self._keep_models(name, next(buffers_in))
        states = [self._state(job, request["device"], buffers_in) for job in jobs]
        if name in self._current_loads:
            traces = [trace for job, trace in self._traces.items() if self._devices[job] == name]
            self._current_loads[name].keep({trace.fingerprint for trace in traces})
        held = sum(state.given.granted_bytes for state in states if state.given and state.job in faults)
        held += sum(state.overhead_bytes for state in states if state.job in faults)
        scheduler = self._schedulers.setdefault(name, DeviceScheduler())
        may_be_brief = request["may_be_brief"]

        def over() -> bool:
            return not may_be_brief and (time.monotonic() - started > request["thorough_s"] or self._is_replaced(name))

        planned = [state for state in states if state.job not in faults]
        try:
            schedule = scheduler.schedule(_device(request["device"], held), planned, may_be_brief, over)
        except DeviceError as error:  # its stored profile is damaged
            faults |= {state.job: f"{error.message}: {error.detail}" for state in planned}
            schedule = Schedule({}, {}, [], {})
        except AbandonedError:
            abandoned = "newer" if self._is_replaced(name) else "time"
            header = {"request": request["request"], "device": name, "abandoned": abandoned}
            self._connection.send(FrameType.SCHEDULED, header=header)
            return
        buffers: list[Any] = []
        answers = [_answer(job, decision, buffers) for job, decision in schedule.decisions.items()]
        answers += [{"job": job, "decision": "failed", "reason": reason} for job, reason in faults.items()]
        header = {
            "request": request["request"],
            "device": name,
            "seconds": time.monotonic() - started,
            "brief": schedule.brief,
            "totals_us": schedule.totals_us,
            "notes": [note._asdict() for note in schedule.notes],
            "codings": {job: [coding._asdict() for coding in codings] for job, codings in schedule.codings.items()},
            "jobs": answers,
            "lacking": schedule.lacking,
            "slowed_bytes": schedule.slowed_bytes,
        }
        self._connection.send(FrameType.SCHEDULED, header=header, buffers=buffers)

    def _keep_models(self, device: str, models: Buffer) -> None:
        try:
            self._current_loads[device] = CurrentLoad(model_bytes.decode(bytes(models)))
        except MeasurementError:  # damaged: trainers, which predict with them, report it
            self._current_loads.pop(device, None)

    def _trace_now(self, job: int, device: dict[str, Any], load: float | None) -> Trace:
        """Return the job's trace with its latencies under the load that others put on the device now."""
        trace, before, current_load = self._traces[job], self._loads.get(job), self._current_loads.get(device["name"])
        if load is None or before is None or current_load is None:
            return trace
        return current_load.at(trace, DeviceProfile.from_json(device["profile"]), before, load)

    def _state(self, job: dict[str, Any], device: dict[str, Any], plans: Iterator[Buffer]) -> JobState:
        fields = {key: value for key, value in job.items() if key not in ("traced", "load", "given", "found")}
        given = None
        if job["given"] is not None:
            known, granted, share = (job["given"][key] for key in ("known", "granted_bytes", "link_share"))
            given = Given(None, granted, share)
            if known:
                given = Given(_plan(plans), granted, share, bytes(next(plans)))
        searched = _plan(plans) if job.get("found") else None
        traced = job["traced"] and job["job"] in self._traces
        trace = self._trace_now(job["job"], device, job.get("load")) if traced else None
        statistics = self._statistics.get(job["job"], {})
        return JobState(trace=trace, given=given, found=searched, statistics=statistics, **fields)


def _plan(buffers: Iterator[Buffer]) -> Plan:
    """Return the next plan, from its rows and order."""
    rows, order = next(buffers), next(buffers)
    return Plan.from_rows(bytes(rows), order=bytes(order))


def _device(fields: dict[str, Any], held_bytes: int) -> DeviceState:
    fields = {key: value for key, value in fields.items() if key != "latency_models"}
    ending = fields["ending_bytes"] + held_bytes
    times = None
    if fields.get("codec_times"):
        with suppress(CodecError):  # damaged: as if the codecs had not been measured
            times = CodecTimes.from_json(fields["codec_times"])
    objects = {"profile": DeviceProfile.from_json(fields["profile"]), "codec_times": times}
    return DeviceState(**fields | objects | {"ending_bytes": ending})


def _answer(job: int, decision: Decision, buffers: list[Buffer | Any]) -> dict[str, Any]:
    """Return one job's part of SCHEDULED, appending its arrays to `buffers`."""
    fields = decision._asdict()
    if isinstance(decision, Planned):
        plan = fields.pop("plan")
        buffers += [plan.rows, plan.order_bytes]
        buffers += [fields.pop(name) for name in ("operators", "footprint", "vanilla", "groups")]
    return {"job": job, "decision": type(decision).__name__.lower(), **fields}
