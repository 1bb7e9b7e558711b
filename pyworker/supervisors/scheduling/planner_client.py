"""The scheduler's end of the planner: a child process that is sent traces and requests, and answers with plans.

The planner is started when it is needed and ends after a time without jobs. If it dies, jobs continue under their
plans, those that wait are given the reason, and it is started again after a growing pause. Standard library only.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied, Failure, failure_of_frame
from pyworker.supervisors.scheduling.device_views import DeviceView
from pyworker.supervisors.scheduling.event_log import log_event
from pyworker.supervisors.scheduling.job_records import JobRecords
from pyworker.supervisors.scheduling.plan_searches import PlanSearches
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType

UNUSED_LIMIT = 300.0  # seconds without jobs after which the planner ends
REQUEST_TIMEOUT = 120.0  # seconds for one answer
MAX_PAUSE = 30.0  # seconds between two starts of the planner
MOST_DEATHS = 3  # of planners in a row, after which a trace that all of them had received is set aside


@dataclass
class PlanRequest:
    """Request that the planner has not answered yet."""

    number: int
    view: DeviceView
    reason: str
    may_be_brief: bool
    sent_at: float = field(default_factory=time.monotonic)


class PlannerClient:
    """One planner process at a time, and at most one request for each device."""

    def __init__(self, server: Server, records: JobRecords, searches: PlanSearches) -> None:
        self._server = server
        self._records = records
        self._searches = searches
        self._child: Child | None = None
        self._start_after = 0.0
        self._pause = 1.0
        self._used_at = time.monotonic()
        self._last_number = 0
        self._models_sent: dict[str, str] = {}  # by device: when its latency models were calibrated
        self.requests: dict[str, PlanRequest] = {}  # by device; not answered yet

    # -- the process --------------------------------------------------------------------------------------------------

    async def start(self) -> bool:
        """Start the planner if it does not run and may be started now; return whether it runs.

        Raises ChildDied and Failure.
        """
        if self._child is None and time.monotonic() >= self._start_after:
            self._child = Child(self._server, "planner", threads=1)
            await self._child.start()
        return self._child is not None

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close()
            self._child = None
        self._models_sent.clear()
        for record in self._records.values():
            record.sent = False

    async def close_if_unused(self) -> None:
        """End the planner if there have been no jobs for a long time."""
        now = time.monotonic()
        if self._records:
            self._used_at = now
        if self._child is not None and now - self._used_at > UNUSED_LIMIT and not self.requests:
            await self.close()

    @property
    def running(self) -> bool:
        return self._child is not None

    @property
    def seconds_to_start(self) -> float:
        """Seconds until a planner that has died may be started again; infinite if it need not wait."""
        seconds = self._start_after - time.monotonic()
        return seconds if seconds > 0 else inf

    async def planner_died(self, reason: str, traceback: str | None) -> None:
        """Record that the planner is gone: jobs continue under their plans, and those that wait get the reason."""
        await self.close()
        lines = (traceback or "").splitlines()
        last_line = f" ({lines[-1]})" if lines else ""
        reason = f"planner died: {reason}{last_line}"
        self._server.log_once(reason)
        self._server.call("tensile_internal._log(text,int8,int8,text,text)", "planner", None, None, None, reason)
        for request in self.requests.values():
            for job in request.view.jobs:
                self._server.call("tensile_internal._job_waits(int8,text)", job, f"{reason}; it is started again")
            self._set_deadly_trace_aside(request, reason)
        self.requests.clear()
        self._server.commit()
        self._start_after = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def _set_deadly_trace_aside(self, request: PlanRequest, reason: str) -> None:
        """Set a trace aside if too many planners have died that were sent it.

        A trace may have been too much for the planner. If no planner survives, the newest trace is set aside first; if
        that does not help, the one before it.
        """
        rows = [row for row in request.view.jobs.values() if row["traced"] and self._records.is_current(row)]
        unanswered = [row for row in rows if not self._records[row["job"]].answered]
        for row in unanswered:
            self._records[row["job"]].deaths += 1
        suspects = [row for row in unanswered if self._records[row["job"]].deaths >= MOST_DEATHS]
        if not suspects:
            return
        job = max(suspects, key=lambda row: (row["captured"], row["job"]))["job"]
        record = self._records[job]
        record.set_aside = True
        reason = f"its trace is set aside, because {record.deaths} planners that were given it have died: {reason}"
        self._server.call("tensile_internal._job_waits(int8,text)", job, reason)
        log_event(self._server, "failed", job, request.view.name, reason)

    # -- requests -----------------------------------------------------------------------------------------------------

    def send_request(self, view: DeviceView, reason: str, may_be_brief: bool) -> None:
        """Request plans for the device's jobs, with their newest latencies and the load of the device now.

        It takes the place of a request for the device that the planner has not answered yet. `may_be_brief`: the
        planner divides memory in few passes if more would take long."""
        assert self._child is not None
        for job, row in view.jobs.items():
            if row["traced"]:
                self._send_trace(job, row)
        self._last_number += 1
        thorough_s = self._answer_limit_s() / 2
        headers, buffers = [], self._new_models(view.name)
        device = self._device_part(view) | {"latency_models": bool(buffers)}
        for job, row in view.jobs.items():
            header, job_buffers = self._job_part(job, row, view.grants.get(job))
            headers.append(header)
            buffers += job_buffers
        header = {"request": self._last_number, "device": device, "may_be_brief": may_be_brief, "jobs": headers}
        header["thorough_s"] = thorough_s
        self._child.queue(FrameType.SCHEDULE, header=header, buffers=buffers)
        self.requests[view.name] = PlanRequest(self._last_number, view, reason, may_be_brief)

    def _answer_limit_s(self) -> float:
        return min(REQUEST_TIMEOUT, self._server.number("pg_tensile.executor_timeout") or REQUEST_TIMEOUT)

    def soon_answered(self) -> set[str]:
        """Return the devices whose plans are being made, unless that may take long."""
        return {device for device, request in self.requests.items() if request.may_be_brief}

    def _new_models(self, device: str) -> list[bytes]:
        """Return the device's latency models if the planner does not have them yet, else nothing."""
        sql = """
            SELECT models, calibrated_at::text AS at FROM tensile_internal.latency_models
            WHERE device = $1 AND calibrated_at::text <> $2
        """
        rows = self._server.rows(sql, ["text", "text"], device, self._models_sent.get(device, ""))
        self._server.commit()
        for row in rows:
            self._models_sent[device] = row["at"]
        return [row["models"] for row in rows]

    def _send_trace(self, job: int, row: dict[str, Any]) -> None:
        """Send what the planner lacks: the training step's trace, and newer latencies and statistics."""
        assert self._child is not None
        record, server = self._records[job], self._server
        if not record.sent:
            traces = server.rows(
                "SELECT traces[1] AS trace, load FROM tensile_internal.traces WHERE job = $1", ["int8"], job
            )
            header = {"device": row["device"], "load": traces[0]["load"] if traces else None}
            buffers = [trace["trace"] for trace in traces]
            self._child.queue(FrameType.TRACE, job, header=header, buffers=buffers)
            record.sent = bool(traces)
            record.planned_us, record.sparsity = None, 0
        if row["total_us"] is not None and row["total_us"] != record.planned_us:
            sql = "SELECT average, average_load AS load FROM tensile_internal.operator_latencies WHERE job = $1"
            for latencies in server.rows(sql, ["int8"], job):
                buffers = [array("f", latencies["average"]).tobytes()]
                self._child.queue(FrameType.LATENCY, job, header={"load": latencies["load"]}, buffers=buffers)
                record.planned_us = row["total_us"]
        if row["sparsity"] != record.sparsity:
            sql = "SELECT tensors, zero_share, run_share, lz4_share FROM tensile_internal.sparsities WHERE job = $1"
            for statistics in server.rows(sql, ["int8"], job):
                columns = zip("ifff", statistics.values(), strict=True)
                self._child.queue(FrameType.SPARSITY, job, buffers=[array(*column).tobytes() for column in columns])
            record.sparsity = row["sparsity"]
        server.commit()

    def _job_part(
        self, job: int, row: dict[str, Any], grant: dict[str, Any] | None
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return a job's part of SCHEDULE: its header, and the plans that are of use.

        Of the one in use these are rows, order and groups, of the one that a search has found rows and order."""
        record, search = self._records[job], self._searches.successful(job)
        plan, given, buffers = record.published, None, []
        if grant is not None and grant["generation"]:
            known = grant["generation"] == record.generation and record.is_planned_from(row)
            share = 1.0 if plan is None else plan.link_share
            given = {"known": known, "granted_bytes": grant["plan_granted_bytes"], "link_share": share}
            given["flows"] = grant["flows"]
            if plan is not None and known:
                buffers += [plan.rows, plan.order, plan.groups]
        if search is not None:
            buffers += [search.rows, search.order]
        return {
            "job": job,
            "traced": row["traced"],
            "least_bytes": row["least_bytes"],
            "operator": row["largest_operator"] or "",
            "policy": row["policy"],
            "compression": row["compression"],
            "swap_share": row["swap_share"],
            "load": row["load"],
            "priority": float(row["own_priority"]),
            "rank": row["priority"],
            "waited_s": row["waited_s"],
            "overhead_bytes": row["overhead_bytes"],
            "most_bytes": row["memory_budget"],
            "given": given,
            "stuck": given is not None and plan is not None and not record.is_planned_from(row),
            "pinned": given is not None and record.pinned,
            "choosing": row["choosing"],
            "found": search is not None,
            "max_slowdown": row["max_slowdown"],
        }, buffers

    def _device_part(self, view: DeviceView) -> dict[str, Any]:
        """Return the device's part of SCHEDULE's header."""
        sql = "SELECT profile, codec_times FROM tensile_internal._device_description($1)"
        (described,) = self._server.rows(sql, ["text"], view.name)
        header = {
            "name": view.name,
            "profile": json.loads(described["profile"] or "null"),
            "budget_bytes": view.situation.budget_bytes,
            "inference_bytes": view.situation.inference_bytes,
            "wanted_bytes": view.situation.wanted_bytes,
            "claimed_bytes": view.situation.claimed_bytes,
            "claimed_s": view.situation.claimed_s,
            "ending_bytes": view.situation.ending_bytes,
            "host_bytes": view.situation.host_bytes,
            "most_events": self._server.number("pg_tensile.plan_events"),
            "ageing_s": float(self._server.number("pg_tensile.ageing")),
            "codec_times": described["codec_times"],  # as text
            "memory_flow": view.situation.memory_flow,
        }
        self._server.commit()
        return header

    # -- answers ------------------------------------------------------------------------------------------------------

    async def answers(self, seconds: float) -> AsyncIterator[tuple[PlanRequest, Frame]]:
        """Yield the answers that have come, each with its request; wait up to `seconds` for the first.

        Raises ChildDied, also if an answer takes too long, Failure and Stopped.
        """
        assert self._child is not None
        limit = self._answer_limit_s()
        if any(time.monotonic() - request.sent_at > limit for request in self.requests.values()):
            raise ChildDied(f"planner made no plan within {limit:.0f} s and was killed", None)
        frame = await self._child.receive(seconds)
        while frame is not None:
            request = self._answered_request(frame)
            if request is not None:
                yield request, frame
            self._pause = 1.0
            self._server.log_again()
            frame = await self._child.receive(0)

    def _answered_request(self, frame: Frame) -> PlanRequest | None:
        """Return the request that a frame answers; None if another one has taken its place since."""
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        request = self.requests.get(frame.header.get("device", ""))
        if frame.type == FrameType.SCHEDULED and request is not None and frame.header["request"] < request.number:
            return None
        if frame.type != FrameType.SCHEDULED or request is None or request.number != frame.header["request"]:
            raise Failure("08P01", f"the planner sent an unexpected {frame.type.name} frame")
        del self.requests[request.view.name]  # if the rest fails, the request is sent again
        for job, row in request.view.jobs.items():
            if self._records.is_current(row):
                self._records[job].answered, self._records[job].deaths = True, 0
        return request
