"""Keeping or changing plans: new plans have to be clearly better than those in force.

A change of plan costs an iteration, and measured latencies always vary a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pg_tensile.errors import InvalidPlanError, PlanError
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind, Plan
from pg_tensile.planning.policies.joint.candidate import EXACT
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
    spare = max(0, state.budget_bytes() - sum(grants.values()))
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
    """Return the plans in force, or None if a job has none yet or they no longer fit."""
    granted: dict[int, int] = {}
    in_force: dict[int, Plan] = {}
    for job in admitted:
        least = state.least[job.job]
        if job.given is None or job.stuck or not least <= job.given.granted_bytes <= job.limit_bytes:
            return None
        if job.trace is not None:
            if job.given.plan is None:
                return None
            in_force[job.job] = job.given.plan
        granted[job.job] = job.given.granted_bytes
    shares = {job.job: job.given.link_share for job in admitted if job.given is not None and job.job in in_force}
    whole = sum(shares[job] for job, plan in in_force.items() if _swaps(plan))
    if whole > 1 + EXACT:
        return None
    try:
        chosen = {job: state.planner(job, shares[job]).candidate(plan) for job, plan in in_force.items()}
        plans = Plans(chosen, shares)
    except InvalidPlanError:
        return None
    for number, candidate in chosen.items():
        if candidate.us > (1 + GAIN) * state.most_slowdown(number) * state.planner(number).vanilla.us:
            return None
    fits = all(candidate.device_peak_bytes <= granted[job] for job, candidate in plans.chosen.items())
    enough = sum(granted.values()) <= state.budget_bytes() and state.host_bytes(plans) <= state.device.host_bytes
    return plans if fits and enough else None


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
        and (given.link_share == plans.shares[job.job] or not candidate.transfers)
    )


def _grants(state: RoundState, admitted: Sequence[JobState], plans: Plans, same: set[int]) -> dict[int, int]:
    """Return the grant of each job in bytes: its plan's peak and, where there is room, up to 1 / SLACK more.

    Jobs in `same` keep their grants if all fit; otherwise `same` is cleared.
    """
    sizes = {job.job: state.size(job, plans) for job in admitted}
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
    sequence = AccessSequence(planner.trace, candidate.plan)
    sequence.check()
    footprint = footprint_of(sequence)
    if candidate.device_peak_bytes > granted_bytes:
        raise PlanError(f"it takes {candidate.device_peak_bytes:,} bytes where {granted_bytes:,} are granted")
    workspace = planner.trace.workspace_bytes
    vanilla = AccessSequence(planner.trace, NO_EVENTS).footprint + workspace
    return Planned(
        candidate.plan.with_bytes(planner.trace),
        candidate.device_peak_bytes,
        granted_bytes,
        plans.shares[job.job],
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
