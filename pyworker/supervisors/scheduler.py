"""The scheduler: ensures that every job has a plan and the memory for it (TENSILE, section III-D).

It makes no plans itself: the planner does, a child process with numpy. A turn reads the jobs that have a trace, the
grants in the device ledger and the devices' budgets; after a change that matters it sends the planner a request (one at
a time for a device, with the newest state) and later publishes the plans of the answer. While the planner works, jobs
go on, and so does this loop: waiting for the planner is waiting like any other.

What shrinks is published first. The ledger refuses what does not fit yet; that is tried again whenever a job has
acknowledged a smaller plan or has ended. So the grants of a device never exceed its budget, in whatever order things
happen.

The state that is held here only saves work, for everything that counts is in the catalogue and in shared memory: a
scheduler that is started anew reads the grants, and requests plans for all jobs.
"""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pg_tensile.memory_limit import memory_bytes
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_frame, failure_of_sql
from pyworker.supervisors.search import POLICY, Searches, Wanted, bucket
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType

BUSY = 1.0  # seconds between turns while there are jobs
SEARCHING = 0.25  # seconds between turns while a search for a better plan runs
IDLE = 30.0
PLANNER_IDLE = 300.0  # seconds without jobs after which the planner ends
REQUEST_TIMEOUT = 120.0  # seconds for one answer
MAX_PAUSE = 30.0  # seconds between two starts of the planner
MOST_DEATHS = 3  # of planners in a row, after which a trace that all of them had received is set aside
PENDING = "its plan is made; it waits until other jobs have given memory back"
JOBS = """
    SELECT s.*, j.priority AS own_priority, t.captured_at::text AS captured, t.largest_operator,
           cardinality(t.traces) > 0 AS traced, coalesce(j.options->>'compression', 'none') AS compression,
           coalesce(x.revision, 0) AS sparsity,
           j.batch_size = 0 AND NOT EXISTS (SELECT FROM tensile.checkpoints c
                                            WHERE c.job = s.job AND c.meta IS NOT NULL) AS choosing,
           (j.options->>'search_time')::float8 AS search_time
    FROM tensile._schedule_jobs() s JOIN tensile.jobs j ON j.id = s.job JOIN tensile.traces t ON t.job = s.job
         LEFT JOIN tensile.sparsities x ON x.job = s.job
"""
PUBLISH = "tensile._publish_plan(int8,bytea,int8,int8,float8,bytea)"
FOOTPRINT = (
    "tensile._footprint(int8,int8,bytea,int4[],int8[],int8[],float8,float8,int8,int8,int8,int8,int8,float8,int4,bytea)"
)
FOOTPRINT_FIELDS = (
    *("iteration_us", "vanilla_us", "planned_bytes", "granted_bytes", "host_bytes", "out_bytes", "in_bytes"),
    *("stall_us", "recomputes"),
)


async def run(plpy: Any) -> None:
    """Run the scheduler process."""
    await Scheduler(Server(plpy)).run()


class Situation(NamedTuple):
    """Inputs of a device's plans; a change of them is a reason to plan."""

    budget_bytes: int
    inference_bytes: int
    ending_bytes: int  # granted to jobs that are not planned any more
    host_bytes: int
    traces: dict[int, tuple[str, bool]]  # by job: when it was captured, and whether the job is pinned
    priorities: dict[int, int]
    found: dict[int, int]  # by job: number of the plan that a search has found
    queue: tuple[tuple[int, bool], ...]  # jobs without a plan, in their order, and whether they have aged
    sparsities: dict[int, int]  # by job: revision of its tensors' statistics

    def changes(self, before: Situation | None) -> list[str]:
        """Describe the differences from `before` in words; None means that the device has no plans yet.

        The end of a job counts when its memory has been given back.
        """
        if before is None:
            return [f"job {job} has come" for job in sorted(self.traces)]
        stay = sorted(self.traces.keys() & before.traces.keys())
        words = [f"job {job} has come" for job in sorted(self.traces.keys() - before.traces.keys())]
        words += [f"job {job} needs another plan" for job in stay if self.traces[job] != before.traces[job]]
        sparser = [job for job in stay if self.sparsities[job] != before.sparsities[job]]
        words += [f"the zeros in tensors of job {job} have been counted" for job in sparser]
        if self.ending_bytes <= before.ending_bytes:
            words += [f"job {job} has ended" for job in sorted(before.traces.keys() - self.traces.keys())]
        if self.ending_bytes < before.ending_bytes:
            words.append("memory was given back")
        if self.budget_bytes != before.budget_bytes:
            words.append("the budget has changed")
        if self.inference_bytes != before.inference_bytes:
            words.append("models for prediction take another part of the memory")
        if self.host_bytes < before.host_bytes or (self.host_bytes > before.host_bytes and self.queue):
            words.append("the limit of host memory has changed")
        if any(self.priorities[job] != before.priorities[job] for job in stay):
            words.append("priorities have changed")
        better = [job for job in sorted(self.found) if self.found[job] != before.found.get(job)]
        words += [f"a search has found a better plan for job {job}" for job in better]
        waiting = dict(self.queue)
        if self.queue != tuple(entry for entry in before.queue if entry[0] in waiting) and not words:
            words.append("the jobs that wait have another order")
        return words


class View(NamedTuple):
    """A device as a turn finds it."""

    name: str
    jobs: dict[int, dict[str, Any]]  # rows of JOBS, without jobs refused or set aside
    grants: dict[int, dict[str, Any]]  # by job, of all slots on the device
    situation: Situation


@dataclass
class Request:
    """Request that the planner has not answered yet."""

    number: int
    view: View
    reason: str
    asked_at: float = field(default_factory=time.monotonic)


class Plan(NamedTuple):
    """Plan as the planner has made it."""

    device: str
    captured: str
    fields: dict[str, Any]
    buffers: list[memoryview]  # rows; order; for each step: operator, bytes under the plan, bytes without one
    reason: str

    @property
    def granted_bytes(self) -> int:
        return int(self.fields["granted_bytes"])

    @property
    def link_share(self) -> float:
        return float(self.fields["link_share"])

    @property
    def host_bytes(self) -> int:
        return int(self.fields["host_bytes"])

    @property
    def rows(self) -> bytes:
        return bytes(self.buffers[0])

    @property
    def order(self) -> bytes:
        return bytes(self.buffers[1])


@dataclass
class Memory:
    """State of a job: what the planner has been sent of it, and what was published for it last."""

    captured: str  # the trace that the rest refers to
    sent: bool = False
    sparsity: int = 0  # revision of the statistics that were sent
    planned_us: float | None = None  # sum of the latencies that the planner plans with
    generation: int = 0  # of the plan that was published last; 0 if that is of no use
    published: Plan | None = None
    in_force: Plan | None = None  # the plan under which the executor has run an iteration
    pinned: bool = False  # its executor has rejected a plan since jobs came or went: it keeps its plan
    answered: bool = False  # a planner that had this trace has answered
    deaths: int = 0  # in a row, of planners that had this trace
    set_aside: bool = False

    def is_of(self, row: dict[str, Any]) -> bool:
        """Return whether the newest plan was made for this trace."""
        return self.published is not None and self.published.captured == row["captured"]


class Scheduler:
    """The scheduler; one per server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._child: Child | None = None
        self._start_after = 0.0
        self._pause = 1.0
        self._busy_at = time.monotonic()
        self._requests = 0
        self._memory: dict[int, Memory] = {}
        self._asked: dict[str, Request] = {}  # by device
        self._settled: dict[str, Situation] = {}  # by device: the one that its plans are made for
        self._pending: dict[int, Plan] = {}  # by job: not published yet
        self._tried: Any = None  # the ledger at the last attempt to publish pending plans
        self._searches = Searches(server)

    async def run(self) -> None:
        try:
            await self._server.loop(self._turn)
        finally:
            await self._searches.close()
            await self._close()

    async def _turn(self) -> float:
        """Read the state and act on it once; return the seconds until the next turn."""
        self._server.woken = False
        views = self._look()
        while self._fall_back(views):
            views = self._look()
        self._publish_pending(views)
        if await self._searches.turn(self._searched(views)):
            views = self._look()
        try:
            for view in views.values():
                await self._consider(view)
            return await self._listen(bool(self._memory))
        except ChildDied as death:
            await self._mourn(death.reason, death.traceback)
        except Stopped:
            pass
        except Failure as failure:
            await self._mourn(failure.message, failure.traceback or failure.hint)
        return 0.0

    # -- reading the state --------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, View]:
        server = self._server
        rows = server.rows(JOBS)
        grants = server.rows("SELECT * FROM tensile._grants() WHERE device IS NOT NULL")
        devices = server.rows("SELECT * FROM tensile._device_memory()")
        ageing = self._seconds("ageing")
        host = self._host_limit()
        server.commit()
        jobs = {row["job"]: row for row in rows}
        self._remember(jobs, {grant["job"]: grant for grant in grants})
        views = {}
        for device in devices:
            name = device["device"]
            mine = {job: row for job, row in jobs.items() if row["device"] == name and self._is_planned(row)}
            held = {grant["job"]: grant for grant in grants if grant["device"] == name}
            views[name] = View(name, mine, held, self._situation(device, mine, held, host, ageing))
        return views

    def _is_planned(self, row: dict[str, Any]) -> bool:
        return not row["refused"] and not self._memory[row["job"]].set_aside

    def _seconds(self, name: str) -> float:
        return float(self._server.number(f"pg_tensile.{name}"))

    def _host_limit(self) -> int:
        limit = self._server.number("pg_tensile.host_memory") << 20
        return limit or memory_bytes() // 2

    def _remember(self, jobs: dict[int, dict[str, Any]], grants: dict[int, dict[str, Any]]) -> None:
        """Update `_memory` from the catalogue and the ledger.

        Ended jobs are dropped, and so is what was published for an earlier attempt. If the set of jobs has changed,
        none is pinned any more.
        """
        if jobs.keys() != self._memory.keys():
            for memory in self._memory.values():
                memory.pinned = False
        self._memory = {job: memory for job, memory in self._memory.items() if job in jobs}
        self._pending = {job: plan for job, plan in self._pending.items() if job in jobs}
        for job, row in jobs.items():
            memory = self._memory.setdefault(job, Memory(row["captured"]))
            if memory.captured != row["captured"]:
                newest = memory.generation, memory.published
                memory = self._memory[job] = Memory(row["captured"], generation=newest[0], published=newest[1])
            grant = grants.get(job, {"generation": 0, "acknowledged": 0})
            if memory.generation > grant["generation"]:
                memory.generation, memory.published, memory.in_force = 0, None, None
            if 0 < memory.generation <= grant["acknowledged"]:
                memory.in_force = memory.published

    def _situation(
        self,
        device: dict[str, Any],
        jobs: dict[int, dict[str, Any]],
        grants: dict[int, dict[str, Any]],
        host_bytes: int,
        ageing: float,
    ) -> Situation:
        plans = [memory.published for job, memory in self._memory.items() if job not in jobs]
        others = sum(plan.host_bytes for plan in plans if plan is not None)
        waiting = [row for job, row in jobs.items() if job not in grants or not grants[job]["generation"]]
        waiting.sort(key=lambda row: (-row["priority"], row["job"]))
        return Situation(
            device["budget_bytes"],
            device["inference_bytes"],
            sum(row["granted_bytes"] + row["overhead_bytes"] for job, row in grants.items() if job not in jobs),
            max(0, host_bytes - others),
            {job: (row["captured"], self._memory[job].pinned) for job, row in jobs.items()},
            {job: row["own_priority"] for job, row in jobs.items()},
            {job: search.number for job in jobs if (search := self._searches.of(job)) is not None},
            tuple((row["job"], 0 < ageing <= row["waited_s"]) for row in waiting),
            {job: row["sparsity"] for job, row in jobs.items()},
        )

    def _searched(self, views: dict[str, View]) -> dict[int, Wanted]:
        """Return the jobs to search better plans for: those of policy swapadvisor whose plan has events."""
        seconds = float(self._server.number("pg_tensile.search_time"))
        self._server.commit()
        found = {}
        for view in views.values():
            for job, row in view.jobs.items():
                memory = self._memory[job]
                plan = memory.published
                if row["policy"] != POLICY or plan is None or not memory.is_of(row) or memory.pinned or not plan.rows:
                    continue
                budget = max(bucket(plan.fields["room_bytes"]), plan.fields["planned_bytes"])
                found[job] = Wanted(
                    *(job, view.name, row["captured"], budget, plan.link_share),
                    *(view.situation.host_bytes, plan.fields["iteration_us"], plan.rows, plan.order),
                    row["search_time"] or seconds,
                )
        return found

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _consider(self, view: View) -> None:
        """Send the planner a request if there is a reason to, and it has answered the one before."""
        if view.name in self._asked:
            return
        if not view.jobs:
            self._settled.pop(view.name, None)
            return
        changes = view.situation.changes(self._settled.get(view.name))
        late = self._late(view)
        changes += [f"latency of job {job} has changed by {change:.0%}" for job, change in late.items()]
        if changes and await self._ready():
            self._ask(view, "; ".join(changes), set(late))

    def _late(self, view: View) -> dict[int, float]:
        """Return jobs whose latency has changed beyond the threshold, with the change (TENSILE, section IV-E)."""
        threshold = float(self._server.setting("pg_tensile.update_threshold"))
        self._server.commit()
        found = {}
        for job, row in view.jobs.items():
            planned = self._memory[job].planned_us
            if row["total_us"] is not None and planned:
                change = abs(row["total_us"] - planned) / planned
                if change > threshold:
                    found[job] = change
        return found

    def _ask(self, view: View, reason: str, late: set[int]) -> None:
        assert self._child is not None
        for job, row in view.jobs.items():
            if row["traced"]:
                self._send_trace(job, row, job in late)
        self._requests += 1
        jobs, plans = [], []
        for job, row in view.jobs.items():
            given, rows = self._given(job, row, view.grants.get(job))
            search = self._searches.of(job)
            jobs.append(self._job_header(job, row, given, view) | {"found": search is not None})
            plans += rows if search is None else [*rows, search.rows, search.order]
        header = {"request": self._requests, "device": self._device_header(view), "jobs": jobs}
        self._child.queue(FrameType.SCHEDULE, header=header, buffers=plans)
        self._asked[view.name] = Request(self._requests, view, reason)

    def _send_trace(self, job: int, row: dict[str, Any], late: bool) -> None:
        """Send what the planner lacks: the training step's trace, and newer latencies and statistics."""
        assert self._child is not None
        memory = self._memory[job]
        if not memory.sent:
            found = self._server.rows("SELECT traces[1] AS trace FROM tensile.traces WHERE job = $1", ["int8"], job)
            header = {"device": row["device"]}
            self._child.queue(FrameType.TRACE, job, header=header, buffers=[each["trace"] for each in found])
            memory.sent = late = bool(found)
            memory.planned_us, memory.sparsity = None, 0
        if late and row["total_us"] is not None:
            found = self._server.rows("SELECT average FROM tensile.latencies WHERE job = $1", ["int8"], job)
            for each in found:
                self._child.queue(FrameType.LATENCY, job, buffers=[array("f", each["average"]).tobytes()])
                memory.planned_us = row["total_us"]
        if row["sparsity"] != memory.sparsity:
            self._send_sparsity(job)
            memory.sparsity = row["sparsity"]
        self._server.commit()

    def _send_sparsity(self, job: int) -> None:
        assert self._child is not None
        sql = "SELECT tensors, zero_share, run_share, lz4_share FROM tensile.sparsities WHERE job = $1"
        for each in self._server.rows(sql, ["int8"], job):
            columns = zip("ifff", each.values(), strict=True)
            self._child.queue(FrameType.SPARSITY, job, buffers=[array(*column).tobytes() for column in columns])

    def _given(
        self, job: int, row: dict[str, Any], grant: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, list[bytes]]:
        """Return the job's grant (None without one), and the rows and the order of its plan if they are of use."""
        if grant is None or not grant["generation"]:
            return None, []
        memory = self._memory[job]
        plan = memory.published
        known = grant["generation"] == memory.generation and memory.is_of(row)
        share = 1.0 if plan is None else plan.link_share
        given = {"known": known, "granted_bytes": grant["plan_granted_bytes"], "link_share": share}
        return given, [plan.rows, plan.order] if plan is not None and known else []

    def _job_header(self, job: int, row: dict[str, Any], given: dict[str, Any] | None, view: View) -> dict[str, Any]:
        memory = self._memory[job]
        return {
            "job": job,
            "traced": row["traced"],
            "least_bytes": row["least_bytes"],
            "operator": row["largest_operator"] or "",
            "policy": row["policy"],
            "compression": row["compression"],
            "priority": float(row["own_priority"]),
            "rank": row["priority"],
            "waited_s": row["waited_s"],
            "overhead_bytes": row["overhead_bytes"],
            "most_bytes": row["memory_budget"],
            "given": given,
            "stuck": given is not None and memory.published is not None and not memory.is_of(row),
            "pinned": given is not None and memory.pinned,
            "choosing": row["choosing"],
        }

    def _device_header(self, view: View) -> dict[str, Any]:
        sql = "SELECT profile FROM tensile.device_profiles WHERE device = $1"
        profiles = self._server.rows(sql, ["text"], view.name)
        codecs = self._server.rows("SELECT times FROM tensile.codec_times WHERE device = $1", ["text"], view.name)
        header = {
            "name": view.name,
            "profile": json.loads(profiles[0]["profile"]) if profiles else None,
            "budget_bytes": view.situation.budget_bytes,
            "inference_bytes": view.situation.inference_bytes,
            "ending_bytes": view.situation.ending_bytes,
            "host_bytes": view.situation.host_bytes,
            "most_events": self._server.number("pg_tensile.plan_events"),
            "ageing_s": self._seconds("ageing"),
            "codec_times": codecs[0]["times"] if codecs else None,  # as text
        }
        self._server.commit()
        return header

    # -- the planner --------------------------------------------------------------------------------------------------

    async def _ready(self) -> bool:
        """Return whether the planner runs, starting it if necessary and possible. Raises ChildDied, Failure."""
        if self._child is None and time.monotonic() >= self._start_after:
            self._child = Child(self._server, "planner", threads=1)
            await self._child.start()
        return self._child is not None

    async def _listen(self, busy: bool) -> float:
        """Wait for the planner if it runs; return the seconds that are left to wait without it."""
        now = time.monotonic()
        self._busy_at = now if busy else self._busy_at
        pause = SEARCHING if self._searches.searching else BUSY if busy or self._asked else IDLE
        if self._child is None:
            return min(pause, max(0.0, self._start_after - now)) if self._start_after > now else pause
        if now - self._busy_at > PLANNER_IDLE and not self._asked:
            await self._close()
            return pause
        patience = min(REQUEST_TIMEOUT, self._seconds("executor_timeout") or REQUEST_TIMEOUT)
        if any(now - request.asked_at > patience for request in self._asked.values()):
            raise ChildDied(f"planner made no plan within {patience:.0f} s and was killed", None)
        frame = await self._child.receive(pause)
        while frame is not None:
            self._hear(frame)
            frame = await self._child.receive(0)
        return 0.0

    def _hear(self, frame: Frame) -> None:
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        request = self._asked.get(frame.header.get("device", ""))
        if frame.type != FrameType.SCHEDULED or request is None or request.number != frame.header["request"]:
            raise Failure("08P01", f"the planner sent an unexpected {frame.type.name} frame")
        del self._asked[request.view.name]  # if the rest fails, the request is sent again
        for job, row in request.view.jobs.items():
            if self._is_current(row):
                self._memory[job].answered, self._memory[job].deaths = True, 0
        self._follow(request, frame)
        self._settled[request.view.name] = request.view.situation
        self._pause = 1.0
        self._server.log_again()

    async def _mourn(self, reason: str, traceback: str | None) -> None:
        """Record that the planner is gone: jobs go on under their plans, and those that wait are given the reason."""
        await self._close()
        lines = (traceback or "").splitlines()
        more = f" ({lines[-1]})" if lines else ""
        reason = f"planner died: {reason}{more}"
        self._server.log_once(reason)
        self._server.call("tensile._log(text,int8,int8,text,text)", "planner", None, None, None, reason)
        for request in self._asked.values():
            for job in request.view.jobs:
                self._server.call("tensile._job_waits(int8,text)", job, f"{reason}; it is started again")
            self._suspect(request, reason)
        self._asked.clear()
        self._server.commit()
        self._start_after = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def _suspect(self, request: Request, reason: str) -> None:
        """Set a trace aside if too many planners have died that were sent it.

        A trace may have been too much for the planner. If no planner survives, the newest trace is set aside first; if
        that does not help, the one before it.
        """
        traced = [row for row in request.view.jobs.values() if row["traced"] and self._is_current(row)]
        new = [row for row in traced if not self._memory[row["job"]].answered]
        for row in new:
            self._memory[row["job"]].deaths += 1
        suspects = [row for row in new if self._memory[row["job"]].deaths >= MOST_DEATHS]
        if not suspects:
            return
        job = max(suspects, key=lambda row: (row["captured"], row["job"]))["job"]
        self._memory[job].set_aside = True
        reason = (
            f"its trace is set aside, for {self._memory[job].deaths} planners have died that were given it: {reason}"
        )
        self._server.call("tensile._job_waits(int8,text)", job, reason)
        self._log("failed", job, request.view.name, reason)

    async def _close(self) -> None:
        if self._child is not None:
            await self._child.close()
            self._child = None
        for memory in self._memory.values():
            memory.sent = False

    # -- answers ------------------------------------------------------------------------------------------------------

    def _follow(self, request: Request, frame: Frame) -> None:
        """Carry out the planner's decisions; what shrinks is published first."""
        view, header = request.view, frame.header
        for job, total_us in header["totals_us"].items():
            memory = self._memory.get(int(job))
            if memory is not None and memory.planned_us is None:
                memory.planned_us = total_us
        buffers = iter(frame.buffers)
        plans: dict[int, Plan] = {}
        for answer in header["jobs"]:
            job, row = answer["job"], view.jobs[answer["job"]]
            if answer["decision"] == "planned":
                five = [next(buffers) for _ in range(5)]
                plans[job] = Plan(view.name, row["captured"], answer, five, request.reason)
            self._pending.pop(job, None)
        for answer in header["jobs"]:
            if self._is_current(view.jobs[answer["job"]]):
                self._tell(view.name, answer)
        for job, decisions in header["codings"].items():
            if self._is_current(view.jobs[int(job)]):
                self._server.call("tensile._coding(int8,jsonb)", int(job), decisions)
        for note in header["notes"]:
            self._log("note", note["job"], view.name, note["reason"])
        details = {"seconds": round(header["seconds"], 3), "jobs": len(header["jobs"]), "plans": len(plans)}
        self._log("scheduled", None, view.name, request.reason, details)
        self._server.commit()
        growth = {
            job: plan.granted_bytes - view.grants[job]["granted_bytes"] if job in view.grants else plan.granted_bytes
            for job, plan in plans.items()
        }
        for job in sorted(plans, key=lambda job: (growth[job], job)):
            self._publish(job, plans[job])
        self._tried = None

    def _is_current(self, row: dict[str, Any]) -> bool:
        """Return whether the job still has the trace that the planner was sent."""
        memory = self._memory.get(row["job"])
        return memory is not None and memory.captured == row["captured"]

    def _tell(self, device: str, answer: dict[str, Any]) -> None:
        """Record a decision that is no plan in the job's row and in the log."""
        job, decision = answer["job"], answer["decision"]
        if decision in ("waits", "failed"):
            news = self._server.call("tensile._job_waits(int8,text)", job, answer["reason"])
            if news or decision == "failed":
                self._log(decision, job, device, answer["reason"])
        elif decision == "refused":
            refusal = {key: answer[key] for key in ("budget_bytes", "least_bytes", "operator")}
            self._server.call("tensile._job_refuse(int8,jsonb)", job, refusal)
            least, budget = answer["least_bytes"], answer["budget_bytes"]
            reason = f"it needs at least {least:,} bytes of device memory, and may have {budget:,}"
            self._log("refused", job, device, reason, refusal)

    def _log(
        self,
        event: str,
        job: int | None,
        device: str,
        reason: str,
        details: dict[str, Any] | None = None,
        generation: int | None = None,
    ) -> None:
        signature = "tensile._log(text,int8,int8,text,text,jsonb)"
        self._server.call(signature, event, job, generation, device, reason, details or {})

    # -- publishing ---------------------------------------------------------------------------------------------------

    def _publish_pending(self, views: dict[str, View]) -> None:
        """Try to publish pending plans again if the ledger has changed since the last attempt."""
        ledger = [(view.situation.budget_bytes, view.situation.inference_bytes, view.grants) for view in views.values()]
        if ledger == self._tried or not self._pending:
            return
        for job, plan in list(self._pending.items()):
            if plan.device not in self._asked:
                self._publish(job, plan)
        self._tried = ledger

    def _fall_back(self, views: dict[str, View]) -> bool:
        """Publish the previous plan for each job whose executor has rejected one; return whether any has.

        The executor stays with the previous plan, so the ledger and the plan table must have that one. The same plan
        would be rejected again, so the job is pinned until its trace or the set of jobs changes.
        """
        found = False
        for view in views.values():
            for job, row in view.jobs.items():
                memory = self._memory[job]
                if row["rejected"] is None or row["rejected"] != memory.generation:
                    continue
                found = True
                memory.generation, memory.pinned = 0, True
                reason = f"its executor has rejected the plan of generation {row['rejected']}: it keeps the one before"
                if memory.in_force is None or memory.published is memory.in_force:
                    self._log("failed", job, view.name, reason)
                    self._server.commit()
                else:
                    memory.in_force = memory.in_force._replace(reason=reason)
                    self._publish(job, memory.in_force)
        return found

    def _publish(self, job: int, plan: Plan) -> None:
        """Publish a plan if the ledger has room for it; else it is pending."""
        self._pending.pop(job, None)
        memory = self._memory.get(job)
        if memory is None or memory.captured != plan.captured:
            return
        fields = plan.fields
        numbers = (fields["planned_bytes"], fields["granted_bytes"], fields["link_share"])
        try:
            generation = self._server.call(PUBLISH, job, plan.rows, *numbers, plan.order)
            if generation is None:
                self._pending[job] = plan
                self._server.call("tensile._job_waits(int8,text)", job, PENDING)
            else:
                self._note_plan(job, plan, generation)
            self._server.commit()
        except self._server.plpy.SPIError as error:
            self._server.rollback()
            self._cannot_publish(job, plan, failure_of_sql(error))
            return
        if generation is not None:
            memory.generation, memory.published = generation, plan

    def _note_plan(self, job: int, plan: Plan, generation: int) -> None:
        fields, (_, _, operators, footprint, vanilla) = plan.fields, plan.buffers
        if len(operators):
            steps = (operators.cast("i").tolist(), footprint.cast("q").tolist(), vanilla.cast("q").tolist())
            numbers = [fields[name] for name in FOOTPRINT_FIELDS]
            self._server.call(FOOTPRINT, job, generation, plan.rows, *steps, *numbers, plan.order)
        details = {name: fields[name] for name in (*FOOTPRINT_FIELDS, "link_share")}
        details["events"] = len(plan.buffers[0]) // 32
        self._log("planned", job, plan.device, plan.reason, details, generation)

    def _cannot_publish(self, job: int, plan: Plan, failure: Failure) -> None:
        if failure.sqlstate == "42704":
            return  # its worker is gone
        reason = f"its plan cannot be published: {failure.message}"
        self._server.call("tensile._job_waits(int8,text)", job, reason)
        self._log("failed", job, plan.device, reason)
        self._server.commit()
