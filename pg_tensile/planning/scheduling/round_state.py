"""State of one round of decisions for all jobs of a device, shared by admission, planning and keeping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pg_tensile.planning.plan.codecs import host_coding_us
from pg_tensile.planning.policies.compression.advisor import TensorCoding
from pg_tensile.planning.policies.joint.candidate import Candidate
from pg_tensile.planning.policies.joint.contention import times_us
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.scheduling.decisions import (
    Decision,
    DeviceState,
    Failed,
    JobState,
    Kept,
    Note,
    Waits,
)
from pg_tensile.planning.scheduling.plan_caches import PlanCaches
from pg_tensile.planning.trace.trace import Trace

PRIORITY_STEP = 10.0
HEAVIEST = 16.0


class Plans(NamedTuple):
    """Plans for all jobs with traces, and the part of the link that each counts on; 1.0 for one that moves nothing."""

    chosen: dict[int, Candidate]
    shares: dict[int, float]


class RoundState:
    """The decisions of a round so far, and the numbers that they follow from."""

    def __init__(
        self,
        caches: PlanCaches,
        device: DeviceState,
        jobs: Iterable[JobState],
        may_be_brief: bool = False,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.may_be_brief = may_be_brief
        self.over = over
        self.brief = False  # whether memory was divided in few passes
        self.caches = caches
        self.device = device
        self.jobs = {job.job: job for job in sorted(jobs, key=lambda job: job.job)}
        self.least: dict[int, int] = {}  # least device memory in bytes, of jobs that can be planned
        self.promised: dict[int, int] = {}  # least device memory in bytes with which jobs can keep their max_slowdown
        self.decisions: dict[int, Decision] = {}
        self.waits: dict[int, Waits] = {}  # of jobs that wait for device memory
        self.notes: list[Note] = []
        self.coded: dict[int, Trace] = {}  # traces whose swaps are compressed
        self.codings: dict[int, list[TensorCoding]] = {}
        heaviest = max((job.priority for job in self.jobs.values()), default=0.0)
        self.weights = {
            job.job: max(2 ** ((job.priority - heaviest) / PRIORITY_STEP), 1 / HEAVIEST) for job in self.jobs.values()
        }

    def planner(self, job: int, share: float = 1.0) -> JobPlanner:
        """Return the planner of a job with a trace that owns `share` of the link."""
        trace = self.coded.get(job, self.jobs[job].trace)
        assert trace is not None
        return self.caches.planner(trace, self.device, share)

    def needs(self, job: int) -> int:
        """Return the least bytes that the job has to be given, with its promised slowdown."""
        return self.promised.get(job, self.least[job])

    def most_slowdown(self, job: int) -> float:
        """Return the promised factor on the job's time without a plan; infinite without a promise."""
        promise = self.jobs[job].max_slowdown
        return promise if promise is not None and job in self.promised else math.inf

    def break_promise(self, jobs: Iterable[int]) -> bool:
        """Plan the job of the lowest priority without its promise; return False if none of the jobs has one.

        Jobs that have no promise are not touched; of equal ones it is the newest."""
        promised = [self.jobs[job] for job in jobs if job in self.promised]
        if not promised:
            return False
        broken = min(promised, key=lambda job: (job.priority, -job.job))
        del self.promised[broken.job]
        reason = "the memory and the link that it can have do not suffice"
        self.add_note(broken.job, f"its max_slowdown of {broken.max_slowdown:g} cannot be kept: {reason}")
        return True

    def add_note(self, job: int, reason: str) -> None:
        if Note(job, reason) not in self.notes:
            self.notes.append(Note(job, reason))

    def budget_bytes(self) -> int:
        """Return the bytes for the plans of all jobs. A job that cannot be planned or is pinned keeps its grant."""
        unplanned = (self.jobs[job] for job, decision in self.decisions.items() if isinstance(decision, Failed | Kept))
        held = sum(job.given.granted_bytes for job in unplanned if job.given is not None)
        overheads = sum(job.overhead_bytes for job in self.jobs.values())
        device = self.device
        return device.budget_bytes - device.inference_bytes - device.ending_bytes - overheads - held

    def size(self, job: JobState, plans: Plans) -> int:
        """Return the bytes that the job must be granted."""
        least = self.least[job.job]
        return least if job.trace is None else max(plans.chosen[job.job].device_peak_bytes, least)

    def host_bytes(self, plans: Plans) -> int:
        return sum(self.planner(job).host_bytes(candidate) for job, candidate in plans.chosen.items())

    def loss(self, plans: Plans) -> float:
        """Return the weighted sum of all jobs' iteration times beside each other, relative to their vanilla times.

        The time that coding occupies the host's processors is added.
        """
        planners = {job: self.planner(job) for job in plans.chosen}
        us = times_us(planners, plans.chosen)
        return sum(
            self.weights[job] * (us[job] + self._coding_us(job, candidate)) / planners[job].vanilla.us
            for job, candidate in plans.chosen.items()
        )

    def _coding_us(self, job: int, candidate: Candidate) -> float:
        return host_coding_us(self.coded[job], candidate.plan) if job in self.coded else 0.0
