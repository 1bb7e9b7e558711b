"""Plans for all admitted jobs of a device together.

All jobs are planned without events if that fits. Else, if all have the policy tensile, that divides the memory; if not,
the policy joint divides it, the policy tensile plans its jobs together within what joint gave them, and plans that
searches have found take the place of slower ones. A job whose swaps may be compressed is planned as usual, then again
with the compressed times of those plans' swaps where compression pays (CSWAP, section IV-B); the better plans are used.
So the choice of compressed tensors follows from trace and sparsity, not from the job's present plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from pg_tensile.errors import BudgetError, InvalidPlanError
from pg_tensile.planning.plan.plan import EVENT_ROW, Plan
from pg_tensile.planning.policies.compression.advisor import choose
from pg_tensile.planning.policies.joint.planner import Candidate, JobPlanner
from pg_tensile.planning.policies.joint.share_out import Terms, UnplannableError, share_out
from pg_tensile.planning.scheduling.decisions import Failed, JobState, Waits
from pg_tensile.planning.scheduling.round_state import Plans, RoundState
from pg_tensile.planning.scheduling.tensile_plans import plan_together, use_tensile
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.text import size


def plan_jobs(state: RoundState, admitted: Sequence[JobState]) -> Plans | None:
    """Return the plans with the least total loss, or None if jobs were decided here, so that fewer are admitted."""
    state.coded, state.codings = {}, {}
    traced = [job for job in admitted if job.trace is not None]
    newest = next((job.job for job in reversed(traced) if job.given is None), None)
    try:
        plans = _with_compression(state, traced, admitted, _plans_in_budget(state, traced, admitted))
    except UnplannableError as error:
        state.decisions[error.job] = Failed(f"no plan can be made: {error}")
        return None
    except BudgetError as error:  # plans within the budget have too many events
        reason = f"no plan with at most {state.device.most_events} events fits: {error}"
        failed = [job.job for job in traced] if newest is None else [newest]
        state.decisions |= dict.fromkeys(failed, Failed(reason))
        return None
    needed, limit = state.host_bytes(plans), state.device.host_bytes
    if needed > limit and newest is not None:
        state.decisions[newest] = Waits(
            f"needs host memory for what is swapped: {size(needed)} with the jobs that run, where {size(limit)}"
            " are allowed (pg_tensile.host_memory)"
        )
        return None
    return plans


def _plans_in_budget(state: RoundState, traced: Sequence[JobState], admitted: Sequence[JobState]) -> Plans:
    """Return plans for all traced jobs within the budget. Raises UnplannableError and BudgetError."""
    budget = state.budget_bytes() - sum(state.least[job.job] for job in admitted if job.trace is None)
    budget = max(budget, sum(state.least[job.job] for job in traced))  # a lowered setting: as close as possible
    vanilla = Plans({job.job: state.planner(job.job).vanilla for job in traced}, 1.0)
    sizes = {job.job: state.size(job, vanilla) for job in traced}
    if sum(sizes.values()) <= budget and all(sizes[job.job] <= job.limit_bytes for job in traced):
        return vanilla
    sharing = sum(job.policy != "none" for job in traced)
    plans = _divide(state, traced, budget, sharing)
    swapping = sum(map(transfers, plans.chosen.values()))
    if 0 < swapping < sharing:  # fewer jobs share the link
        faster = _divide(state, traced, budget, swapping)
        if sum(map(transfers, faster.chosen.values())) <= swapping:
            return faster
    return plans


def transfers(candidate: Candidate) -> bool:
    """Return whether the candidate's plan uses the link."""
    return candidate.out_bytes + candidate.in_bytes > 0


def _divide(state: RoundState, traced: Sequence[JobState], budget_bytes: int, sharing: int) -> Plans:
    """Return plans that divide the budget, with the link divided among `sharing` jobs."""
    share = 1 / max(sharing, 1)
    planners = {job.job: state.planner(job.job, share) for job in traced}
    together = plan_together(state, traced, planners, budget_bytes)
    if together is not None:
        return Plans(together, share)
    terms = {}
    for job in traced:
        least = state.least[job.job]
        terms[job.job] = Terms(max(least, job.limit_bytes), least, state.weights[job.job])
    chosen = share_out(planners, budget_bytes, terms, state.device.host_bytes)
    plans = Plans(chosen, share)
    tensile_jobs = [job for job in traced if job.policy == "tensile"]
    if any(len(chosen[job.job].plan) for job in tensile_jobs):
        use_tensile(state, tensile_jobs, planners, plans, budget_bytes)
    for job in traced:
        if job.found is not None:
            _use_searched(state, job, job.found, planners[job.job], plans, budget_bytes)
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
        planner, plan = state.planner(job.job, plain.share), plain.chosen[job.job].plan
        (timeline,) = simulate([SimulatedJob(planner.trace, plan)], planner.link)
        coding, decisions = choose(planner.trace, plan, timeline, job.statistics, times, planner.link, job.compression)
        state.codings[job.job] = decisions
        if coding.compresses:
            state.coded[job.job] = planner.trace.with_coding(coding)
    if not state.coded:
        return plain
    try:
        compressed = _plans_in_budget(state, traced, admitted)
    except (UnplannableError, BudgetError):  # the memory that compression itself needs does not fit
        compressed = plain
    if state.loss(compressed) < state.loss(plain):
        return compressed
    state.coded = {}
    return plain


# ---- plans of searches ----


def _use_searched(
    state: RoundState, job: JobState, plan: Plan, planner: JobPlanner, plans: Plans, budget_bytes: int
) -> None:
    """Replace the job's plan by the one that a search has found, if that is faster and fits."""
    sizes = sum(max(chosen.device_peak_bytes, state.least[number]) for number, chosen in plans.chosen.items())
    present = plans.chosen[job.job]
    spare = max(0, budget_bytes - sizes)
    room = min(job.limit_bytes, max(present.device_peak_bytes, state.least[job.job]) + spare)
    most = state.device.most_events
    rows = len(plan) + -(-len(plan.order_bytes) // EVENT_ROW.itemsize)  # the order is stored after the events
    try:
        candidate = planner.candidate(plan)
    except InvalidPlanError as error:
        state.add_note(job.job, f"the plan that a search has found cannot be used: {error.message}")
        return
    if candidate.us >= present.us or candidate.device_peak_bytes > room or (most is not None and rows > most):
        return
    if state.host_bytes(plans._replace(chosen=plans.chosen | {job.job: candidate})) <= state.device.host_bytes:
        plans.chosen[job.job] = candidate
