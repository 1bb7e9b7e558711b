"""Admission: which jobs of a device may run.

A job is admitted when the least memory that it can run with fits beside the least memory of the running jobs, or if
memory may flow between them, beside what the others keep between two iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

from pg_tensile.planning.policies.joint.planner import AbandonedError
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
    budget = state.budget_bytes()
    while not _have_room(state, admitted, budget):
        if not state.break_promise(job.job for job in admitted):
            break
    free = budget - sum(state.needs(job.job) for job in admitted)
    for job in [job for job in admitted if job.choosing and job.stuck]:
        least = state.least[job.job]
        if free < 0 and not _have_room(state, admitted, budget):
            state.decisions[job.job] = Refused(max(0, least + free), least, job.operator)
            admitted.remove(job)
            free += least
    running = len(admitted)
    aged: JobState | None = None
    state.waits.clear()
    state.alternatives.clear()
    for job in sorted((job for job in undecided if job.given is None), key=lambda job: (-job.rank, job.job)):
        if aged is not None:
            state.waits[job.job] = Waits(f"waits behind job {aged.job}, which has waited long enough")
            continue
        needs, waits = state.needs(job.job), None
        if needs > free:
            waits = Waits(_reason(state, job, free, running, len(admitted) - running))
        if waits is None or state.could_flow([*admitted, job]):
            admitted.append(job)
            free -= needs
            if waits is not None:
                state.alternatives[job.job] = waits
        else:
            state.waits[job.job] = waits
            if 0 < state.device.ageing_s <= job.waited_s:
                aged = job
    return admitted


def _have_room(state: RoundState, jobs: Sequence[JobState], budget_bytes: int) -> bool:
    """Return whether the least that these jobs need fits, in constant grants or with memory that flows."""
    return sum(state.needs(job.job) for job in jobs) <= budget_bytes or state.could_flow(jobs)


def _reason(state: RoundState, job: JobState, free: int, running: int, starting: int) -> str:
    """Return why a job waits beside `running` jobs and `starting` ones before it, which leave `free` bytes."""
    device = state.device
    users = [f"the {_jobs(running)} that {'runs' if running == 1 else 'run'}"] if running else []
    users += [f"the {_jobs(starting)} before it"] if starting else []
    users += ["models for prediction"] if device.inference_bytes else []
    users += ["jobs that end"] if device.ending_bytes else []
    needs, has = state.needs(job.job) + job.overhead_bytes, max(free, 0) + job.overhead_bytes
    promise = f" for its max_slowdown of {job.max_slowdown:g}" if state.needs(job.job) > state.least[job.job] else ""
    return (
        f"needs at least {size(needs)} of device memory{promise}; {size(has)} of the {size(device.budget_bytes)} of"
        f" {device.name} are not needed by {' and '.join(users) or 'others'}"
    )


def _jobs(count: int) -> str:
    return "job" if count == 1 else f"{count} jobs"
