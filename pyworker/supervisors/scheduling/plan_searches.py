"""The scheduler's searches for better plans, for jobs of the policies swapadvisor and joint.

One search runs at a time, the others queue. Each is a child process of its own (children/plan_search.py), which ends
when the job ends, sends another trace or is given other memory. Results are stored in the catalogue, by the graph's
fingerprint and the memory: another job with both takes the result at once and need not search.

Nothing is decided about plans here: the result of a search is one more plan that the planner may choose. Standard
library only.
"""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_frame
from pyworker.supervisors.scheduling.event_log import log_event
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType

EXTRA_TIME = 60.0  # seconds by which a search may exceed its time
POLICIES = ("swapadvisor", "joint")


class PlanSearchTask(NamedTuple):
    """Job whose plan may be improved: the plan that it was given, and what that was made for."""

    job: int
    device: str
    captured: str  # when its trace was captured
    budget_bytes: int  # that a plan may take
    link_share: float
    host_bytes: int
    iteration_us: float
    rows: bytes
    order: bytes
    seconds: float
    policy: str


@dataclass
class PlanSearch:
    """Search for one job.

    `number` identifies the newest plan that was worth a change, counted over all jobs (0 if none was); `rows` and
    `order` are that plan.
    """

    task: PlanSearchTask
    state: str = "queued"
    cached: bool = False
    number: int = 0
    rows: bytes = b""
    order: bytes = b""
    best_us: float | None = None
    generation: int = 0
    evaluations: int = 0

    def serves(self, task: PlanSearchTask) -> bool:
        """Return whether the search is still of use for `task`.

        It has to be about the same trace and, unless the job's plan is its own result, about the same memory.
        """
        if task.captured != self.task.captured:
            return False
        own = self.number > 0 and (task.rows, task.order) == (self.rows, self.order)
        return own or task.budget_bytes == self.task.budget_bytes


class PlanSearches:
    """Searches of the scheduler; one instance per scheduler."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._searches: dict[int, PlanSearch] = {}
        self._child: Child | None = None
        self._job = 0  # whose search runs
        self._deadline = 0.0
        self._better_plans = 0  # their number, of all jobs

    @property
    def searching(self) -> bool:
        return self._child is not None

    def successful(self, job: int) -> PlanSearch | None:
        """Return the job's search if it has found a plan, else None."""
        search = self._searches.get(job)
        return search if search is not None and search.number else None

    async def turn(self, tasks: dict[int, PlanSearchTask]) -> bool:
        """End searches that are of no use, receive results, start the next; return whether one is a better plan."""
        before = self._better_plans
        for job, search in list(self._searches.items()):
            if job not in tasks or not search.serves(tasks[job]):
                await self._remove(job, ended=job not in tasks)
        for job in sorted(tasks.keys() - self._searches.keys()):
            self._add(tasks[job])
        try:
            await self._receive()
            if self._child is None:
                await self._start()
        except ChildDied as death:
            await self._search_failed(death.reason)
        except Stopped:
            await self.close()
        except Failure as failure:
            await self._search_failed(failure.message)
        return self._better_plans > before

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close()
            self._child = None

    # -- start and end -------------------------------------------------------------------------------------------------

    def _add(self, task: PlanSearchTask) -> None:
        """Take the result of an earlier search, and queue a new search unless that one is as good."""
        search = self._searches[task.job] = PlanSearch(task)
        sql = "SELECT * FROM tensile_internal._searched($1, $2)"
        for row in self._server.rows(sql, ["int8", "int8"], task.job, task.budget_bytes):
            search.cached = True
            self._accept(search, row["events"], row["plan_order"], row["iteration_us"], row["generations"], 0)
            if row["bucket_bytes"] == task.budget_bytes and row["seconds"] >= task.seconds:
                search.state = "finished"
        self._report(search)

    def _accept(
        self, search: PlanSearch, rows: bytes, order: bytes, us: float, generation: int, evaluations: int
    ) -> None:
        self._better_plans += 1
        search.number, search.rows, search.order = self._better_plans, rows, order
        search.best_us, search.generation, search.evaluations = us, generation, evaluations

    async def _remove(self, job: int, ended: bool) -> None:
        search = self._searches.pop(job)
        if job == self._job and self._child is not None:
            await self.close()
        if ended and search.state in ("queued", "searching"):
            search.state = "stopped"
            self._report(search)

    async def _search_failed(self, reason: str) -> None:
        """End the search after its process has failed: the job continues with the best plan that it has."""
        await self.close()
        search = self._searches[self._job]
        search.state = "failed"
        reason = f"the search for a better plan has failed: {reason}"
        log_event(self._server, "search", search.task.job, search.task.device, reason)
        self._report(search)

    # -- the child -----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        search = next((search for search in self._searches.values() if search.state == "queued"), None)
        if search is None:
            return
        task = search.task
        request = self._request(task)
        if request is None:
            return
        self._job, search.state = task.job, "searching"
        self._child = Child(self._server, "plan_search", threads=1)
        await self._child.start()
        header, trace, average = request
        buffers = [trace, average, search.rows if search.number else task.rows]
        buffers.append(search.order if search.number else task.order)
        self._child.queue(FrameType.PLAN_SEARCH, task.job, header=header, buffers=buffers)
        self._deadline = time.monotonic() + task.seconds + EXTRA_TIME
        self._report(search)

    def _request(self, task: PlanSearchTask) -> tuple[dict[str, Any], bytes, bytes] | None:
        """Return the header of PLAN_SEARCH, the trace and its latencies now, or None if the job is ending."""
        sql = """
            SELECT t.traces[1] AS trace, l.average, j.seed, p.profile::text AS profile
            FROM tensile_internal.traces t JOIN tensile_internal.jobs j ON j.id = t.job
                 CROSS JOIN LATERAL tensile_internal._device_description(t.device) p
                 LEFT JOIN tensile_internal.operator_latencies l ON l.job = t.job
            WHERE t.job = $1 AND t.captured_at::text = $2
        """
        rows = self._server.rows(sql, ["int8", "text"], task.job, task.captured)
        events, processes = (self._server.number(f"pg_tensile.{name}") for name in ("plan_events", "search_processes"))
        self._server.commit()
        if not rows:
            return None
        header = {
            "policy": task.policy,
            "profile": json.loads(rows[0]["profile"]),
            "link_share": task.link_share,
            "budget_bytes": task.budget_bytes,
            "seconds": task.seconds,
            "seed": (rows[0]["seed"] or 0) & ((1 << 63) - 1),
            "processes": processes,
            "host_bytes": task.host_bytes,
            "plan_events": events,
        }
        return header, rows[0]["trace"], array("f", rows[0]["average"] or []).tobytes()

    async def _receive(self) -> None:
        while self._child is not None:
            if time.monotonic() > self._deadline:
                raise ChildDied(f"it did not end within {EXTRA_TIME:.0f} s of its time and was killed", None)
            frame = await self._child.receive(0)
            if frame is None:
                return
            await self._handle(frame)

    async def _handle(self, frame: Frame) -> None:
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        if frame.type != FrameType.FOUND or frame.job != self._job:
            raise Failure("08P01", f"the search sent an unexpected {frame.type.name} frame")
        header, (rows, order) = frame.header, map(bytes, frame.buffers)
        search = self._searches[self._job]
        search.best_us, search.generation, search.evaluations = (
            header[name] for name in ("iteration_us", "generation", "evaluations")
        )
        search.task = search.task._replace(iteration_us=header["first_us"])
        if header["worth"]:
            self._accept(search, rows, order, search.best_us or 0.0, search.generation, search.evaluations)
        if header["done"]:
            await self._finish(search, rows, order, header["device_peak_bytes"])
        self._report(search)

    async def _finish(self, search: PlanSearch, rows: bytes, order: bytes, peak_bytes: int) -> None:
        await self.close()
        task, search.state = search.task, "finished"
        self._server.call(
            "tensile_internal._search_result(int8,int8,int8,bytea,bytea,float8,float8,int4)",
            task.job,
            task.budget_bytes,
            peak_bytes,
            rows,
            order,
            search.best_us,
            task.seconds,
            search.generation,
        )
        details = {"first_us": task.iteration_us, "best_us": search.best_us, "generation": search.generation}
        details |= {"evaluations": search.evaluations, "budget_bytes": task.budget_bytes, "seconds": task.seconds}
        log_event(self._server, "search", task.job, task.device, "the search for a better plan has ended", details)

    # -- reporting -----------------------------------------------------------------------------------------------------

    def _report(self, search: PlanSearch) -> None:
        task = search.task
        self._server.call(
            "tensile_internal._search(int8,text,int8,float8,bool,float8,float8,int4,int8)",
            task.job,
            search.state,
            task.budget_bytes,
            task.seconds,
            search.cached,
            task.iteration_us,
            search.best_us,
            search.generation,
            search.evaluations,
        )
        self._server.commit()


def memory_bucket(nbytes: int) -> int:
    """Round down to one of 32 steps between two powers of two.

    So searches and their results treat nearly equal memory as equal.
    """
    step = 1 << max(0, nbytes.bit_length() - 6)
    return nbytes // step * step
