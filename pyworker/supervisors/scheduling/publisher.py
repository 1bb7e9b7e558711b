"""Execution of the planner's decisions: publication of plans, and reasons for jobs that have none.

What shrinks is published first. The ledger refuses what does not fit yet; that is tried again whenever a job has
acknowledged a smaller plan or has ended. So the grants of a device never exceed its budget, in whatever order things
happen. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pyworker.supervisors.failures import Failure, failure_of_sql
from pyworker.supervisors.scheduling.device_views import DeviceView
from pyworker.supervisors.scheduling.event_log import log_event
from pyworker.supervisors.scheduling.job_records import JobRecords, Plan
from pyworker.supervisors.scheduling.planner_client import PlanRequest
from pyworker.supervisors.server import Server
from pyworker.wire import Frame

PENDING = "its plan is made; it waits until other jobs have given memory back"
PUBLISH = "tensile_internal._publish_plan(int8,bytea,int8,int8,float8,bytea,bytea)"
LACK = "tensile_internal._lack_memory(text,int8[],int8,int8)"
BUFFERS = 6  # of a plan: those of job_records.Plan
FOOTPRINT = (
    "tensile_internal._footprint(int8,int8,bytea,int4[],int8[],int8[],float8,float8,int8,int8,int8,int8,int8,float8,int4,"
    "bytea,bytea)"
)
FOOTPRINT_FIELDS = (
    "iteration_us", "vanilla_us", "planned_bytes", "granted_bytes", "host_bytes", "out_bytes", "in_bytes", "stall_us",
    "recomputes",
)  # fmt: skip


class Publisher:
    """Publishes the plans of all devices."""

    def __init__(self, server: Server, records: JobRecords) -> None:
        self._server = server
        self._records = records
        self._pending: dict[int, Plan] = {}  # by job: not published yet
        self._lacks: dict[str, bool] = {}  # by device: whether jobs lack memory
        self._tried_ledger: Any = None  # the ledger at the last attempt to publish pending plans

    # -- decisions ----------------------------------------------------------------------------------------------------

    def carry_out(self, request: PlanRequest, frame: Frame) -> None:
        """Carry out the planner's decisions; what shrinks is published first."""
        view, header = request.view, frame.header
        for job, total_us in header["totals_us"].items():
            record = self._records.get(int(job))
            if record is not None and record.planned_us is None:
                record.planned_us = total_us
        buffers = iter(frame.buffers)
        plans: dict[int, Plan] = {}
        for answer in header["jobs"]:
            job, row = answer["job"], view.jobs[answer["job"]]
            if answer["decision"] == "planned":
                plan_buffers = [next(buffers) for _ in range(BUFFERS)]
                plans[job] = Plan(view.name, row["captured"], answer, plan_buffers, request.reason)
            self._pending.pop(job, None)
        for answer in header["jobs"]:
            if self._records.is_current(view.jobs[answer["job"]]):
                self._tell_job(view.name, answer)
        for job, decisions in header["codings"].items():
            if self._records.is_current(view.jobs[int(job)]):
                self._server.call("tensile_internal._coding(int8,jsonb)", int(job), decisions)
        for note in header["notes"]:
            log_event(self._server, "note", note["job"], view.name, note["reason"])
        details = {
            "seconds": round(header["seconds"], 3),
            "jobs": len(header["jobs"]),
            "plans": len(plans),
            "brief": header["brief"],
        }
        log_event(self._server, "scheduled", None, view.name, request.reason, details)
        self._server.commit()
        before = {job: view.grants[job]["granted_bytes"] if job in view.grants else 0 for job in plans}
        growth = {job: (0 if plan.groups else plan.granted_bytes) - before[job] for job, plan in plans.items()}
        for job in sorted(plans, key=lambda job: (growth[job], job)):
            self._publish(job, plans[job])
        self.tell_predictor(view, header["lacking"], header["slowed_bytes"])
        self._server.commit()
        self._tried_ledger = None

    def tell_predictor(self, view: DeviceView, lacking: list[int], slowed_bytes: int) -> None:
        """Tell the predictor what waiting jobs lack, and the running ones to lose no time, as of `view`."""
        if lacking or slowed_bytes or self._lacks.get(view.name, True):
            self._server.call(LACK, view.name, lacking, slowed_bytes, view.situation.inference_bytes)
        self._lacks[view.name] = bool(lacking or slowed_bytes)

    def _tell_job(self, device: str, answer: dict[str, Any]) -> None:
        """Record a decision that is not a plan in the job's row and in the log."""
        job, decision = answer["job"], answer["decision"]
        if decision in ("waits", "failed"):
            is_new = self._server.call("tensile_internal._job_waits(int8,text)", job, answer["reason"])
            if is_new or decision == "failed":
                log_event(self._server, decision, job, device, answer["reason"])
        elif decision == "refused":
            refusal = {key: answer[key] for key in ("budget_bytes", "least_bytes", "operator", "max_slowdown")}
            self._server.call("tensile_internal._job_refuse(int8,jsonb)", job, refusal)
            least, budget = answer["least_bytes"], answer["budget_bytes"]
            reason = f"it needs at least {least:,} bytes of device memory, and may have {budget:,}"
            log_event(self._server, "refused", job, device, reason, refusal)

    # -- plans --------------------------------------------------------------------------------------------------------

    def publish_pending(self, views: dict[str, DeviceView], busy: Collection[str]) -> None:
        """Try to publish pending plans again if the ledger has changed since the last attempt.

        What jobs hold whose memory flows changes all the time, so beside them each turn is another attempt.

        Plans of devices in `busy` are not tried: newer ones are coming.
        """
        self._pending = {job: plan for job, plan in self._pending.items() if job in self._records}
        ledger = [(*view.situation[:3], view.grants) for view in views.values()]
        flows = any(grant["flows"] for view in views.values() for grant in view.grants.values())
        if not self._pending or (ledger == self._tried_ledger and not flows):
            return
        for job, plan in list(self._pending.items()):
            if plan.device not in busy:
                self._publish(job, plan)
        self._tried_ledger = ledger

    def withdraw_rejected(self, views: dict[str, DeviceView]) -> bool:
        """Publish the previous plan for each job whose trainer has rejected one; return whether any has.

        The trainer stays with the previous plan, so the ledger and the plan table must have that one. The same plan
        would be rejected again, so the job is pinned until its trace or the set of jobs changes.
        """
        withdrawn = False
        for view in views.values():
            for job, row in view.jobs.items():
                record = self._records[job]
                if row["rejected"] is None or row["rejected"] != record.generation:
                    continue
                withdrawn = True
                record.generation, record.pinned = 0, True
                reason = f"its trainer has rejected the plan of generation {row['rejected']}: it keeps the one before"
                if record.in_force is None or record.published is record.in_force:
                    log_event(self._server, "failed", job, view.name, reason)
                    self._server.commit()
                else:
                    record.in_force = record.in_force._replace(reason=reason)
                    self._publish(job, record.in_force)
        return withdrawn

    def _publish(self, job: int, plan: Plan) -> None:
        """Publish a plan if the ledger has room for it; else it is pending."""
        self._pending.pop(job, None)
        record = self._records.get(job)
        if record is None or record.captured != plan.captured:
            return
        numbers = (plan.fields["planned_bytes"], plan.granted_bytes, plan.link_share)
        try:
            generation = self._server.call(PUBLISH, job, plan.rows, *numbers, plan.order, plan.groups)
            if generation is None:
                self._pending[job] = plan
                self._server.call("tensile_internal._job_waits(int8,text)", job, PENDING)
            else:
                self._record_publication(job, plan, generation)
            self._server.commit()
        except self._server.plpy.SPIError as error:
            self._server.rollback()
            self._record_failure(job, plan, failure_of_sql(error))
            return
        if generation is not None:
            record.generation, record.published = generation, plan

    def _record_publication(self, job: int, plan: Plan, generation: int) -> None:
        fields, (operators, footprint, vanilla) = plan.fields, plan.buffers[2:5]
        if len(operators):
            steps = (operators.cast("i").tolist(), footprint.cast("q").tolist(), vanilla.cast("q").tolist())
            numbers = [fields[name] for name in FOOTPRINT_FIELDS]
            self._server.call(FOOTPRINT, job, generation, plan.rows, *steps, *numbers, plan.order, plan.groups)
        details = {name: fields[name] for name in (*FOOTPRINT_FIELDS, "link_share")}
        details["events"] = len(plan.buffers[0]) // 32
        details["groups"] = len(plan.groups) // 32
        log_event(self._server, "planned", job, plan.device, plan.reason, details, generation)

    def _record_failure(self, job: int, plan: Plan, failure: Failure) -> None:
        if failure.sqlstate == "42704":
            return  # its worker is gone
        reason = f"its plan cannot be published: {failure.message}"
        self._server.call("tensile_internal._job_waits(int8,text)", job, reason)
        log_event(self._server, "failed", job, plan.device, reason)
        self._server.commit()
