"""State of one round of decisions for all jobs of a device, shared by admission, planning, memory flow and keeping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.memory_flow.grants import Grants, GroupedJob
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.memory_flow.simulation import SimulatedFlow
from pg_tensile.planning.plan.codecs import host_coding_us
from pg_tensile.planning.policies.compression.advisor import TensorCoding
from pg_tensile.planning.policies.joint.contention import times_us
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
# Other devices' allocators do not give memory back to the device between two operators yet.
MEMORY_FLOW_KINDS = ("host",)
# The plans of `tensile` are made for constant grants of all jobs together.
MEMORY_FLOW_POLICIES = ("joint", "swapadvisor")
# How much two jobs slow each other down that compute at once. On the host each has threads of its own; with a core for
# each thread it is nothing (docs/results/flowing.md), and where cores are fewer the measured
# latencies are longer. An accelerator gives jobs time slices.
HOST_CONTENTION = 0.0
ACCELERATOR_CONTENTION = 1.0


class Plans(NamedTuple):
    """Plans for all jobs with traces, and the part of the link that each counts on; 1.0 for one that moves nothing.

    `groups` has those of the jobs whose memory flows within `flow_bytes`; the others have constant grants."""

    chosen: dict[int, Candidate]
    shares: dict[int, float]
    groups: Mapping[int, tuple[Group, ...]] = MappingProxyType({})
    flow_bytes: int = 0


class RoundState:
    """The decisions of a round so far, and the numbers that they follow from."""

    def __init__(
        self,
        caches: PlanCaches,
        device: DeviceState,
        jobs: Iterable[JobState],
        may_be_brief: bool = False,
        over: Callable[[], bool] = lambda: False,
        counts_promises: bool = True,
    ) -> None:
        """Begin a round; with `counts_promises` jobs are admitted and planned with what was promised."""
        self.counts_promises = counts_promises
        self.may_be_brief = may_be_brief
        self.over = over
        self.brief = False  # whether memory was divided in few passes
        self.caches = caches
        self.device = device
        self.jobs = {job.job: job for job in sorted(jobs, key=lambda job: job.job)}
        self.least: dict[int, int] = {}  # least device memory in bytes, of jobs that can be planned
        self.promises: dict[int, float] = {}  # the max_slowdown of jobs, if it is to be kept
        self.promised: dict[int, int] = {}  # least device memory in bytes that promises take, if they count
        self.decisions: dict[int, Decision] = {}
        self.waits: dict[int, Waits] = {}  # of jobs that wait for device memory
        self.alternatives: dict[int, Waits] = {}  # of jobs admitted because memory may flow, if it cannot after all
        self.lacking: dict[int, int] = {}  # bytes with which jobs would have been admitted, in the order of their rank
        self.slowed_bytes = 0  # that jobs lacked of one that was not admitted, because it would have lost time
        self.stuck_bytes = 0  # that running jobs lack to continue
        self.leaves_wanted = True  # whether plans leave the memory that a prediction waits for
        self.computing = 0  # jobs that run or are admitted
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
        """Return the factor on the job's time without a plan that plans may reach: if promises count, the promised."""
        return self.promises.get(job, math.inf) if self.counts_promises else math.inf

    def keeps_promises(self, plans: Plans, tolerance: float = 0.0) -> bool:
        """Return whether the plans slow no job down by more than was promised, and by the factor 1 + `tolerance`."""
        return all(
            us <= (1 + tolerance) * self.promises.get(job, math.inf) * self.planner(job).vanilla.us
            for job, us in self.planned_us(plans).items()
        )

    def break_promise(self, jobs: Iterable[int]) -> bool:
        """Plan the job of the lowest priority without its promise; return False if no promise of the jobs counts.

        Jobs that have no promise are not touched; of equal ones it is the newest."""
        promised = [self.jobs[job] for job in jobs if job in self.promises]
        if not promised or not self.counts_promises:
            return False
        broken = min(promised, key=lambda job: (job.priority, -job.job))
        del self.promises[broken.job], self.promised[broken.job]
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
        inference = device.inference_bytes
        if self.leaves_wanted:
            inference = max(inference, device.wanted_bytes)
        return device.budget_bytes - inference - device.ending_bytes - overheads - held

    def claimed_before(self, job: JobState) -> int:
        """Return the bytes beyond those of loaded models that a prediction needs that has waited longer than the job.

        It need not wait still: it may have been refused a while ago, and is expected again."""
        device = self.device
        return max(0, device.claimed_bytes - device.inference_bytes) if device.claimed_s > job.waited_s else 0

    def vanilla_bytes(self, jobs: Iterable[JobState]) -> int:
        """Return the bytes with which no plan of these jobs has to save memory, as far as their budgets allow."""
        taken = 0
        for job in jobs:
            most = 0 if job.trace is None else min(self.planner(job.job).vanilla.device_peak_bytes, job.limit_bytes)
            taken += max(most, self.needs(job.job))
        return taken

    def size(self, job: JobState, plans: Plans) -> int:
        """Return the bytes that the job must be granted."""
        least = self.least[job.job]
        return least if job.trace is None else max(plans.chosen[job.job].device_peak_bytes, least)

    def host_bytes(self, plans: Plans) -> int:
        return sum(self.planner(job).host_bytes(candidate) for job, candidate in plans.chosen.items())

    # ---- memory that flows ----

    @property
    def memory_flow(self) -> bool:
        """True if memory may flow between jobs.

        Where it does already, and constant grants would not fit, it continues whatever the setting is by now."""
        if self.device.profile.kind not in MEMORY_FLOW_KINDS:
            return False
        return self.device.memory_flow or self._has_to_flow()

    def _has_to_flow(self) -> bool:
        running = [job for job in self.jobs.values() if job.given is not None and job.job not in self.decisions]
        flowing = any(job.given is not None and job.given.groups for job in running)
        return flowing and sum(self.needs(job.job) for job in running) > self.budget_bytes()

    def can_flow(self, job: JobState) -> bool:
        """Return whether the job may share memory with others as it goes."""
        return (
            self.memory_flow
            and job.trace is not None
            and job.policy in MEMORY_FLOW_POLICIES
            and job.compression == "none"
            and not (job.pinned or job.choosing)
        )

    def resting_bytes(self, job: int) -> int:
        """Return the bytes that the job keeps between two iterations without a plan; no plan keeps more."""
        trace = self.planner(job).trace
        return int(trace.tensor_bytes[trace.persistent].sum())

    def flow_need_bytes(self, sizes: Mapping[int, int]) -> int:
        """Return the memory within which jobs that take `sizes` can flow: each beside what the others keep."""
        rests = {job: self.resting_bytes(job) for job in sizes}
        return max(size - rests[job] for job, size in sizes.items()) + sum(rests.values())

    def could_flow(self, jobs: Sequence[JobState]) -> bool:
        """Return whether the least that these jobs need fits, if the memory of those that can share it flows."""
        needed = self.flow_least_bytes(jobs)
        return needed is not None and needed <= self.budget_bytes()

    def flow_least_bytes(self, jobs: Sequence[JobState]) -> int | None:
        """Return the least that these jobs need if memory flows; None if it cannot."""
        flowing = {job.job: self.needs(job.job) for job in jobs if self.can_flow(job)}
        if len(flowing) < 2:
            return None
        return sum(self.needs(job.job) for job in jobs if job.job not in flowing) + self.flow_need_bytes(flowing)

    def can_run(self, plans: Plans) -> bool:
        """Return whether all jobs whose memory flows can run, with the device and host memory that there is.

        Beside what the others keep, each has room for its other graphs as well."""
        wholes = {job: self.size(self.jobs[job], plans) for job in plans.groups}
        rests = {job: groups[-1].rest_bytes for job, groups in plans.groups.items()}
        kept = sum(rests.values())
        return (
            all(kept - rests[job] + whole <= plans.flow_bytes for job, whole in wholes.items())
            and Grants(plans.flow_bytes).fits(GroupedJob(groups) for groups in plans.groups.values())
            and self.host_bytes(plans) <= self.device.host_bytes
        )

    def planned_us(self, plans: Plans) -> dict[int, float]:
        """Return the time of each job's iteration, without what it loses because others compute at the same time.

        Waiting for memory that flows is part of it."""
        us = {job: candidate.us for job, candidate in plans.chosen.items()}
        flow = self.flow(plans) if plans.groups else None
        for job, groups in plans.groups.items():
            us[job] = sum(group.us for group in groups) + (math.inf if flow is None else flow.waiting_us[job])
        return us

    def flow(self, plans: Plans) -> SimulatedFlow | None:
        """Return how long the jobs take whose memory flows; None if they cannot all run."""
        beside = self.computing - len(plans.groups)
        return self.caches.flow(plans.groups, plans.flow_bytes, self._contention, max(0, beside))

    @property
    def _contention(self) -> float:
        return HOST_CONTENTION if self.device.profile.kind == "host" else ACCELERATOR_CONTENTION

    def _contended_us(self, plans: Plans, us: Mapping[int, float]) -> Mapping[int, float]:
        """Return the times of jobs that compute at once; `us`: those without what that costs.

        Without `memory_flow` it costs the same whatever the plans are, so it is left out."""
        if not self.memory_flow:
            return us
        if not plans.groups:
            slowdown = 1 + self._contention * (max(self.computing, len(us)) - 1)
            return {job: slowdown * time_us for job, time_us in us.items()}
        flow = self.flow(plans)
        if flow is None:
            return dict.fromkeys(us, math.inf)
        return {job: flow.iteration_us.get(job, flow.slowdown * time_us) for job, time_us in us.items()}

    # ---- losses ----

    def speed(self, plans: Plans) -> float:
        """Return the weighted sum of all jobs' speeds beside each other, relative to each one alone without a plan."""
        planners = {job: self.planner(job) for job in plans.chosen}
        us = self._contended_us(plans, times_us(planners, plans.chosen))
        return sum(self.weights[job] * planner.vanilla.us / us[job] for job, planner in planners.items())

    def loss(self, plans: Plans) -> float:
        """Return the weighted sum of all jobs' iteration times beside each other, relative to their vanilla times.

        The time that coding occupies the host's processors is added.
        """
        planners = {job: self.planner(job) for job in plans.chosen}
        us = self._contended_us(plans, times_us(planners, plans.chosen))
        return sum(
            self.weights[job] * (us[job] + self._coding_us(job, candidate)) / planners[job].vanilla.us
            for job, candidate in plans.chosen.items()
        )

    def _coding_us(self, job: int, candidate: Candidate) -> float:
        return host_coding_us(self.coded[job], candidate.plan) if job in self.coded else 0.0
