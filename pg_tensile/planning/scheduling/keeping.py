"""Keeping or changing plans: new plans have to be clearly better than those in force.

A change of plan costs an iteration, and measured latencies always vary a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pg_tensile.errors import PlanError
from pg_tensile.planning.job_planner.candidate import EXACT
from pg_tensile.planning.memory_flow.groups import groups_to_bytes
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind, Plan
from pg_tensile.planning.scheduling.decisions import Failed, JobState, Kept, Planned
from pg_tensile.planning.scheduling.round_state import Plans, RoundState

SLACK = 50  # a job is granted 1 / SLACK more memory than its plan needs, where there is room
GAIN = 0.02  # fraction of the time of all jobs that new plans must save to replace plans that can stay


def decide(state: RoundState, admitted: Sequence[JobState], plans: Plans) -> None:
    """Decide which of the admitted jobs keep their grants, and which are given these plans."""
    present = _plans_in_force(state, admitted)
    if present is not None and state.loss(plans) >= (1 - GAIN) * state.loss(present):
        state.decisions |= {job.job: Kept() for job in admitted}
        return
    same = {job.job for job in admitted if _has_plan(state, job, plans)}
    grants = _grants(state, admitted, plans, same)
    spare = 0 if plans.groups else max(0, state.budget_bytes() - sum(grants.values()))
    for job in admitted:
        grant = grants[job.job]
        if job.given is not None and job.job in same and grant == job.given.granted_bytes:
            state.decisions[job.job] = Kept()
            continue
        try:
            room = min(job.limit_bytes, grant + spare)
            state.decisions[job.job] = _planned(state, job, plans, grant)._replace(room_bytes=room)
        except PlanError as error:
            state.decisions[job.job] = Failed(f"a plan was made that cannot be used: {error}")


def _plans_in_force(state: RoundState, admitted: Sequence[JobState]) -> Plans | None:
    """Return the plans in force, or None if a job has none yet or they no longer fit.

    Also None if memory flows and only one job is left to share it, or if it suffices for all of them at once: requests
    for memory cost more than a change of plan, however little the jobs wait."""
    granted: dict[int, int] = {}
    in_force: dict[int, Plan] = {}
    flowing: dict[int, bytes] = {}
    for job in admitted:
        least = state.least[job.job]
        if job.given is None or job.stuck or not least <= job.given.granted_bytes <= job.limit_bytes:
            return None
        if job.trace is not None:
            if job.given.plan is None:
                return None
            in_force[job.job] = job.given.plan
        if job.given.groups:
            if not state.can_flow(job):
                return None
            flowing[job.job] = job.given.groups
        granted[job.job] = job.given.granted_bytes
    shares = {job.job: job.given.link_share for job in admitted if job.given is not None and job.job in in_force}
    if len(flowing) == 1 or (flowing and state.vanilla_bytes(admitted) <= state.budget_bytes()):
        return None
    whole = sum(shares[job] for job, plan in in_force.items() if _swaps(plan))
    if whole > 1 + EXACT:
        return None
    try:
        chosen = {job: state.planner(job, shares[job]).candidate(plan) for job, plan in in_force.items()}
        planners = {job: state.planner(job, shares[job]) for job in flowing}
        groups = {job: state.caches.groups(planners[job], in_force[job], rows) for job, rows in flowing.items()}
    except PlanError:
        return None
    rest = state.budget_bytes() - sum(size for job, size in granted.items() if job not in flowing)
    plans = Plans(chosen, shares, groups, rest)
    fits = all(candidate.device_peak_bytes <= granted[job] for job, candidate in chosen.items())
    fits &= all(granted[job] == state.size(state.jobs[job], plans) for job in flowing)
    if not fits or rest < 0 or not state.can_run(plans):
        return None
    return plans if state.keeps_promises(plans, GAIN) else None


def _swaps(plan: Plan) -> bool:
    return bool(np.isin(plan.rows["kind"], (EventKind.SWAP_OUT, EventKind.SWAP_IN)).any())


def _has_plan(state: RoundState, job: JobState, plans: Plans) -> bool:
    """Return whether the job already has the plan chosen for it, and enough memory for that."""
    given = job.given
    if given is None or job.stuck or given.granted_bytes > job.limit_bytes:
        return False
    if job.trace is None:
        return given.granted_bytes == state.least[job.job]
    candidate = plans.chosen[job.job]
    return (
        given.plan is not None
        and replace(given.plan, generation=0) == replace(candidate.plan.with_bytes(job.trace), generation=0)
        and given.granted_bytes >= state.size(job, plans)
        and given.groups == _group_rows(job, plans)
        and (given.link_share == plans.shares[job.job] or not candidate.transfers)
    )


def _grants(state: RoundState, admitted: Sequence[JobState], plans: Plans, same: set[int]) -> dict[int, int]:
    """Return the grant of each job in bytes: its plan's peak and, where there is room, up to 1 / SLACK more.

    Jobs in `same` keep their grants if all fit; otherwise `same` is cleared. Where memory flows, all that is left of
    it does, and no job has more than its plan needs.
    """
    sizes = {job.job: state.size(job, plans) for job in admitted}
    if plans.groups:
        return sizes
    kept = {job.job: job.given.granted_bytes for job in admitted if job.given is not None and job.job in same}
    budget = state.budget_bytes()
    if sum((sizes | kept).values()) <= budget:
        sizes |= kept
    else:
        same.clear()
    slack = {
        job.job: max(0, min(sizes[job.job] // SLACK, job.limit_bytes - sizes[job.job]))
        for job in admitted
        if job.trace is not None and job.job not in same
    }
    room = max(0, budget - sum(sizes.values()))
    part = min(1.0, room / max(1, sum(slack.values())))
    return {job: size + int(slack.get(job, 0) * part) for job, size in sizes.items()}


def _planned(state: RoundState, job: JobState, plans: Plans, granted_bytes: int) -> Planned:
    """Return the decision for a job, after a final check of its plan. Raises PlanError if that fails."""
    if job.trace is None:
        return Planned(NO_EVENTS, granted_bytes, granted_bytes, 1.0)
    planner, candidate = state.planner(job.job), plans.chosen[job.job]
    groups, us = plans.groups.get(job.job, ()), state.planned_us(plans)[job.job]
    sequence = AccessSequence(planner.trace, candidate.plan)
    sequence.check()
    footprint = footprint_of(sequence)
    taken = max([candidate.device_peak_bytes, *(group.most_bytes for group in groups)])
    if taken > granted_bytes:
        raise PlanError(f"it takes {taken:,} bytes where {granted_bytes:,} are granted")
    workspace = planner.trace.workspace_bytes
    vanilla = AccessSequence(planner.trace, NO_EVENTS).footprint + workspace
    return Planned(
        candidate.plan.with_bytes(planner.trace),
        candidate.device_peak_bytes,
        granted_bytes,
        plans.shares[job.job],
        planner.host_bytes(candidate),
        us,
        planner.vanilla.us,
        candidate.stall_us + (us - candidate.us),
        candidate.out_bytes,
        candidate.in_bytes,
        candidate.recomputes,
        footprint.steps,
        footprint.bytes + workspace[footprint.steps],
        vanilla[footprint.steps],
        groups=_group_rows(job, plans),
    )


def _group_rows(job: JobState, plans: Plans) -> bytes:
    """Return the rows of the job's groups; none for a constant grant."""
    groups = plans.groups.get(job.job)
    if not groups:
        return b""
    candidate = plans.chosen[job.job]
    return groups_to_bytes(groups, AccessSequence(candidate.trace, candidate.plan))
