"""Memory scheduling: which jobs of a device run, and under which plans (TENSILE, sections III-D, IV-E and IV-F).

A job is admitted when the least memory that it can run with fits beside the least memory of the running jobs; then all
of them are planned together. Running jobs keep their plans unless something has to change or a new set of plans is
clearly better: a change of plan costs an iteration, and measured latencies always vary a little.

Priorities weigh losses: a job's relative loss of time counts twice as much for every `PRIORITY_STEP` of priority that
it has above another job, up to `HEAVIEST` times as much.

A job whose swaps may be compressed is planned as usual, then again with the compressed times of those plans' swaps
where compression pays (CSWAP, section IV-B); the better plans are used. So the choice of compressed tensors follows
from trace and sparsity, not from the job's present plan.

There is no clock and no I/O: equal arguments give equal decisions, and `DeviceScheduler` keeps caches only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from pg_tensile.errors import BudgetError, InvalidPlanError, PlanError
from pg_tensile.planning.compression.advisor import TensorCoding, choose
from pg_tensile.planning.compression.codec_times import CodecTimes
from pg_tensile.planning.compression.coding import host_coding_us
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import EVENT_ROW, NO_EVENTS, EventKind, Plan
from pg_tensile.planning.policies.joint.planner import Candidate, JobPlanner, identity
from pg_tensile.planning.policies.joint.share_out import Terms, UnplannableError, share_out
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Int32s, Int64s, Trace
from pg_tensile.text import size

SLACK = 50  # a job is granted 1 / SLACK more memory than its plan needs, where there is room
GAIN = 0.02  # fraction of the time of all jobs that new plans must save to replace plans that can stay
PRIORITY_STEP = 10.0
HEAVIEST = 16.0
REMEMBERED = 16  # cached results of the policy tensile


@dataclass(frozen=True)
class DeviceState:
    """A device and its limits in bytes.

    Of `budget_bytes`, models for prediction occupy `inference_bytes`, and jobs that are ending and need no decision
    occupy `ending_bytes`. `host_bytes` limits the host memory for the copies of all jobs of the device.
    """

    name: str
    profile: DeviceProfile
    budget_bytes: int
    inference_bytes: int = 0
    host_bytes: int = 1 << 62
    most_events: int | None = None
    ageing_s: float = 0.0  # waiting time after which no job may pass a waiting job any more; 0 means never
    ending_bytes: int = 0
    codec_times: CodecTimes | None = None  # None if not measured; then nothing is compressed


@dataclass(frozen=True)
class Given:
    """The published grant of a job. `plan` is None if it is unknown or was made for another trace."""

    plan: Plan | None
    granted_bytes: int
    link_share: float = 1.0


@dataclass(frozen=True)
class JobState:
    """A job that has a trace or, if executed eagerly, a claim (`least_bytes`).

    `rank` is its priority among waiting jobs, raised by the time that it has waited. `given` is its grant, None if it
    is not yet admitted. A `stuck` job's executor pauses until it receives another plan. A `pinned` job keeps its grant,
    because its executor rejects any other. `compression` is none, auto, or the only codec permitted; `statistics` are
    those of the tensors whose zeros have been counted. A `choosing` job may return with a smaller batch, so it is
    refused rather than kept waiting for others to end.
    """

    job: int
    trace: Trace | None  # of the training step; None if executed eagerly
    least_bytes: int  # the least memory with which all of its graphs have plans
    operator: str = ""  # label of the one that needs the most memory
    policy: str = "joint"
    priority: float = 0.0
    rank: float = 0.0
    waited_s: float = 0.0
    overhead_bytes: int = 0  # of device memory outside the plan
    most_bytes: int | None = None  # the job's own budget
    given: Given | None = None
    stuck: bool = False
    pinned: bool = False
    compression: str = "none"
    statistics: Mapping[int, Statistics] = field(default_factory=dict)
    choosing: bool = False
    found: Plan | None = None  # result of a search for a better plan than the policy joint's


class Planned(NamedTuple):
    """A new plan, with what it needs and the iteration that it gives.

    `footprint` and `vanilla` are bytes at each executed operator, workspaces included, with the plan and without any.
    Times are in µs; None for a job that is executed eagerly.
    """

    plan: Plan
    planned_bytes: int
    granted_bytes: int
    link_share: float
    host_bytes: int = 0
    iteration_us: float | None = None
    vanilla_us: float | None = None
    stall_us: float = 0.0
    out_bytes: int = 0
    in_bytes: int = 0
    recomputes: int = 0
    operators: Int32s = np.zeros(0, np.int32)
    footprint: Int64s = np.zeros(0, np.int64)
    vanilla: Int64s = np.zeros(0, np.int64)
    room_bytes: int = 0  # device memory that another plan of the job could use beside the other jobs


class Kept(NamedTuple):
    """The job keeps its grant."""


class Waits(NamedTuple):
    """The job is not admitted for now."""

    reason: str


class Refused(NamedTuple):
    """The job can never be admitted: it needs more than the budget, of the device or its own."""

    budget_bytes: int
    least_bytes: int
    operator: str


class Failed(NamedTuple):
    """No plan can be made; the job's grant, if any, stays in force."""

    reason: str


Decision: TypeAlias = Planned | Kept | Waits | Refused | Failed


class Note(NamedTuple):
    """A remark for users in addition to the decisions."""

    job: int
    reason: str


class Schedule(NamedTuple):
    """The decision for each job, by number.

    `totals_us` holds, for jobs with a trace, the sum of the latencies that they were planned with, in µs. `codings`
    holds, for jobs with compression, the choice for each tensor with statistics, given plans without compression.
    """

    decisions: dict[int, Decision]
    totals_us: dict[int, float]
    notes: list[Note]
    codings: dict[int, list[TensorCoding]]


class DeviceScheduler:
    """Scheduler of one device's jobs. It caches planners and plans of their traces between calls."""

    def __init__(self) -> None:
        self._planners: dict[Hashable, dict[float, JobPlanner]] = {}
        self._tensile: dict[Hashable, dict[int, Plan]] = {}
        self._used: set[Hashable] = set()

    def schedule(self, device: DeviceState, jobs: Iterable[JobState]) -> Schedule:
        """Return the decisions for all open jobs of the device."""
        ordered = sorted(jobs, key=lambda job: job.job)
        self._used.clear()
        schedule = _Round(self, device, ordered).run()
        self._planners = {key: planners for key, planners in self._planners.items() if key in self._used}
        return schedule

    def planner(self, trace: Trace, device: DeviceState, share: float = 1.0) -> JobPlanner:
        """Return the cached planner of a trace that owns `share` of the link."""
        key = identity(trace), device.profile, device.most_events
        self._used.add(key)
        shares = self._planners.setdefault(key, {})
        if not shares:
            shares[1.0] = JobPlanner(trace, device.profile, 1.0, device.most_events)
        if share not in shares:
            shares[share] = shares[1.0].sharing(share)
        return shares[share]

    def tensile(self, traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int) -> dict[int, Plan]:
        """Return the plans of the paper's algorithm (policy tensile) by job. Results are cached."""
        key = (tuple((job, identity(trace)) for job, trace in traces.items()), profile, budget_bytes)
        if key not in self._tensile:
            if len(self._tensile) >= REMEMBERED:
                self._tensile.clear()
            self._tensile[key] = rounds.plan(traces, profile, budget_bytes)
        return self._tensile[key]


class _Plans(NamedTuple):
    """Plans for all jobs with traces, each with `share` of the link."""

    chosen: dict[int, Candidate]
    share: float


class _Round:
    """One round of decisions for all jobs of a device."""

    def __init__(self, scheduler: DeviceScheduler, device: DeviceState, jobs: Sequence[JobState]) -> None:
        self.scheduler = scheduler
        self.device = device
        self.jobs = {job.job: job for job in jobs}
        self.least: dict[int, int] = {}  # least device memory in bytes, of jobs that can be planned
        self.decisions: dict[int, Decision] = {}
        self.waits: dict[int, Waits] = {}  # of jobs that wait for device memory
        self.notes: list[Note] = []
        self.coded: dict[int, Trace] = {}  # traces whose swaps are compressed
        self.codings: dict[int, list[TensorCoding]] = {}
        heaviest = max((job.priority for job in jobs), default=0.0)
        self.weights = {job.job: max(2 ** ((job.priority - heaviest) / PRIORITY_STEP), 1 / HEAVIEST) for job in jobs}

    def run(self) -> Schedule:
        for job in self.jobs.values():
            self._look(job)
        plans = None
        while plans is None:
            admitted = self._admit()
            plans = self._plan(admitted)
        self._decide(admitted, plans)
        totals = {
            job: float(self._planner(job).trace.latency_us.sum())
            for job, state in self.jobs.items()
            if state.trace is not None and job in self.least
        }
        return Schedule(self.decisions | self.waits, totals, self.notes, self.codings)

    def _planner(self, job: int, share: float = 1.0) -> JobPlanner:
        trace = self.coded.get(job, self.jobs[job].trace)
        assert trace is not None
        return self.scheduler.planner(trace, self.device, share)

    def _fail(self, job: int, reason: str) -> None:
        self.decisions[job] = Failed(reason)

    # ---- admission ----

    def _look(self, job: JobState) -> None:
        """Determine the job's least memory, or decide at once: pinned, cannot be planned, or exceeds its limit."""
        if job.pinned:
            self.decisions[job.job] = Kept()
            return
        least = job.least_bytes
        if job.trace is not None:
            try:
                planner = self._planner(job.job)
                vanilla = planner.vanilla.device_peak_bytes
                least = max(least, vanilla if job.policy == "none" else planner.least_bytes)
            except Exception as error:
                self._fail(job.job, f"{type(error).__name__}: {error}")
                return
        self.least[job.job] = least
        most = self.device.budget_bytes - job.overhead_bytes
        limit = most if job.most_bytes is None else min(most, job.most_bytes)
        if least > limit and (job.given is None or job.stuck):
            self.decisions[job.job] = Refused(limit, least, job.operator)

    def _admit(self) -> list[JobState]:
        """Return the running jobs, then the newly admitted ones in order of rank; record why others wait.

        A smaller job may pass one that has to wait, until that one has waited for `ageing_s`.
        """
        undecided = [job for job in self.jobs.values() if job.job not in self.decisions]
        admitted = [job for job in undecided if job.given is not None]
        free = self._budget() - sum(self.least[job.job] for job in admitted)
        for job in [job for job in admitted if job.choosing and job.stuck]:
            least = self.least[job.job]
            if free < 0:
                self.decisions[job.job] = Refused(max(0, least + free), least, job.operator)
                admitted.remove(job)
                free += least
        running = len(admitted)
        before: JobState | None = None
        self.waits.clear()
        for job in sorted((job for job in undecided if job.given is None), key=lambda job: (-job.rank, job.job)):
            if before is not None:
                self.waits[job.job] = Waits(f"waits behind job {before.job}, which has waited long enough")
            elif self.least[job.job] <= free:
                admitted.append(job)
                free -= self.least[job.job]
            else:
                self.waits[job.job] = Waits(self._why(job, free, running, len(admitted) - running))
                if 0 < self.device.ageing_s <= job.waited_s:
                    before = job
        return admitted

    def _budget(self) -> int:
        """Return the bytes for the plans of all jobs. A job that cannot be planned or is pinned keeps its grant."""
        left = (self.jobs[job] for job, decision in self.decisions.items() if isinstance(decision, Failed | Kept))
        held = sum(job.given.granted_bytes for job in left if job.given is not None)
        overheads = sum(job.overhead_bytes for job in self.jobs.values())
        device = self.device
        return device.budget_bytes - device.inference_bytes - device.ending_bytes - overheads - held

    def _why(self, job: JobState, free: int, running: int, starting: int) -> str:
        others = [f"the {_jobs(running)} that {'runs' if running == 1 else 'run'}"] if running else []
        others += [f"the {_jobs(starting)} before it"] if starting else []
        others += ["models for prediction"] if self.device.inference_bytes else []
        others += ["jobs that end"] if self.device.ending_bytes else []
        needs, has = self.least[job.job] + job.overhead_bytes, max(free, 0) + job.overhead_bytes
        return (
            f"needs at least {size(needs)} of device memory; {size(has)} of the {size(self.device.budget_bytes)} of"
            f" {self.device.name} are not needed by {' and '.join(others) or 'others'}"
        )

    # ---- plans ----

    def _plan(self, admitted: Sequence[JobState]) -> _Plans | None:
        """Return the plans with the least total loss, or None if jobs were decided here, so that fewer are admitted."""
        self.coded, self.codings = {}, {}
        traced = [job for job in admitted if job.trace is not None]
        newest = next((job.job for job in reversed(traced) if job.given is None), None)
        try:
            plans = self._compressed(traced, admitted, self._share_out(traced, admitted))
        except UnplannableError as error:
            self._fail(error.job, f"no plan can be made: {error}")
            return None
        except BudgetError as error:  # plans within the budget have too many events
            for job in [job.job for job in traced] if newest is None else [newest]:
                self._fail(job, f"no plan with at most {self.device.most_events} events fits: {error}")
            return None
        needed, limit = self._host_bytes(plans), self.device.host_bytes
        if needed > limit and newest is not None:
            self.decisions[newest] = Waits(
                f"needs host memory for what is swapped: {size(needed)} with the jobs that run, where {size(limit)}"
                " are allowed (pg_tensile.host_memory)"
            )
            return None
        return plans

    def _share_out(self, traced: Sequence[JobState], admitted: Sequence[JobState]) -> _Plans:
        """Return plans for all traced jobs within the budget. Raises UnplannableError and BudgetError."""
        budget = self._budget() - sum(self.least[job.job] for job in admitted if job.trace is None)
        budget = max(budget, sum(self.least[job.job] for job in traced))  # a lowered setting: as close as possible
        vanilla = _Plans({job.job: self._planner(job.job).vanilla for job in traced}, 1.0)
        sizes = {job.job: self._size(job, vanilla) for job in traced}
        if sum(sizes.values()) <= budget and all(sizes[job.job] <= _most(job) for job in traced):
            return vanilla
        sharing = sum(job.policy != "none" for job in traced)
        plans = self._divide(traced, budget, sharing)
        swapping = sum(map(_transfers, plans.chosen.values()))
        if 0 < swapping < sharing:  # fewer jobs share the link
            other = self._divide(traced, budget, swapping)
            if sum(map(_transfers, other.chosen.values())) <= swapping:
                return other
        return plans

    def _compressed(self, traced: Sequence[JobState], admitted: Sequence[JobState], plain: _Plans) -> _Plans:
        """Return plans with compressed swaps if they are better than `plain`, else `plain`."""
        times = self.device.codec_times
        for job in traced:
            if times is None or job.compression == "none" or not job.statistics:
                continue
            planner, plan = self._planner(job.job, plain.share), plain.chosen[job.job].plan
            (timeline,) = simulate([SimulatedJob(planner.trace, plan)], planner.link)
            known = (job.statistics, times, planner.link, job.compression)
            coding, listed = choose(planner.trace, plan, timeline, *known)
            self.codings[job.job] = listed
            if coding.compresses:
                self.coded[job.job] = planner.trace.with_coding(coding)
        if not self.coded:
            return plain
        try:
            found = self._share_out(traced, admitted)
        except (UnplannableError, BudgetError):  # the memory that compression itself needs does not fit
            found = plain
        if self._loss(found) < self._loss(plain):
            return found
        self.coded = {}
        return plain

    def _divide(self, traced: Sequence[JobState], budget_bytes: int, sharing: int) -> _Plans:
        share = 1 / max(sharing, 1)
        planners = {job.job: self._planner(job.job, share) for job in traced}
        terms = {
            job.job: Terms(max(self.least[job.job], _most(job)), self.least[job.job], self.weights[job.job])
            for job in traced
        }
        chosen = share_out(planners, budget_bytes, terms, self.device.host_bytes)
        plans = _Plans(chosen, share)
        papers = [job for job in traced if job.policy == "tensile"]
        if any(len(chosen[job.job].plan) for job in papers):
            self._use_paper(papers, planners, plans)
        for job in traced:
            if job.found is not None:
                self._use_found(job, job.found, planners[job.job], plans, budget_bytes)
        return plans

    def _use_found(self, job: JobState, found: Plan, planner: JobPlanner, plans: _Plans, budget_bytes: int) -> None:
        """Replace the job's plan by the one that a search has found, if that is faster and fits."""
        sizes = sum(max(each.device_peak_bytes, self.least[number]) for number, each in plans.chosen.items())
        present = plans.chosen[job.job]
        room = min(_most(job), max(present.device_peak_bytes, self.least[job.job]) + max(0, budget_bytes - sizes))
        most = self.device.most_events
        rows = len(found) + -(-len(found.order_bytes) // EVENT_ROW.itemsize)  # the order is stored after the events
        try:
            candidate = planner.candidate(found)
        except InvalidPlanError as error:
            self._note(job.job, f"the plan that a search has found cannot be used: {error.message}")
            return
        if candidate.us >= present.us or candidate.device_peak_bytes > room or (most is not None and rows > most):
            return
        if self._host_bytes(plans._replace(chosen=plans.chosen | {job.job: candidate})) <= self.device.host_bytes:
            plans.chosen[job.job] = candidate

    def _use_paper(self, jobs: Sequence[JobState], planners: Mapping[int, JobPlanner], plans: _Plans) -> None:
        """Replace the plans of these jobs by those of the paper's algorithm within the same memory, where they fit."""
        numbers = [job.job for job in jobs]
        rooms = {job.job: max(plans.chosen[job.job].device_peak_bytes, self.least[job.job]) for job in jobs}
        found = self._paper(numbers, planners, sum(rooms.values()), plans.share)
        sizes = {job: max(candidate.device_peak_bytes, self.least[job]) for job, candidate in found.items()}
        together = len(found) == len(jobs) and sum(sizes.values()) <= sum(rooms.values())
        if together and all(sizes[job.job] <= _most(job) for job in jobs):
            chosen = found
        else:
            chosen = {job: one for job, one in found.items() if one.device_peak_bytes <= rooms[job]}
            for job in sorted(set(numbers) - chosen.keys()):
                alone = self._paper([job], planners, rooms[job], plans.share).get(job)
                if alone is not None and alone.device_peak_bytes <= rooms[job]:
                    chosen[job] = alone
        if self._host_bytes(_Plans(plans.chosen | chosen, plans.share)) > self.device.host_bytes:
            chosen = {}
        plans.chosen.update(chosen)
        for job in sorted(set(numbers) - chosen.keys()):
            self._note(job, "the policy tensile finds no plan that fits: planned with the policy joint")

    def _paper(
        self, jobs: Sequence[int], planners: Mapping[int, JobPlanner], budget_bytes: int, share: float
    ) -> dict[int, Candidate]:
        """Return the usable plans of the paper's algorithm, by job; none if it fails.

        The algorithm divides its link equally among its jobs, so it is given the shares of all of them together.
        """
        profile, lanes = self.device.profile, share * len(jobs)
        link = profile.with_link(profile.out_bytes_per_s * lanes, profile.in_bytes_per_s * lanes, profile.duplex_factor)
        traces = {job: planners[job].trace for job in jobs}
        try:
            found = self.scheduler.tensile(traces, link, budget_bytes)
            candidates = {job: planners[job].candidate(plan) for job, plan in found.items()}
        except Exception as error:
            for job in jobs:
                self._note(job, f"the policy tensile failed: {type(error).__name__}: {error}")
            return {}
        most = self.device.most_events
        return {job: one for job, one in candidates.items() if most is None or len(one.plan) <= most}

    def _note(self, job: int, reason: str) -> None:
        if Note(job, reason) not in self.notes:
            self.notes.append(Note(job, reason))

    def _host_bytes(self, plans: _Plans) -> int:
        return sum(self._planner(job).host_bytes(candidate) for job, candidate in plans.chosen.items())

    # ---- keeping or changing plans ----

    def _decide(self, admitted: Sequence[JobState], plans: _Plans) -> None:
        present = self._present(admitted)
        if present is not None and self._loss(plans) >= (1 - GAIN) * self._loss(present):
            self.decisions |= {job.job: Kept() for job in admitted}
            return
        same = {job.job for job in admitted if self._is_same(job, plans)}
        grants = self._grants(admitted, plans, same)
        left = max(0, self._budget() - sum(grants.values()))
        for job in admitted:
            if job.given is not None and job.job in same and grants[job.job] == job.given.granted_bytes:
                self.decisions[job.job] = Kept()
                continue
            try:
                room = min(_most(job), grants[job.job] + left)
                self.decisions[job.job] = self._planned(job, plans, grants[job.job])._replace(room_bytes=room)
            except PlanError as error:
                self._fail(job.job, f"a plan was made that cannot be used: {error}")

    def _present(self, admitted: Sequence[JobState]) -> _Plans | None:
        """Return the plans in force, or None if a job has none yet or they no longer fit."""
        held = 0
        known: dict[int, Plan] = {}
        for job in admitted:
            if job.given is None or job.stuck or not self.least[job.job] <= job.given.granted_bytes <= _most(job):
                return None
            if job.trace is not None:
                if job.given.plan is None:
                    return None
                known[job.job] = job.given.plan
            held += job.given.granted_bytes
        share = 1 / max(1, sum(_swaps(plan) for plan in known.values()))
        try:
            plans = _Plans({job: self._planner(job, share).candidate(plan) for job, plan in known.items()}, share)
        except InvalidPlanError:
            return None
        granted = {job.job: job.given.granted_bytes for job in admitted if job.given is not None}
        fits = all(candidate.device_peak_bytes <= granted[job] for job, candidate in plans.chosen.items())
        enough = held <= self._budget() and self._host_bytes(plans) <= self.device.host_bytes
        return plans if fits and enough else None

    def _loss(self, plans: _Plans) -> float:
        """Return the weighted sum of all jobs' iteration times, each relative to the job's vanilla time.

        The time that coding occupies the host's processors is added.
        """
        return sum(
            self.weights[job] * (candidate.us + self._coding_us(job, candidate)) / self._planner(job).vanilla.us
            for job, candidate in plans.chosen.items()
        )

    def _coding_us(self, job: int, candidate: Candidate) -> float:
        return host_coding_us(self.coded[job], candidate.plan) if job in self.coded else 0.0

    def _is_same(self, job: JobState, plans: _Plans) -> bool:
        """Return whether the job already has the plan chosen for it, and enough memory for that."""
        given = job.given
        if given is None or job.stuck or given.granted_bytes > _most(job):
            return False
        if job.trace is None:
            return given.granted_bytes == self.least[job.job]
        candidate = plans.chosen[job.job]
        return (
            given.plan is not None
            and replace(given.plan, generation=0) == replace(candidate.plan.with_bytes(job.trace), generation=0)
            and given.granted_bytes >= self._size(job, plans)
            and (given.link_share == plans.share or not _transfers(candidate))
        )

    def _size(self, job: JobState, plans: _Plans) -> int:
        """Return the bytes that the job must be granted."""
        least = self.least[job.job]
        return least if job.trace is None else max(plans.chosen[job.job].device_peak_bytes, least)

    def _grants(self, admitted: Sequence[JobState], plans: _Plans, same: set[int]) -> dict[int, int]:
        """Return the grant of each job in bytes: its plan's peak and, where there is room, up to 1 / SLACK more.

        Jobs in `same` keep their grants if all fit; otherwise `same` is cleared.
        """
        sizes = {job.job: self._size(job, plans) for job in admitted}
        kept = {job.job: job.given.granted_bytes for job in admitted if job.given is not None and job.job in same}
        budget = self._budget()
        if sum((sizes | kept).values()) <= budget:
            sizes |= kept
        else:
            same.clear()
        more = {
            job.job: max(0, min(sizes[job.job] // SLACK, _most(job) - sizes[job.job]))
            for job in admitted
            if job.trace is not None and job.job not in same
        }
        room = max(0, budget - sum(sizes.values()))
        part = min(1.0, room / max(1, sum(more.values())))
        return {job: size + int(more.get(job, 0) * part) for job, size in sizes.items()}

    def _planned(self, job: JobState, plans: _Plans, granted_bytes: int) -> Planned:
        """Return the decision for a job, after a final check of its plan. Raises PlanError if that fails."""
        if job.trace is None:
            return Planned(NO_EVENTS, granted_bytes, granted_bytes, 1.0)
        planner, candidate = self._planner(job.job), plans.chosen[job.job]
        sequence = AccessSequence(planner.trace, candidate.plan)
        sequence.check()
        footprint = footprint_of(sequence)
        if footprint.device_peak_bytes > granted_bytes:
            raise PlanError(f"it takes {footprint.device_peak_bytes:,} bytes where {granted_bytes:,} are granted")
        workspace = planner.trace.workspace_bytes
        vanilla = AccessSequence(planner.trace, NO_EVENTS).footprint + workspace
        return Planned(
            candidate.plan.with_bytes(planner.trace),
            footprint.device_peak_bytes,
            granted_bytes,
            plans.share,
            planner.host_bytes(candidate),
            candidate.us,
            planner.vanilla.us,
            candidate.stall_us,
            candidate.out_bytes,
            candidate.in_bytes,
            candidate.recomputes,
            footprint.steps,
            footprint.bytes + workspace[footprint.steps],
            vanilla[footprint.steps],
        )


def _most(job: JobState) -> int:
    return 1 << 62 if job.most_bytes is None else job.most_bytes


def _transfers(candidate: Candidate) -> bool:
    return candidate.out_bytes + candidate.in_bytes > 0


def _swaps(plan: Plan) -> bool:
    return bool(np.isin(plan.rows["kind"], (EventKind.SWAP_OUT, EventKind.SWAP_IN)).any())


def _jobs(count: int) -> str:
    return "job" if count == 1 else f"{count} jobs"
