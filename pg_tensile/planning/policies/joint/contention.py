"""Plans of several jobs beside each other: how long they take on one link, and plans that leave slack on it.

A plan is made for a part of the link, as if the job had that part at any time. An accelerator's copy engines serve all
jobs in turn, so other jobs' transfers come first now and then. Plans that fill their parts then wait, and so do those
behind them. Plans made for less of the link move less, recompute more, and may lose less where all jobs are at work.
The simulator with all jobs on the link decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.policies.joint.part import Division, Part
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate

STAGGERS = (0.3, 1.0)  # of an equal part of a step: how far apart the jobs start; the mean of both counts
WORTH = 0.005  # of a job's time, on average: what a change of the division has to gain
SLACKS = (0.65, 0.5)  # parts of its part of the link that a job's plan may count on
PASSES = 3  # for such a plan: more gain little where other jobs use the link


def times_us(planners: Mapping[int, JobPlanner], chosen: Mapping[int, Candidate]) -> dict[int, float]:
    """Return the µs of each job's iteration with all jobs on the link; `planners` know the whole of it.

    Jobs that move nothing are not slowed down. On the host, which gives each job its part of the link whatever the
    others do, and for one job, times are those of the candidates.
    """
    us = {job: candidate.us for job, candidate in chosen.items()}
    users = [job for job, candidate in chosen.items() if candidate.transfers]
    if len(users) < 2 or planners[users[0]].profile.kind == "host":
        return us
    profile = planners[users[0]].profile
    gap_us = mean(planners[job].vanilla.us for job in users) / len(users)
    means = dict.fromkeys(users, 0.0)
    for stagger in STAGGERS:
        jobs = [
            SimulatedJob(planners[job].trace, chosen[job].plan, number * stagger * gap_us)
            for number, job in enumerate(users)
        ]
        for job, timeline in zip(users, simulate(jobs, profile), strict=True):
            means[job] += timeline.iteration_us / len(STAGGERS)
    return us | means


def with_slack(parts: Mapping[int, Part], division: Division, budget_bytes: int, host_limit: int | None) -> Division:
    """Return the division, or one in which plans count on less of the link, if that loses less beside each other.

    The parts of the link are then those that the plans count on, together less than the whole. Memory stays within the
    budget, and host memory within its limit. Where the jobs hardly wait for each other, the division stays. Raises
    AbandonedError.
    """
    users = [job for job, candidate in division.chosen.items() if candidate.transfers]
    worth = WORTH * sum(part.terms.weight for part in parts.values())
    alone = sum(part.loss(division.chosen[job]) for job, part in parts.items())
    if len(users) < 2 or (least := _loss(parts, division)) <= alone + worth:
        return division
    best, others = division, []
    for slack in SLACKS:
        other = _replanned(parts, division, users, slack)
        others.append(other)
        if _fits(parts, other, budget_bytes, host_limit) and (loss := _loss(parts, other)) <= least - worth:
            best, least = other, loss
    for job in users:
        for other in (division, *others):
            if other.chosen[job] != best.chosen[job]:
                chosen = {**best.chosen, job: other.chosen[job]}
                mixed = Division(chosen, {**best.shares, job: other.shares[job]})
                if _fits(parts, mixed, budget_bytes, host_limit) and (loss := _loss(parts, mixed)) <= least - worth:
                    best, least = mixed, loss
    return best


def _loss(parts: Mapping[int, Part], division: Division) -> float:
    """Return the weighted sum of the relative losses of all jobs beside each other."""
    us = times_us({job: part.planner for job, part in parts.items()}, division.chosen)
    return sum(part.terms.weight * (us[job] / part.planner.vanilla.us - 1) for job, part in parts.items())


def _fits(parts: Mapping[int, Part], division: Division, budget_bytes: int, host_limit: int | None) -> bool:
    """Return whether the plans fit and slow no job down by more than they may, with the link that they count on."""
    plans = [(part, division.chosen[job]) for job, part in parts.items()]
    return (
        sum(part.bytes(plan) for part, plan in plans) <= budget_bytes
        and (host_limit is None or sum(part.planner.host_bytes(plan) for part, plan in plans) <= host_limit)
        and all(plan.us <= part.terms.most_slowdown * part.planner.vanilla.us for part, plan in plans)
    )


def _replanned(parts: Mapping[int, Part], division: Division, users: Sequence[int], slack: float) -> Division:
    """Return the division with plans that count on `slack` × their parts of the link, where there are any.

    Equal jobs have equal memory and equal parts of the link, so that one plan is made for all of them."""
    chosen, shares = dict(division.chosen), dict(division.shares)
    for job in users:
        part = parts[job]
        alike = [other for other in users if parts[other].is_like(part)]
        share = slack * sum(division.shares[other] for other in alike) / len(alike)
        room = sum(parts[other].bytes(division.chosen[other]) for other in alike) // len(alike)
        candidate = part.plan(share, room, PASSES)
        if isinstance(candidate, Candidate):
            chosen[job], shares[job] = candidate, share if candidate.transfers else 1.0
    return Division(chosen, shares)
