"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020) as a policy: a joint search over the operators' order, memory and swaps.

The search itself is in plan_search.py. Here it has a fixed number of generations, so that equal arguments give equal
plans, and starts from the plan of `joint`, which is returned if nothing better is found.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from pg_tensile.planning.building_blocks.shares import check_shares, shares, working_sets
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner, identity
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.swapadvisor.plan_search import search_plan
from pg_tensile.planning.trace.trace import Trace

POPULATION = 16
OPERATORS = 60_000  # total of all individuals after the first ones: some five seconds of one core, including `joint`
MOST_GENERATIONS = 12


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return a plan for each job within its share of the budget (`shares`), with an equal part of the link.

    `budget_bytes`: None means the device's memory. Raises BudgetError with the smallest budget for which every job's
    largest operator fits into its share.
    """
    check_shares(traces, {job: working_sets(trace) for job, trace in traces.items()}, profile, budget_bytes)
    granted = shares(traces, profile, budget_bytes)
    jobs = max(1, len(traces))
    link = profile.with_link(profile.out_bytes_per_s / jobs, profile.in_bytes_per_s / jobs, profile.duplex_factor)
    plans: dict[tuple[Hashable, int], Plan] = {}  # of distinct jobs
    keys = {job: (identity(trace), granted[job]) for job, trace in traces.items()}
    for job, key in keys.items():
        if key not in plans:
            plans[key] = _plan(traces[job], link, granted[job])
    return {job: plans[key] for job, key in keys.items()}


def _plan(trace: Trace, link: DeviceProfile, budget_bytes: int) -> Plan:
    best = JobPlanner(trace, link).best(budget_bytes)
    generations = min(MOST_GENERATIONS, OPERATORS // (POPULATION * trace.operator_count))
    start = best.plan if isinstance(best, Candidate) else None
    return search_plan(
        trace, link, budget_bytes, generations=generations, processes=1, population=POPULATION, start=start
    ).plan
