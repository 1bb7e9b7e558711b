"""Admission: which jobs of a device may run.

A job is admitted when the least memory that it can run with fits beside the least memory of the running jobs, or if
memory may flow between them, beside what the others keep between two iterations. Predictions and jobs take turns: a
waiting job leaves the memory that a prediction needs that has waited longer, and running jobs make room for one if
their least memory fits beside it. What waiting jobs lack is noted, for models that are idle to give way to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pg_tensile.planning.job_planner.planner import AbandonedError
from pg_tensile.planning.scheduling.decisions import Failed, JobState, Kept, Refused, Waits
from pg_tensile.planning.scheduling.round_state import RoundState
from pg_tensile.text import size


def find_least(state: RoundState, job: JobState) -> None:
    """Determine the job's least memory, or decide at once: pinned, cannot be planned, or exceeds its limit."""
    if job.pinned:
        state.decisions[job.job] = Kept()
        return
    least = job.least_bytes
    promised = None
    if job.trace is not None:
        try:
            planner = state.planner(job.job)
            vanilla = planner.vanilla.device_peak_bytes
            least = max(least, vanilla if job.policy == "none" else planner.least_bytes)
            if job.max_slowdown is not None and job.policy != "none":
                state.promises[job.job] = job.max_slowdown
                if state.counts_promises:
                    promised = max(least, planner.saving(job.max_slowdown).device_peak_bytes)
        except AbandonedError:
            raise
        except Exception as error:
            state.decisions[job.job] = Failed(f"{type(error).__name__}: {error}")
            return
    state.least[job.job] = least
    limit = min(state.device.budget_bytes - job.overhead_bytes, job.limit_bytes)
    if least > limit and (job.given is None or job.stuck):
        state.decisions[job.job] = Refused(limit, least, job.operator)
    elif promised is not None:
        state.promised[job.job] = promised
        if promised > limit and job.given is None:
            state.decisions[job.job] = Refused(limit, promised, job.operator, job.max_slowdown)
        elif promised > limit:
            state.break_promise([job.job])


def admit(state: RoundState) -> list[JobState]:
    """Return the running jobs, then the newly admitted ones in order of rank; record why others wait.

    A smaller job may pass one that has to wait, until that one has waited for `ageing_s`.
    """
    undecided = [job for job in state.jobs.values() if job.job not in state.decisions]
    admitted = [job for job in undecided if job.given is not None]
    state.leaves_wanted = _can_leave_wanted(state, admitted)
    budget = state.budget_bytes()
    while not _have_room(state, admitted, budget):
        if not state.break_promise(job.job for job in admitted):
            break
    free = budget - sum(state.needs(job.job) for job in admitted)
    for job in [job for job in admitted if job.choosing and job.stuck] + _deadlocked(state, admitted):
        least = state.least[job.job]
        if free < 0 and not _have_room(state, admitted, budget):
            state.decisions[job.job] = Refused(max(0, least + free), least, job.operator)
            admitted.remove(job)
            free += least
    state.stuck_bytes = max(0, -free) if any(job.stuck for job in admitted) else 0
    running = len(admitted)
    aged: JobState | None = None
    state.waits.clear()
    state.alternatives.clear()
    state.lacking = {job: lacking for job, lacking in state.lacking.items() if job in state.decisions}
    state.leaves_wanted = False  # new jobs leave to predictions what those claim that have waited longer
    budget = state.budget_bytes()
    free = budget - sum(state.needs(job.job) for job in admitted)
    for job in sorted((job for job in undecided if job.given is None), key=lambda job: (-job.rank, job.job)):
        if aged is not None:
            state.waits[job.job] = Waits(f"waits behind job {aged.job}, which has waited long enough")
            continue
        needs, waits, claimed = state.needs(job.job), None, state.claimed_before(job)
        if needs > free - claimed:
            waits = Waits(_reason(state, job, free - claimed, running, len(admitted) - running))
        flowing = None if waits is None else state.flow_least_bytes([*admitted, job])
        if waits is not None and not claimed:
            state.lacking[job.job] = needs - free if flowing is None else min(needs - free, max(1, flowing - budget))
        if waits is None or (flowing is not None and flowing <= budget - claimed):
            admitted.append(job)
            free -= needs
            if waits is not None:
                state.alternatives[job.job] = waits
        else:
            state.waits[job.job] = waits
            if 0 < state.device.ageing_s <= job.waited_s:
                aged = job
    state.leaves_wanted = _can_leave_wanted(state, admitted)
    return admitted


def _deadlocked(state: RoundState, admitted: Sequence[JobState]) -> list[JobState]:
    """Return the jobs of the policy none if each waits for more memory, which none of them gives back: the least first.

    Their first steps have taken more than was known. As long as one job trains, or could, the others wait for its end,
    and for models to give way."""
    if not all(job.stuck and job.trace is None for job in admitted):
        return []
    held = {job.job: 0 if job.given is None else job.given.granted_bytes for job in admitted}
    room = state.budget_bytes() + state.device.inference_bytes - sum(held.values())
    if any(state.needs(number) - bytes <= room for number, bytes in held.items()):
        return []
    return sorted(admitted, key=lambda job: (job.priority, -job.job))


def _can_leave_wanted(state: RoundState, jobs: Sequence[JobState]) -> bool:
    """Return whether the least of these jobs fits beside what a prediction waits for, so that they make room for it."""
    state.leaves_wanted = True
    least = sum(state.least[job.job] for job in jobs)
    return least <= state.budget_bytes() or state.could_flow(jobs)


def _have_room(state: RoundState, jobs: Sequence[JobState], budget_bytes: int) -> bool:
    """Return whether the least that these jobs need fits, in constant grants or with memory that flows."""
    return sum(state.needs(job.job) for job in jobs) <= budget_bytes or state.could_flow(jobs)


def _reason(state: RoundState, job: JobState, free: int, running: int, starting: int) -> str:
    """Return why a job waits beside `running` jobs and `starting` ones before it, which leave `free` bytes."""
    device = state.device
    users = [f"the {_jobs(running)} that {'runs' if running == 1 else 'run'}"] if running else []
    users += [f"the {_jobs(starting)} before it"] if starting else []
    users += ["models for prediction"] if device.inference_bytes or state.claimed_before(job) else []
    users += ["jobs that end"] if device.ending_bytes else []
    needs, has = state.needs(job.job) + job.overhead_bytes, max(free, 0) + job.overhead_bytes
    promise = f" for its max_slowdown of {job.max_slowdown:g}" if state.needs(job.job) > state.least[job.job] else ""
    return (
        f"needs at least {size(needs)} of device memory{promise}; {size(has)} of the {size(device.budget_bytes)} of"
        f" {device.name} are not needed by {' and '.join(users) or 'others'}"
    )


def _jobs(count: int) -> str:
    return "job" if count == 1 else f"{count} jobs"
