"""The devices as a turn of the scheduler finds them: jobs, grants, and what plans depend on. Standard library only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from pg_tensile.memory_limit import memory_bytes
from pyworker.cluster_device import on_cluster
from pyworker.supervisors.scheduling.job_records import JobRecords
from pyworker.supervisors.scheduling.plan_searches import PlanSearches
from pyworker.supervisors.server import Server

JOBS = """
    SELECT s.*, j.priority AS own_priority, t.captured_at::text AS captured, t.largest_operator,
           cardinality(t.traces) > 0 AS traced, coalesce(j.options->>'compression', 'none') AS compression,
           coalesce(x.revision, 0) AS sparsity,
           j.batch_size = 0 AND NOT EXISTS (SELECT FROM tensile_internal.checkpoints c
                                            WHERE c.job = s.job AND c.meta IS NOT NULL) AS choosing,
           (j.options->>'search_time')::float8 AS search_time,
           (j.options->>'max_slowdown')::float8 AS max_slowdown,
           coalesce((j.options->>'swap_share')::float8, 1) AS swap_share, p.utilisation AS load,
           t.load AS traced_load,
           EXISTS (SELECT FROM tensile_internal.latency_models m WHERE m.device = s.device) AS modelled
    FROM tensile_internal._schedule_jobs() s JOIN tensile_internal.jobs j ON j.id = s.job
         JOIN tensile_internal.traces t ON t.job = s.job
         LEFT JOIN tensile_internal.sparsities x ON x.job = s.job
         LEFT JOIN tensile_worker._progress() p ON p.job = s.job
"""


LITTLE_LESS = 0.9  # of a job's overhead before: up to that, less of it is no reason to plan


class Situation(NamedTuple):
    """Inputs of a device's plans; a change of them is a reason to plan."""

    budget_bytes: int
    inference_bytes: int
    wanted_bytes: int  # by a prediction that waits
    claimed_bytes: int  # by one that has waited in vain,
    claimed_s: float  # for the first time as long ago; no reason to plan by itself
    ending_bytes: int  # granted to jobs that are not planned any more
    host_bytes: int
    traces: dict[int, tuple[str, bool]]  # by job: when it was captured, and whether the job is pinned
    overheads: dict[int, int]  # by job
    priorities: dict[int, int]
    searched_plans: dict[int, int]  # by job: number of the plan that a search has found
    queue: tuple[tuple[int, bool], ...]  # jobs without a plan, in their order, and whether they have aged
    sparsities: dict[int, int]  # by job: revision of its tensors' statistics
    memory_flow: bool  # memory may flow between jobs

    def changes(self, before: Situation | None) -> list[str]:
        """Describe the differences from `before` in words; None means that the device has no plans yet.

        The end of a job counts when its memory has been given back.
        """
        if before is None:
            return [f"job {job} has come" for job in sorted(self.traces)]
        staying = sorted(self.traces.keys() & before.traces.keys())
        words = [f"job {job} has come" for job in sorted(self.traces.keys() - before.traces.keys())]
        replaced = [job for job in staying if self.traces[job] != before.traces[job]]
        words += [f"job {job} needs another plan" for job in replaced]
        unlike = [job for job in staying if _is_unlike(self.overheads[job], before.overheads[job])]
        words += [f"the memory of job {job} besides its tensors was measured" for job in unlike if job not in replaced]
        sparser = [job for job in staying if self.sparsities[job] != before.sparsities[job]]
        words += [f"the zeros in tensors of job {job} have been counted" for job in sparser]
        if self.ending_bytes <= before.ending_bytes:
            words += [f"job {job} has ended" for job in sorted(before.traces.keys() - self.traces.keys())]
        if self.ending_bytes < before.ending_bytes:
            words.append("memory was given back")
        if self.budget_bytes != before.budget_bytes:
            words.append("the budget has changed")
        inference = self.inference_bytes, self.wanted_bytes, self.claimed_bytes
        if inference != (before.inference_bytes, before.wanted_bytes, before.claimed_bytes):
            words.append("models for prediction take another part of the memory")
        if self.host_bytes < before.host_bytes or (self.host_bytes > before.host_bytes and self.queue):
            words.append("the limit of host memory has changed")
        if self.memory_flow != before.memory_flow:
            words.append("pg_tensile.memory_flow has changed")
        if any(self.priorities[job] != before.priorities[job] for job in staying):
            words.append("priorities have changed")
        better = [job for job, plan in sorted(self.searched_plans.items()) if plan != before.searched_plans.get(job)]
        words += [f"a search has found a better plan for job {job}" for job in better]
        waiting = dict(self.queue)
        if self.queue != tuple(entry for entry in before.queue if entry[0] in waiting) and not words:
            words.append("the jobs that wait have another order")
        return words


def _is_unlike(overhead_bytes: int, before: int) -> bool:
    """Return whether an overhead is more than before, or less by an amount that other jobs have a use for."""
    return overhead_bytes > before or overhead_bytes < LITTLE_LESS * before


class DeviceView(NamedTuple):
    """A device as a turn finds it."""

    name: str
    jobs: dict[int, dict[str, Any]]  # rows of JOBS, without jobs refused or set aside
    grants: dict[int, dict[str, Any]]  # by job, of all slots on the device
    situation: Situation

    def loads(self) -> dict[int, float]:
        """Return the load of the device by others, by job, of jobs whose plans follow it.

        Those are the captured ones on a device with latency models. Before a job has reported a load, it is the one
        that its trace's latencies stand for."""
        rows = [row for row in self.jobs.values() if row["traced"] and row["modelled"]]
        loads = {row["job"]: row["traced_load"] if row["load"] is None else row["load"] for row in rows}
        return {job: load for job, load in loads.items() if load is not None}


def host_bytes_left(device: str, limit: int, records: JobRecords, jobs: Collection[int]) -> int:
    """Return the host memory that plans of these jobs of the device may take beside those of other devices.

    On a cluster, the limit holds for the machine of each rank, where no other job swaps."""
    if on_cluster(device):
        return limit
    elsewhere = [record.published for job, record in records.items() if job not in jobs]
    taken = sum(plan.host_bytes for plan in elsewhere if plan is not None and not on_cluster(plan.device))
    return max(0, limit - taken)


def read_device_views(server: Server, records: JobRecords, searches: PlanSearches) -> dict[str, DeviceView]:
    """Return all devices by name, and bring the records up to date."""
    rows = server.rows(JOBS)
    grants = server.rows("SELECT * FROM tensile_internal._grants() WHERE device IS NOT NULL")
    devices = server.rows("SELECT * FROM tensile_internal._device_memory()")
    ageing_s = float(server.number("pg_tensile.ageing"))
    host_bytes = (server.number("pg_tensile.host_memory") << 20) or memory_bytes() // 2
    memory_flow = server.setting("pg_tensile.memory_flow") == "auto"
    server.commit()
    records.refresh({row["job"]: row for row in rows}, {grant["job"]: grant for grant in grants})
    views = {}
    for device in devices:
        name = device["device"]
        jobs = {row["job"]: row for row in rows if row["device"] == name and records.is_planned(row)}
        granted = {grant["job"]: grant for grant in grants if grant["device"] == name}
        waiting = [row for job, row in jobs.items() if job not in granted or not granted[job]["generation"]]
        waiting.sort(key=lambda row: (-row["priority"], row["job"]))
        situation = Situation(
            device["budget_bytes"],
            device["inference_bytes"],
            device["wanted_bytes"],
            device["claimed_bytes"],
            device["claimed_s"],
            sum(row["granted_bytes"] + row["overhead_bytes"] for job, row in granted.items() if job not in jobs),
            host_bytes_left(name, host_bytes, records, jobs),
            {job: (row["captured"], records[job].pinned) for job, row in jobs.items()},
            {job: row["overhead_bytes"] for job, row in jobs.items()},
            {job: row["own_priority"] for job, row in jobs.items()},
            {job: search.number for job in jobs if (search := searches.successful(job)) is not None},
            tuple((row["job"], 0 < ageing_s <= row["waited_s"]) for row in waiting),
            {job: row["sparsity"] for job, row in jobs.items()},
            memory_flow,
        )
        views[name] = DeviceView(name, jobs, granted, situation)
    return views
