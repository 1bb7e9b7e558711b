"""Plans for all admitted jobs of a device together.

All jobs are planned without events if that fits. Else, if all have the policy tensile, that divides the memory; if not,
the policy joint divides it (in few passes first, if that is wanted and traces are long), the policy tensile plans its
jobs together within what joint gave them, and plans that searches have found take the place of slower ones. A job
whose swaps may be compressed is planned as usual, then again with the compressed times of those plans' swaps where
compression pays (CSWAP, section IV-B); the better plans are used. So the choice of compressed tensors follows from
trace and sparsity, not from the job's present plan. Last, plans under which memory flows take the place of all these if
they are better, or if constant grants are impossible (memory_flow.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pg_tensile.errors import BudgetError, InvalidPlanError
from pg_tensile.planning.plan.plan import EVENT_ROW, Plan
from pg_tensile.planning.policies.compression.advisor import choose
from pg_tensile.planning.policies.joint.part import SlowdownError, Terms, UnplannableError
from pg_tensile.planning.policies.joint.share_out import share_out
from pg_tensile.planning.scheduling.decisions import Failed, JobState, Kept, Waits
from pg_tensile.planning.scheduling.memory_flow import flow_bytes, flow_jobs, flow_plans
from pg_tensile.planning.scheduling.round_state import Plans, RoundState
from pg_tensile.planning.scheduling.tensile_plans import plan_together, use_tensile
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.text import size

# Of all jobs, beyond which few passes are made while a job waits: about one second of planning otherwise.
BRIEF_OPERATORS = 200
# Part of the speed of jobs that train one after the other, at which they train at once instead: each of them gets on.
LEAST_SPEED = 0.8
NO_FLOW = "beside the jobs that run, its memory does not suffice, and no plans let memory flow between them"


def plan_jobs(state: RoundState, admitted: Sequence[JobState]) -> Plans | None:
    """Return the plans with the least total loss, or None if jobs were decided here, so that fewer are admitted.

    Raises SlowdownError if a brief division would break a promise although promises do not count."""
    state.coded, state.codings = {}, {}
    holding = (job for job in state.jobs.values() if job.given is not None and job.job in state.decisions)
    state.computing = len(admitted) + sum(isinstance(state.decisions[job.job], Failed | Kept) for job in holding)
    traced = [job for job in admitted if job.trace is not None]
    newest = next((job.job for job in reversed(traced) if job.given is None), None)
    if state.memory_flow and sum(state.needs(job.job) for job in admitted) > state.budget_bytes():
        flowing = _with_flow(state, admitted, None)
        last = next((job.job for job in reversed(admitted) if job.given is None), None)
        if flowing is not None and (last is None or _fast_enough(state, admitted, last, flowing)):
            return flowing
        if last is not None:
            state.decisions[last] = state.alternatives.get(last, Waits(NO_FLOW))
            return None
        if state.break_promise(job.job for job in traced):
            return None
    try:
        plans = _with_compression(state, traced, admitted, _plans_in_budget(state, traced, admitted))
    except UnplannableError as error:
        state.decisions[error.job] = Failed(f"no plan can be made: {error}")
        return None
    except SlowdownError:
        if not state.counts_promises:
            raise
        flowing = _with_flow(state, admitted, None)
        if flowing is not None:
            return flowing
        if newest is None:
            state.break_promise(job.job for job in traced)
            return None
        promises = [job.job for job in traced if state.most_slowdown(job.job) < math.inf]
        which = " and ".join("this job" if job == newest else f"job {job}" for job in promises)
        state.lacking[newest] = state.slowed_bytes = max(1, state.vanilla_bytes(admitted) - state.budget_bytes())
        state.decisions[newest] = Waits(
            f"beside the jobs that run, {which} would get plans that cost more than max_slowdown allows"
        )
        return None
    except BudgetError as error:  # plans within the budget have too many events
        reason = f"no plan with at most {state.device.most_events} events fits: {error}"
        failed = [job.job for job in traced] if newest is None else [newest]
        state.decisions |= dict.fromkeys(failed, Failed(reason))
        return None
    needed, limit = state.host_bytes(plans), state.device.host_bytes
    if needed > limit and newest is not None:
        flowing = _with_flow(state, admitted, None)
        if flowing is not None:
            return flowing
        state.decisions[newest] = Waits(
            f"needs host memory for what is swapped: {size(needed)} with the jobs that run, where {size(limit)}"
            " are allowed (pg_tensile.host_memory)"
        )
        return None
    return _with_flow(state, admitted, plans) or plans


def _fast_enough(state: RoundState, admitted: Sequence[JobState], last: int, flowing: Plans) -> bool:
    """Return whether all jobs train fast enough if memory flows, beside what they do if the job `last` waits."""
    others = [job for job in admitted if job.job != last]
    if not state.can_flow(state.jobs[last]):
        return True  # it takes little, and speeds up nothing that is known
    traced = [job for job in others if job.trace is not None]
    state.computing -= 1
    try:
        if sum(state.needs(job.job) for job in others) > state.budget_bytes():
            waiting = _with_flow(state, others, None)
        else:
            plans = _plans_in_budget(state, traced, others)
            waiting = _with_flow(state, others, plans) or plans
        waiting_speed = 0.0 if waiting is None else state.speed(waiting)
    except (UnplannableError, BudgetError, SlowdownError):
        return True
    finally:
        state.computing += 1
    return state.speed(flowing) >= LEAST_SPEED * waiting_speed


def _with_flow(state: RoundState, admitted: Sequence[JobState], constant: Plans | None) -> Plans | None:
    """Return plans under which memory flows if there are any and they are better than `constant`, else None.

    `constant`: the plans with constant grants, which the jobs keep whose memory cannot flow; None if there are none."""
    jobs = flow_jobs(state, admitted)
    if not jobs:
        return None
    others = [job for job in admitted if not state.can_flow(job)]
    traced = [job for job in others if job.trace is not None]
    eager_bytes = sum(state.least[job.job] for job in others if job.trace is None)
    brief = state.may_be_brief and sum(map(_operators, (*jobs, *traced))) > BRIEF_OPERATORS
    if constant is None:
        state.coded = {}
        reserved = flow_bytes(state, jobs, others)
        try:
            plans = _plans_in_budget(state, traced, others, reserved) if traced else Plans({}, {})
        except (UnplannableError, BudgetError, SlowdownError):
            return None
    else:
        numbers = [job.job for job in traced]
        plans = Plans({job: constant.chosen[job] for job in numbers}, {job: constant.shares[job] for job in numbers})
    flowing = flow_plans(state, jobs, plans, eager_bytes, constant, brief)
    state.brief |= brief and flowing is not None
    return flowing


def _operators(job: JobState) -> int:
    return 0 if job.trace is None else job.trace.operator_count


def _plans_in_budget(
    state: RoundState, traced: Sequence[JobState], admitted: Sequence[JobState], reserved_bytes: int = 0
) -> Plans:
    """Return plans for all traced jobs within the budget, less the reserved bytes.

    Promises that do not count are kept if few passes are made. Raises UnplannableError, BudgetError and SlowdownError.
    """
    budget = state.budget_bytes() - reserved_bytes
    budget -= sum(state.least[job.job] for job in admitted if job.trace is None)
    budget = max(budget, sum(state.least[job.job] for job in traced))  # a lowered setting: as close as possible
    vanilla = Plans({job.job: state.planner(job.job).vanilla for job in traced}, {job.job: 1.0 for job in traced})
    sizes = {job.job: state.size(job, vanilla) for job in traced}
    if sum(sizes.values()) <= budget and all(sizes[job.job] <= job.limit_bytes for job in traced):
        return vanilla
    together = plan_together(state, traced, budget)
    if together is not None:
        return together
    planners = {job.job: state.planner(job.job) for job in traced}
    bound = any(state.most_slowdown(job.job) < math.inf for job in traced)
    brief = state.may_be_brief and sum(map(_operators, traced)) > BRIEF_OPERATORS and not bound
    terms = {}
    for job in traced:
        least = state.least[job.job]
        slowdown = state.promises.get(job.job, math.inf) if brief else state.most_slowdown(job.job)
        terms[job.job] = Terms(max(least, job.limit_bytes), least, state.weights[job.job], slowdown)
    state.brief |= brief
    plans = Plans(*share_out(planners, budget, terms, state.device.host_bytes, brief, state.over))
    tensile_jobs = [job for job in traced if job.policy == "tensile"]
    if any(len(plans.chosen[job.job].plan) for job in tensile_jobs):
        use_tensile(state, tensile_jobs, plans, budget)
    for job in traced:
        if job.found is not None:
            _use_searched(state, job, job.found, plans, budget)
    return plans


# ---- compression ----


def _with_compression(
    state: RoundState, traced: Sequence[JobState], admitted: Sequence[JobState], plain: Plans
) -> Plans:
    """Return plans with compressed swaps if they are better than `plain`, else `plain`."""
    times = state.device.codec_times
    for job in traced:
        if times is None or job.compression == "none" or not job.statistics:
            continue
        planner, plan = state.planner(job.job, plain.shares[job.job]), plain.chosen[job.job].plan
        (timeline,) = simulate([SimulatedJob(planner.trace, plan)], planner.link)
        coding, decisions = choose(planner.trace, plan, timeline, job.statistics, times, planner.link, job.compression)
        state.codings[job.job] = decisions
        if coding.compresses:
            state.coded[job.job] = planner.trace.with_coding(coding)
    if not state.coded:
        return plain
    try:
        compressed = _plans_in_budget(state, traced, admitted)
    except (UnplannableError, BudgetError, SlowdownError):  # the memory that compression itself needs does not fit
        compressed = plain
    if state.loss(compressed) < state.loss(plain):
        return compressed
    state.coded = {}
    return plain


# ---- plans of searches ----


def _use_searched(state: RoundState, job: JobState, plan: Plan, plans: Plans, budget_bytes: int) -> None:
    """Replace the job's plan by the one that a search has found, if that is faster and fits."""
    sizes = sum(max(chosen.device_peak_bytes, state.least[number]) for number, chosen in plans.chosen.items())
    present = plans.chosen[job.job]
    spare = max(0, budget_bytes - sizes)
    room = min(job.limit_bytes, max(present.device_peak_bytes, state.least[job.job]) + spare)
    most = state.device.most_events
    rows = len(plan) + -(-len(plan.order_bytes) // EVENT_ROW.itemsize)  # the order is stored after the events
    try:
        candidate = state.planner(job.job, plans.shares[job.job]).candidate(plan)
    except InvalidPlanError as error:
        state.add_note(job.job, f"the plan that a search has found cannot be used: {error.message}")
        return
    if candidate.us >= present.us or candidate.device_peak_bytes > room or (most is not None and rows > most):
        return
    if candidate.transfers and not present.transfers and len(plans.chosen) > 1:
        return  # the others have the whole link
    changed = plans._replace(chosen=plans.chosen | {job.job: candidate})
    if state.host_bytes(changed) <= state.device.host_bytes and state.loss(changed) < state.loss(plans):
        plans.chosen[job.job] = candidate
