"""Plans of the jobs whose policy is tensile, by the paper's algorithm (policies/tensile)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.policies.joint.planner import REPAIRS, Candidate, JobPlanner
from pg_tensile.planning.scheduling.decisions import JobState
from pg_tensile.planning.scheduling.round_state import Plans, RoundState


def use_tensile(state: RoundState, jobs: Sequence[JobState], plans: Plans) -> None:
    """Replace the plans of these jobs by those of the paper's algorithm within the same memory, where they fit.

    Each of them has an equal part of the link, and the other jobs share the rest."""
    share = 1 / len(plans.chosen)
    planners = {job.job: state.planner(job.job, share) for job in jobs}
    numbers = [job.job for job in jobs]
    rooms = {job.job: state.size(job, plans) for job in jobs}
    candidates = _candidates(state, numbers, planners, sum(rooms.values()), share)
    sizes = {job: max(candidate.device_peak_bytes, state.least[job]) for job, candidate in candidates.items()}
    together = len(candidates) == len(jobs) and sum(sizes.values()) <= sum(rooms.values())
    if together and all(sizes[job.job] <= job.limit_bytes for job in jobs):
        chosen = candidates
    else:
        chosen = {job: candidate for job, candidate in candidates.items() if candidate.device_peak_bytes <= rooms[job]}
        for job in sorted(set(numbers) - chosen.keys()):
            alone = _alone(state, job, planners, rooms[job], share)
            if alone is not None:
                chosen[job] = alone
    if state.host_bytes(plans._replace(chosen=plans.chosen | chosen)) > state.device.host_bytes:
        chosen = {}
    plans.chosen.update(chosen)
    _divide_link(state, plans, dict.fromkeys(chosen, share))
    for job in sorted(set(numbers) - chosen.keys()):
        state.add_note(job, "the policy tensile finds no plan that fits: planned with the policy joint")


def _divide_link(state: RoundState, plans: Plans, fixed: Mapping[int, float]) -> None:
    """Give jobs whose plans use the link their fixed parts of it; the others share the rest as they have so far."""
    users = {job for job, candidate in plans.chosen.items() if candidate.transfers}
    plans.shares.update({job: share if job in users else 1.0 for job, share in fixed.items()})
    others = sorted(users - fixed.keys())
    left = 1 - sum(plans.shares[job] for job in users & fixed.keys())
    whole = sum(plans.shares[job] for job in others)
    for job in others:
        plans.shares[job] *= left / whole
        plans.chosen[job] = state.planner(job, plans.shares[job]).candidate(plans.chosen[job].plan)


def _alone(
    state: RoundState, job: int, planners: Mapping[int, JobPlanner], room_bytes: int, share: float
) -> Candidate | None:
    """Return the plan of the paper's algorithm for one job within the room, or None.

    On an accelerator a plan for the whole room may leave the allocator too little, so smaller ones are tried."""
    limit = room_bytes
    for _ in range(REPAIRS if planners[job].trace.device in ACCELERATORS else 1):
        candidate = _candidates(state, [job], planners, limit, share).get(job)
        if candidate is None or candidate.device_peak_bytes <= room_bytes:
            return candidate
        limit -= candidate.device_peak_bytes - room_bytes
    return None


def _candidates(
    state: RoundState, jobs: Sequence[int], planners: Mapping[int, JobPlanner], budget_bytes: int, share: float
) -> dict[int, Candidate]:
    """Return the usable plans of the paper's algorithm, by job; none if it fails.

    The algorithm divides its link equally among its jobs, so it is given the shares of all of them together.
    """
    link = state.device.profile.with_share(share * len(jobs))
    traces = {job: planners[job].trace for job in jobs}
    try:
        plans = state.caches.tensile_plans(traces, link, budget_bytes)
        candidates = {job: planners[job].candidate(plan) for job, plan in plans.items()}
    except Exception as error:
        for job in jobs:
            state.add_note(job, f"the policy tensile failed: {type(error).__name__}: {error}")
        return {}
    most = state.device.most_events
    candidates = {
        job: candidate
        for job, candidate in candidates.items()
        if candidate.us <= state.most_slowdown(job) * planners[job].vanilla.us
    }
    return {job: candidate for job, candidate in candidates.items() if most is None or len(candidate.plan) <= most}
