"""Plans of the jobs whose policy is tensile, by the paper's algorithm for all of them together (policies/tensile).

If all jobs of the device have this policy, the algorithm divides the whole budget. Beside jobs of other policies, it
divides what the division of the policy joint leaves to its jobs. Where it reaches no plans that fit, each job is
planned by itself within the memory that the division gave to it and, failing that, keeps the plan of that division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import REPAIRS, JobPlanner
from pg_tensile.planning.plan.codecs import reserved_bytes
from pg_tensile.planning.policies.tensile.rounds import Limits
from pg_tensile.planning.scheduling.decisions import JobState
from pg_tensile.planning.scheduling.round_state import Plans, RoundState

SWAP_PARTS = (1.0, 0.5, 0.25, 0.12, 0.0)  # of what jobs may swap: tried in turn while host memory does not suffice

Planners = Mapping[int, JobPlanner]


def plan_together(state: RoundState, jobs: Sequence[JobState], budget_bytes: int) -> Plans | None:
    """Return the plans of all jobs of the device within the budget, each with an equal part of the link.

    Where host memory is short, the jobs swap less and recompute more. Returns None if a job has another policy, or no
    plans fit into device and host memory.
    """
    if any(job.policy != "tensile" for job in jobs):
        return None
    planners = {job.job: state.planner(job.job, 1 / len(jobs)) for job in jobs}
    for part in SWAP_PARTS:
        less = [replace(job, swap_share=part * job.swap_share) for job in jobs]
        candidates = _fitting(state, less, planners, budget_bytes)
        if candidates is None:
            return None
        plans = Plans(candidates, {})
        _divide_link(state, plans, dict.fromkeys(candidates, 1 / len(jobs)))
        if state.host_bytes(plans) <= state.device.host_bytes:
            return plans
    return None


def use_tensile(state: RoundState, jobs: Sequence[JobState], plans: Plans, budget_bytes: int) -> None:
    """Replace the plans of these jobs by those of the paper's algorithm, where they fit.

    `plans` are those of all jobs, which share the budget. Each of these jobs has an equal part of the link, and the
    others share the rest.
    """
    share = 1 / len(plans.chosen)
    planners = {job.job: state.planner(job.job, share) for job in jobs}
    others = sum(max(plans.chosen[job].device_peak_bytes, state.least[job]) for job in plans.chosen.keys() - planners)
    chosen = _fitting(state, jobs, planners, budget_bytes - others)
    if chosen is None:
        chosen = {}
        for job in jobs:
            chosen |= _fitting(state, [job], planners, state.size(job, plans)) or {}
    if state.host_bytes(plans._replace(chosen=plans.chosen | chosen)) > state.device.host_bytes:
        chosen = {}
    plans.chosen.update(chosen)
    _divide_link(state, plans, dict.fromkeys(chosen, share))
    for number in sorted(planners.keys() - chosen.keys()):
        state.add_note(number, "the policy tensile finds no plan that fits: planned with the policy joint")


def _divide_link(state: RoundState, plans: Plans, fixed: Mapping[int, float]) -> None:
    """Give jobs whose plans use the link their fixed parts of it; the others share the rest as they have so far."""
    users = {job for job, candidate in plans.chosen.items() if candidate.transfers}
    plans.shares.update({job: share if job in users else 1.0 for job, share in fixed.items()})
    others = sorted(users - fixed.keys())
    left = 1 - sum(plans.shares[job] for job in users & fixed.keys())
    whole = sum(plans.shares[job] for job in others)
    for job in others:
        plans.shares[job] *= min(1.0, left / whole)
        plans.chosen[job] = state.planner(job, plans.shares[job]).candidate(plans.chosen[job].plan)


def _fitting(
    state: RoundState, jobs: Sequence[JobState], planners: Planners, room_bytes: int
) -> dict[int, Candidate] | None:
    """Return plans for these jobs that fit into the room together, and each within its job's limit, or None.

    On an accelerator, plans for the whole room may leave the allocator too little, so smaller ones are tried.
    """
    most = {job.job: max(job.limit_bytes, state.least[job.job]) for job in jobs}
    aim, most_aimed = room_bytes, dict(most)
    accelerated = any(planners[job.job].trace.device in ACCELERATORS for job in jobs)
    for _ in range(REPAIRS if accelerated else 1):
        limits = {job.job: Limits(job.swap_share, state.least[job.job], most_aimed[job.job]) for job in jobs}
        candidates = _candidates(state, planners, aim, limits)
        if len(candidates) < len(jobs):
            return None
        sizes = {job: max(candidate.device_peak_bytes, state.least[job]) for job, candidate in candidates.items()}
        excess = sum(sizes.values()) - room_bytes
        if excess <= 0 and all(size <= most[job] for job, size in sizes.items()):
            return candidates
        aim -= max(0, excess)
        most_aimed = {job: aimed - max(0, sizes[job] - most[job]) for job, aimed in most_aimed.items()}
    return None


def _candidates(
    state: RoundState, planners: Planners, budget_bytes: int, limits: Mapping[int, Limits]
) -> dict[int, Candidate]:
    """Return the usable plans of the paper's algorithm for the jobs in `limits`; none if it fails.

    The algorithm divides its link equally among its jobs, so it is given the shares of all of them together.
    """
    link = state.device.profile.with_share(sum(planners[job].share for job in limits))
    traces = {job: planners[job].trace for job in limits}
    reserved = {job: reserved_bytes(trace) for job, trace in traces.items()}  # the budget is reduced by the policy
    limits = {
        job: limit._replace(
            least_bytes=max(0, limit.least_bytes - reserved[job]), most_bytes=limit.most_bytes - reserved[job]
        )
        for job, limit in limits.items()
    }
    try:
        plans = state.caches.tensile_plans(traces, link, budget_bytes, limits)
        candidates = {job: planners[job].candidate(plan) for job, plan in plans.items()}
    except Exception as error:
        for job in limits:
            state.add_note(job, f"the policy tensile failed: {type(error).__name__}: {error}")
        return {}
    most = state.device.most_events
    candidates = {
        job: candidate
        for job, candidate in candidates.items()
        if candidate.us <= state.most_slowdown(job) * planners[job].vanilla.us
    }
    return {job: candidate for job, candidate in candidates.items() if most is None or len(candidate.plan) <= most}
