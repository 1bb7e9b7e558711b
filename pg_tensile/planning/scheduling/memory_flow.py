"""Memory that flows between the jobs of a device: whether it does, and under which plans (docs/memory-flow.md).

A job whose memory flows has no constant grant: it takes memory before each of its groups (memory_flow/groups.py) and
gives it back after that. The plans of such jobs may together take more than there is. The larger they are, the less
they swap and recompute, and the more the jobs wait for each other. So plans of several sizes are tried, and what jobs
then lose is simulated. Memory flows only if that is clearly better than constant grants, or if those are impossible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import AbandonedError
from pg_tensile.planning.memory_flow.groups import MOST_GROUPS
from pg_tensile.planning.memory_flow.simulation import REQUEST_US
from pg_tensile.planning.scheduling.decisions import JobState
from pg_tensile.planning.scheduling.keeping import GAIN
from pg_tensile.planning.scheduling.round_state import Plans, RoundState

PARTS = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # of the memory that flows: the most that the plan of a job takes
FEW_PARTS = (1.0, 0.7, 0.5)  # if planning is to be brief
COUNTS = (16, 8, 4)  # groups on the way to the largest footprint
REQUESTING = 0.1  # part of a job's time that such requests may take, at most, if they are more than a few


class _Terms(NamedTuple):
    """Conditions of a flow: the jobs, their most and least bytes and their part of the link, and the others' plans."""

    most: Mapping[int, int]
    least: Mapping[int, int]
    share: float
    others: Plans
    flow_bytes: int


def flow_jobs(state: RoundState, admitted: Sequence[JobState]) -> list[JobState]:
    """Return the admitted jobs whose memory can flow; none if it is only one."""
    jobs = [job for job in admitted if state.can_flow(job)]
    return jobs if len(jobs) > 1 else []


def flow_bytes(state: RoundState, jobs: Sequence[JobState], others: Sequence[JobState]) -> int:
    """Return the memory that is to flow between jobs if constant grants for all are impossible.

    Others beside them have the rest. Of what either could use beyond their least, both have the same part."""
    least = {job.job: state.needs(job.job) for job in jobs}
    vanilla = {job.job: max(least[job.job], state.planner(job.job).vanilla.device_peak_bytes) for job in jobs}
    low, high = state.flow_need_bytes(least), state.flow_need_bytes(vanilla)
    low_others = sum(state.needs(job.job) for job in others)
    traced = [job for job in others if job.trace is not None]
    more_others = sum(max(0, state.planner(job.job).vanilla.device_peak_bytes - state.needs(job.job)) for job in traced)
    room = state.budget_bytes() - low - low_others
    part = min(1.0, max(0.0, room / max(1, high - low + more_others)))
    return low + int(part * (high - low))


def flow_plans(
    state: RoundState,
    jobs: Sequence[JobState],
    others: Plans,
    eager_bytes: int,
    constant: Plans | None,
    brief: bool = False,
) -> Plans | None:
    """Return plans under which the memory of `jobs` flows, if they are better than constant grants, else None.

    `others`: the plans of jobs beside them with constant grants; `eager_bytes` are those of jobs without a trace.
    `constant`: plans with constant grants for all, None if there are none. `brief`: few plans of one pass are tried.
    Raises AbandonedError if the plans are not wanted any more and there are none yet.
    """
    enough = math.inf if constant is None else (1 - GAIN) * state.loss(constant)
    vanilla = {job: state.planner(job).vanilla for job in [*(job.job for job in jobs), *others.chosen]}
    if enough <= state.loss(Plans(vanilla, dict.fromkeys(vanilla, 1.0))):
        return None  # there is nothing to gain from more memory
    terms = _terms(state, jobs, others, eager_bytes)
    if terms is None:
        return None
    best: Plans | None = None
    least, size = enough, 0
    for attempted, plans in _attempts(state, terms, brief):
        if state.over():
            if best is None and constant is None:
                raise AbandonedError("the plans are not wanted any more")
            return best
        if plans is not None and (loss := _loss(state, plans)) < least:
            best, least, size = plans, loss, attempted
    if best is None:
        return None
    refined = None if brief else _chosen(state, terms, size, None)
    for chosen in (refined, {job: best.chosen[job] for job in best.groups}):
        for count in COUNTS:
            plans = None if chosen is None or state.over() else _plans(state, terms, chosen, count)
            if plans is not None and (loss := _loss(state, plans)) < least:
                best, least = plans, loss
    return best


def _terms(state: RoundState, jobs: Sequence[JobState], others: Plans, eager_bytes: int) -> _Terms | None:
    """Return the conditions of a flow of `jobs`; None if they do not all fit beside what the others keep."""
    rests = {job.job: state.resting_bytes(job.job) for job in jobs}
    users = [job for job, candidate in others.chosen.items() if candidate.transfers]
    share = 1 / (len(jobs) + len(users))
    others = _with_less_link(state, others, len(users) * share)
    taken = eager_bytes + sum(state.size(state.jobs[job], others) for job in others.chosen)
    flow_bytes = state.budget_bytes() - taken
    room = flow_bytes - sum(rests.values())
    most = {job.job: min(job.limit_bytes, room + rests[job.job]) for job in jobs}
    least = {job.job: state.needs(job.job) for job in jobs}
    if any(most[job] < least[job] for job in most):
        return None
    return _Terms(most, least, share, others, flow_bytes)


def _with_less_link(state: RoundState, plans: Plans, most: float) -> Plans:
    """Return the plans with at most this part of the link for all of them together."""
    users = [job for job, candidate in plans.chosen.items() if candidate.transfers]
    used = sum(plans.shares[job] for job in users)
    if used <= most:
        return plans
    shares = plans.shares | {job: plans.shares[job] * most / used for job in users}
    return Plans({job: state.planner(job, shares[job]).candidate(plans.chosen[job].plan) for job in shares}, shares)


def _attempts(state: RoundState, terms: _Terms, brief: bool) -> Iterator[tuple[int, Plans | None]]:
    """Yield sizes, the largest first, and plans that take no more each, until they fit beside each other."""
    last: dict[int, Candidate] | None = None
    for part in FEW_PARTS if brief else PARTS:
        size = int(part * terms.flow_bytes)
        chosen = _chosen(state, terms, size, 1)
        if chosen is None or chosen == last:
            yield size, None
            continue
        if sum(state.size(state.jobs[job], Plans(chosen, {})) for job in chosen) <= terms.flow_bytes:
            return
        last = chosen
        yield size, _plans(state, terms, chosen, COUNTS[0])


def _chosen(state: RoundState, terms: _Terms, size: int, passes: int | None) -> dict[int, Candidate] | None:
    """Return a plan for each job that takes at most `size` bytes, if it can be so small; None if one has no plan."""
    chosen = {}
    for job, most in terms.most.items():
        budget = min(most, max(terms.least[job], size))
        if state.over():
            return None
        try:
            candidate = state.planner(job, terms.share).best(budget, passes)
        except AbandonedError:
            return None
        if not isinstance(candidate, Candidate):
            return None
        chosen[job] = candidate
    return chosen


def _plans(state: RoundState, terms: _Terms, chosen: Mapping[int, Candidate], count: int) -> Plans | None:
    """Return these plans cut into groups, with the link divided among those that use it; None if they cannot be."""
    users = [job for job, candidate in chosen.items() if candidate.transfers]
    share = terms.share * len(chosen) / max(1, len(users))
    shares = {job: share if job in users else 1.0 for job in chosen}
    planners = {job: state.planner(job, shares[job]) for job in chosen}
    candidates = {job: planners[job].candidate(candidate.plan) for job, candidate in chosen.items()}
    groups = {}
    for job, candidate in candidates.items():
        few = max(1, min(count, int(REQUESTING * candidate.us / (2 * REQUEST_US))))
        groups[job] = state.caches.groups(planners[job], candidate.plan, few)
        rows, most = len(candidate.plan) + len(groups[job]), state.device.most_events
        if len(groups[job]) > MOST_GROUPS or (most is not None and rows > most):
            return None
    plans = Plans(terms.others.chosen | candidates, terms.others.shares | shares, groups, terms.flow_bytes)
    return plans if state.can_run(plans) else None


def _loss(state: RoundState, plans: Plans) -> float:
    """Return the loss of plans, infinite if they slow a job down by more than it was promised."""
    slowest = {job: state.most_slowdown(job) * state.planner(job).vanilla.us for job in plans.chosen}
    kept = all(us <= slowest[job] for job, us in state.planned_us(plans).items())
    return state.loss(plans) if kept else math.inf
