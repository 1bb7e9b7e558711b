"""The default policy: the least time for all jobs together that meets the budget.

Each job is planned by `JobPlanner`; `share_out` divides the budget and the link among the jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate, is_better
from pg_tensile.planning.job_planner.planner import JobPlanner, identity
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.joint.plan_search import PlanSearch
from pg_tensile.planning.policies.joint.share_out import share_out
from pg_tensile.planning.trace.trace import Trace


def plan(
    traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None, tries: int = 0, seed: int = 0
) -> dict[int, Plan]:
    """Return the plans with which all jobs together lose the least time and fit the budget.

    `budget_bytes`: None means that every job gives up the memory that costs it under 2 % of its time with an equal part
    of the link. With `tries`, better plans are searched for within what each job was given (plan_search.py).
    Raises BudgetError with the smallest budget that is possible.
    """
    distinct = {identity(trace): JobPlanner(trace, profile) for trace in traces.values()}
    planners = {job: distinct[identity(trace)] for job, trace in traces.items()}
    if budget_bytes is None:
        chosen = {job: planner.sharing(1 / len(traces)).saving() for job, planner in planners.items()}
    else:
        chosen, shares = share_out(planners, budget_bytes)
        spare = budget_bytes - sum(candidate.device_peak_bytes for candidate in chosen.values())
        for job, candidate in chosen.items() if tries else ():
            if not candidate.transfers and len(traces) > 1:
                continue  # the others have the whole link
            search = PlanSearch(planners[job].sharing(shares[job]), tries, seed)
            searched = search.best(candidate.device_peak_bytes + spare)
            if isinstance(searched, Candidate) and is_better(searched, candidate):
                chosen[job] = searched
                spare -= searched.device_peak_bytes - candidate.device_peak_bytes
    return {job: candidate.plan for job, candidate in chosen.items()}
