"""The scheduler: ensures that every job has a plan and the memory for it (TENSILE, section III-D).

It makes no plans itself: the planner does, a child process with numpy. A turn reads the jobs that have a trace, the
grants in the device ledger and the devices' budgets (scheduling/device_views.py); after a change that matters it sends
the planner a request, one at a time for a device, with the newest state (scheduling/planner_client.py), and later
publishes the plans of the answer (scheduling/publisher.py). Where many passes would take long, the planner makes few
after a change, so that no job waits, and the rest is requested next; that request is replaced if there is another
change meanwhile. While the planner works, jobs continue, and so does this loop:
waiting for the planner is waiting like any other.

The state that is held here only saves work, for everything that counts is in the catalogue and in shared memory: a
scheduler that is started again reads the grants, and requests plans for all jobs. Standard library only.
"""

from __future__ import annotations

import time
from typing import Any

from pyworker.supervisors.failures import ChildDied, Failure, Stopped
from pyworker.supervisors.scheduling.device_views import DeviceView, Situation, read_device_views
from pyworker.supervisors.scheduling.job_records import JobRecords
from pyworker.supervisors.scheduling.load_changes import LoadChanges
from pyworker.supervisors.scheduling.plan_searches import POLICIES, PlanSearches, PlanSearchTask, memory_bucket
from pyworker.supervisors.scheduling.planner_client import PlannerClient
from pyworker.supervisors.scheduling.publisher import Publisher
from pyworker.supervisors.server import Server

BUSY = 1.0  # seconds between turns while there are jobs
SEARCHING = 0.25  # seconds between turns while a search for a better plan runs
IDLE = 30.0


async def run(plpy: Any) -> None:
    """Run the scheduler process."""
    await Scheduler(Server(plpy)).run()


class Scheduler:
    """The scheduler; one per server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._records = JobRecords()
        self._searches = PlanSearches(server)
        self._planner = PlannerClient(server, self._records, self._searches)
        self._publisher = Publisher(server, self._records)
        self._planned: dict[str, Situation] = {}  # by device: the one that its plans are made for
        self._loads = LoadChanges()
        self._brief: set[str] = set()  # devices whose memory was divided in few passes

    async def run(self) -> None:
        try:
            await self._server.loop(self._turn)
        finally:
            await self._searches.close()
            await self._planner.close()

    async def _turn(self) -> float:
        """Read the state and act on it once; return the seconds until the next turn."""
        self._server.woken = False
        views = self._read_views()
        while self._publisher.withdraw_rejected(views):
            views = self._read_views()
        self._publisher.publish_pending(views, self._planner.soon_answered())
        if await self._searches.turn(self._search_tasks(views)):
            views = self._read_views()
        try:
            for view in views.values():
                await self._request_plans(view)
            return await self._receive_plans()
        except ChildDied as death:
            await self._planner.planner_died(death.reason, death.traceback)
        except Stopped:
            pass
        except Failure as failure:
            await self._planner.planner_died(failure.message, failure.traceback or failure.hint)
        return 0.0

    def _read_views(self) -> dict[str, DeviceView]:
        return read_device_views(self._server, self._records, self._searches)

    def _search_tasks(self, views: dict[str, DeviceView]) -> dict[int, PlanSearchTask]:
        """Return the searches to be made, by job: for jobs whose plan has events.

        Those of policy joint have to train for a while and to lose time by their plan, so that a better one pays.
        """
        seconds = float(self._server.number("pg_tensile.search_time"))
        self._server.commit()
        tasks = {}
        for view in views.values():
            for job, row in view.jobs.items():
                record = self._records[job]
                plan = record.published
                searched = row["policy"] in POLICIES and record.is_planned_from(row) and not record.pinned
                if plan is None or not searched or not plan.rows:
                    continue
                if row["policy"] == "joint" and not record.is_worth_a_search(plan):
                    continue
                budget = max(memory_bucket(plan.fields["room_bytes"]), plan.fields["planned_bytes"])
                tasks[job] = PlanSearchTask(
                    job=job,
                    device=view.name,
                    captured=row["captured"],
                    budget_bytes=budget,
                    link_share=plan.link_share,
                    host_bytes=view.situation.host_bytes,
                    iteration_us=plan.fields["iteration_us"],
                    rows=plan.rows,
                    order=plan.order,
                    seconds=row["search_time"] or seconds,
                    policy=row["policy"],
                )
        return tasks

    async def _request_plans(self, view: DeviceView) -> None:
        """Send the planner a request if there is a reason to, and the one before is answered or out of date."""
        request = self._planner.requests.get(view.name)
        if request is not None and (request.may_be_brief or not view.situation.changes(request.view.situation)):
            return
        if not view.jobs:
            self._planned.pop(view.name, None)
            self._loads.forget(view.name)
            self._brief.discard(view.name)
            self._publisher.tell_predictor(view, [], 0)
            self._server.commit()
            return
        reasons = view.situation.changes(self._planned.get(view.name))
        may_be_brief = bool(reasons)
        if not reasons and view.name in self._brief:
            reasons = ["the memory was divided in few passes"]
        changed = self._changed_latencies(view)
        reasons += [f"latency of job {job} has changed by {change:.0%}" for job, change in changed.items()]
        reasons += self._loads.clear_changes(view.name, view.loads())
        if reasons and await self._planner.start():
            self._planner.send_request(view, "; ".join(reasons), may_be_brief)

    def _changed_latencies(self, view: DeviceView) -> dict[int, float]:
        """Return jobs whose latency has changed beyond the threshold, with the change (TENSILE, section IV-E)."""
        threshold = float(self._server.setting("pg_tensile.update_threshold"))
        self._server.commit()
        changes = {}
        for job, row in view.jobs.items():
            planned_us = self._records[job].planned_us
            if row["total_us"] is not None and planned_us:
                change = abs(row["total_us"] - planned_us) / planned_us
                if change > threshold:
                    changes[job] = change
        return changes

    async def _receive_plans(self) -> float:
        """Carry out the planner's answers, waiting for one if it runs; return the seconds left to wait without it."""
        planner = self._planner
        busy = bool(self._records or planner.requests)
        pause = SEARCHING if self._searches.searching else BUSY if busy else IDLE
        await planner.close_if_unused()
        if not planner.running:
            return min(pause, planner.seconds_to_start)
        async for request, frame in planner.answers(pause):
            device, abandoned = request.view.name, frame.header.get("abandoned")
            if abandoned is None:
                self._publisher.carry_out(request, frame)
            if abandoned != "newer":
                self._planned[device] = request.view.situation
                self._loads.record(device, request.view.loads(), time.monotonic() - request.sent_at)
                (self._brief.add if frame.header.get("brief") else self._brief.discard)(device)
        return 0.0
