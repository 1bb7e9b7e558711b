"""Memory scheduling: which jobs of a device run, and under which plans (TENSILE, sections III-D, IV-E and IV-F).

A job is admitted when the least memory that it can run with fits beside the least memory of the running jobs
(admission.py); then all of them are planned together (planning.py). Running jobs keep their plans unless something has
to change or a new set of plans is clearly better (keeping.py).

Priorities weigh losses: a job's relative loss of time counts twice as much for every `PRIORITY_STEP` of priority that
it has above another job, up to `HEAVIEST` times as much (round_state.py).

Promised slowdowns mostly bind nothing, and what they need takes long to find out. So a round is first made without
them; if its plans break one, the promises count in a second one.

There is no clock and no I/O: equal arguments give equal decisions, and `DeviceScheduler` keeps caches only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pg_tensile.planning.policies.joint.part import SlowdownError
from pg_tensile.planning.scheduling.admission import admit, find_least
from pg_tensile.planning.scheduling.decisions import DeviceState, JobState, Schedule, Waits
from pg_tensile.planning.scheduling.keeping import decide
from pg_tensile.planning.scheduling.plan_caches import PlanCaches
from pg_tensile.planning.scheduling.planning import plan_jobs
from pg_tensile.planning.scheduling.round_state import Plans, RoundState


class DeviceScheduler:
    """Scheduler of one device's jobs. It caches planners and plans of their traces between calls."""

    def __init__(self) -> None:
        self.caches = PlanCaches()

    def schedule(
        self,
        device: DeviceState,
        jobs: Iterable[JobState],
        may_be_brief: bool = False,
        over: Callable[[], bool] = lambda: False,
    ) -> Schedule:
        """Return the decisions for all open jobs of the device.

        `may_be_brief`: memory is divided in few passes if more would take long. Raises AbandonedError once `over`
        returns True."""
        self.caches.begin_round(over)
        jobs = list(jobs)
        rounds = (True,) if all(job.max_slowdown is None for job in jobs) else (False, True)
        for counts_promises in rounds:
            state = RoundState(self.caches, device, jobs, may_be_brief, over, counts_promises)
            admitted, plans = _plan(state)
            if plans is not None:
                break
        assert plans is not None  # as where promises count
        decide(state, admitted, plans)
        totals_us = {
            job: float(state.planner(job).trace.latency_us.sum())
            for job in state.least
            if state.jobs[job].trace is not None
        }
        self.caches.end_round()
        decisions = state.decisions | state.waits
        waiting = [job for job in state.lacking if isinstance(decisions[job], Waits)]
        waiting.sort(key=lambda job: (-state.jobs[job].rank, job))
        lacking = [int(state.lacking[job]) for job in waiting]
        if state.stuck_bytes:
            lacking.insert(0, int(state.stuck_bytes))
        slowed_bytes = int(max(state.slowed_bytes, state.vanilla_bytes(admitted) - state.budget_bytes()))
        return Schedule(decisions, totals_us, state.notes, state.codings, state.brief, tuple(lacking), slowed_bytes)

    def needs(self, device: DeviceState, jobs: Iterable[JobState]) -> dict[int, int]:
        """Return the least bytes that each job has to be given, with its promised slowdown, as admission counts them.

        Jobs that cannot be planned are missing. No plans are made."""
        self.caches.begin_round()
        state = RoundState(self.caches, device, jobs)
        for job in state.jobs.values():
            find_least(state, job)
        admit(state)
        return {job: state.needs(job) for job in state.least}


def _plan(state: RoundState) -> tuple[Sequence[JobState], Plans | None]:
    """Return the admitted jobs and their plans; None if promises do not count in the round, but should."""
    for job in state.jobs.values():
        find_least(state, job)
    plans = None
    while plans is None:
        admitted = admit(state)
        try:
            plans = plan_jobs(state, admitted)
        except SlowdownError:
            return admitted, None
    return admitted, plans if state.counts_promises or _binds_nothing(state, plans) else None


def _binds_nothing(state: RoundState, plans: Plans) -> bool:
    """Return whether decisions that do not count with promises keep them all.

    Only if promises count it is known whether one can be kept at all, unless the job fits without a plan."""
    waiting = [state.jobs[job] for job in state.promises if isinstance((state.decisions | state.waits).get(job), Waits)]
    budget = state.device.budget_bytes
    can_be_kept = all(
        state.planner(job.job).vanilla.device_peak_bytes <= min(budget - job.overhead_bytes, job.limit_bytes)
        for job in waiting
    )
    return can_be_kept and state.keeps_promises(plans)
