"""Memory and link shared among jobs, so that all together lose the least time.

The link is shared in units, UNITS for each job. A plan that moves nothing needs none of them; a plan that moves much is
worth more of them than one that recomputes. So each job has plans for several sizes of memory and several parts of the
link, and one is chosen for each job, together within both. For jobs of thousands of operators that takes a minute, so a
brief division can be had first: a plan of one pass for each job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pg_tensile.errors import BudgetError
from pg_tensile.planning.job_planner.candidate import EXACT, Candidate, is_better
from pg_tensile.planning.job_planner.planner import OPERATORS, JobPlanner
from pg_tensile.planning.job_planner.prices import THRIFTY
from pg_tensile.planning.plan.memory import floor_bytes
from pg_tensile.planning.policies.joint.contention import with_slack
from pg_tensile.planning.policies.joint.part import (
    LEVELS,
    UNITS,
    Division,
    Part,
    Rung,
    SlowdownError,
    Terms,
)

# Tuning. How these numbers were found is not recorded. The benchmarks' section `jobs` measures what they achieve
# (docs/results/jobs.md).
OTHER_UNITS = (1, 3, 4)  # that a job of small traces may have instead, with half of the levels
WORTH_ANOTHER = 0.02  # fraction of a budget that is worth another attempt if it is left over
SPLITS = 512  # most ways to share a budget that are kept
FEWEST_SPLITS = 32  # of them for each number of units, even if that makes more than SPLITS
SLOWED_DOWN = "no plans slow all jobs down by as little as they were promised"
HOST_PRICES = (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 1000.0)  # of all host memory that is allowed, in relative losses


class _Split(NamedTuple):
    """A plan for each of the jobs so far, with their memory and link and the sum of their relative losses."""

    bytes: int
    units: int
    loss: float
    chosen: tuple[Rung, ...]


def share_out(
    planners: Mapping[int, JobPlanner],
    budget_bytes: int,
    terms: Mapping[int, Terms] | None = None,
    host_limit: int | None = None,
    brief: bool = False,
    over: Callable[[], bool] = lambda: False,
) -> Division:
    """Return a plan for each job, together within the budget and the link and with the least sum of relative losses.

    `planners` have the whole link. `terms`: conditions by job; a job without an entry has none. Memory left over goes
    to the jobs that lose the most. `host_limit`: bytes of host memory for all of them, kept to if possible; the caller
    has to check. `brief`: if host memory suffices for that, each job saves the same part of what it can, by a plan of
    one pass. Raises BudgetError, SlowdownError, or UnplannableError for a job without a plan for another reason;
    AbandonedError once `over` returns True.
    """
    units = UNITS * len(planners)
    parts = {job: Part(job, planner, (terms or {}).get(job, Terms()), units, over) for job, planner in planners.items()}
    _check_budget(parts, budget_bytes, sum(part.level_bytes(LEVELS) for part in parts.values()))
    if brief:
        first = _brief_division(parts, budget_bytes)
        if host_limit is None or _host_bytes(parts, first.chosen.values()) <= host_limit:
            return first
    small = sum(part.planner.trace.operator_count for part in parts.values()) <= OPERATORS
    levels = _levels(parts, budget_bytes, small)
    for part in parts.values():
        if len(parts) == 1:
            part.climb([budget_bytes], None)
        else:
            part.climb(map(part.level_bytes, levels), 1)
    division = _division(parts, budget_bytes, small)
    if small and len(parts) > 1:
        for part in parts.values():
            for other in OTHER_UNITS:
                part.climb(map(part.level_bytes, levels[::2]), 1, other)
        division = min((division, _division(parts, budget_bytes, small)), key=lambda each: _total_loss(parts, each))
    if division is None:
        raise SlowdownError(SLOWED_DOWN)
    if host_limit is not None and _host_bytes(parts, division.chosen.values()) > host_limit:
        division = _thrifty(parts, budget_bytes, levels, host_limit)
    return with_slack(parts, division, budget_bytes, host_limit)


def _thrifty(parts: Mapping[int, Part], budget_bytes: int, levels: Iterable[float], host_limit: int) -> Division:
    """Return a division within the limit of host memory or, failing that, as close to it as there are plans for."""
    for part in parts.values():
        for prices in THRIFTY:
            part.climb([budget_bytes, *map(part.level_bytes, levels)], prices)
    for price in HOST_PRICES:
        rungs = _cheapest(parts, budget_bytes, price / max(host_limit, 1))
        assert rungs is not None  # as without a price
        division = _settled(parts, rungs)
        if _host_bytes(parts, division.chosen.values()) <= host_limit:
            break
    return division


def _brief_division(parts: Mapping[int, Part], budget_bytes: int) -> Division:
    """Return a division by plans of one pass: each job saves the same part of what it can.

    A job which that would slow down by more than it was promised has the memory that its promise takes, and the others
    share the rest. Raises SlowdownError if that does not suffice."""
    held: dict[int, Candidate] = {}  # plans that just keep a promise
    while True:
        rest = budget_bytes - sum(parts[job].bytes(candidate) for job, candidate in held.items())
        others = {job: part for job, part in parts.items() if job not in held}
        if sum(part.level_bytes(LEVELS) for part in others.values()) > rest:
            raise SlowdownError(SLOWED_DOWN)
        level = _common_level(others, rest)
        plans = {job: part.brief_plan(level) for job, part in others.items()}
        broken = [job for job, plan in plans.items() if not parts[job].keeps_promise(plan)]
        if not broken:
            break
        held |= {job: parts[job].brief_saving() for job in broken}
        if any(held[job].device_peak_bytes > parts[job].top for job in broken):
            raise SlowdownError(SLOWED_DOWN)
    rungs = {job: Rung(plan, UNITS if plan.transfers else 0) for job, plan in (plans | held).items()}
    return _settled(parts, {job: rungs[job] for job in parts})


def _division(parts: Mapping[int, Part], budget_bytes: int, small: bool) -> Division | None:
    """Return the best division by the rungs so far; None if none keeps to `Terms.most_slowdown`."""
    rungs = _cheapest(parts, budget_bytes)
    if rungs is None:
        return None
    division = _settled(parts, rungs)
    for _ in parts:  # with the rest of the memory jobs may do without the link, which leaves more of it to others
        division = _use_rest(parts, division, budget_bytes, small)
        used = sum(division.shares[job] for job, candidate in division.chosen.items() if candidate.transfers)
        if used == 0 or used > 1 - EXACT:
            break
        division = _divided(parts, division.chosen, division.shares)
    return division


def _total_loss(parts: Mapping[int, Part], division: Division | None) -> float:
    return sum(parts[job].loss(plan) for job, plan in division.chosen.items()) if division else math.inf


def _check_budget(parts: Mapping[int, Part], budget_bytes: int, smallest_bytes: int) -> None:
    if smallest_bytes > budget_bytes:
        hungriest = max((part.planner for part in parts.values()), key=lambda planner: floor_bytes(planner.trace))
        raise BudgetError(budget_bytes, smallest_bytes, hungriest.largest_operator())


def _common_level(parts: Mapping[int, Part], budget_bytes: int) -> float:
    """Return the level at which all jobs together fill the budget."""
    low, high = 0.0, float(LEVELS)
    for _ in range(20):
        middle = (low + high) / 2
        fits = sum(part.level_bytes(middle) for part in parts.values()) <= budget_bytes
        low, high = (low, middle) if fits else (middle, high)
    return high


def _levels(parts: Mapping[int, Part], budget_bytes: int, small: bool) -> list[float]:
    """Return the level at which all jobs together fill the budget, and others.

    For large traces the others are 0 and one level on either side.
    """
    common = _common_level(parts, budget_bytes)
    others = range(LEVELS + 1) if small else (0, max(common - 1, 0.0), min(common + 1, float(LEVELS)))
    return sorted({common, *others})


def _cheapest(parts: Mapping[int, Part], budget_bytes: int, host_price: float = 0.0) -> dict[int, Rung] | None:
    """Return one plan for each job, with the least sum of losses and of `host_price` for each byte of host memory.

    None if the plans that fit do not keep to `Terms.most_slowdown`. Raises BudgetError."""
    splits = [_Split(0, 0, 0.0, ())]
    for part in parts.values():
        rungs = [(part.bytes(rung.candidate), _loss(part, rung.candidate, host_price), rung) for rung in part.ladder]
        splits = _pareto(
            (
                _Split(split.bytes + size, split.units + rung.units, split.loss + loss, (*split.chosen, rung))
                for split in splits
                for size, loss, rung in rungs
                if split.bytes + size <= budget_bytes and split.units + rung.units <= part.units
            ),
            part.units + 1,
        )
    if not splits:
        if any(part.terms.most_slowdown < math.inf for part in parts.values()):
            return None
        smallest = [min(part.bytes(rung.candidate) for rung in part.ladder) for part in parts.values()]
        _check_budget(parts, budget_bytes, sum(smallest))
    chosen = min(splits, key=lambda split: split.loss).chosen
    return dict(zip(parts, chosen, strict=True))


def _loss(part: Part, candidate: Candidate, host_price: float) -> float:
    return part.loss(candidate) + (host_price and host_price * part.planner.host_bytes(candidate))


def _settled(parts: Mapping[int, Part], rungs: Mapping[int, Rung]) -> Division:
    """Return the plans of the rungs with the whole link divided among those that use it."""
    plans = {job: rung.candidate for job, rung in rungs.items()}
    return _divided(parts, plans, {job: float(rung.units) for job, rung in rungs.items()})


def _divided(parts: Mapping[int, Part], plans: Mapping[int, Candidate], weights: Mapping[int, float]) -> Division:
    """Return plans with the whole link divided by weight among those that use it."""
    used = sum(weights[job] for job, candidate in plans.items() if candidate.transfers)
    shares = {job: weights[job] / used if candidate.transfers else 1.0 for job, candidate in plans.items()}
    planners = {job: part.planner.sharing(shares[job]) for job, part in parts.items()}
    return Division({job: planners[job].candidate(candidate.plan) for job, candidate in plans.items()}, shares)


def _use_rest(parts: Mapping[int, Part], division: Division, budget_bytes: int, small: bool) -> Division:
    """Return the plans after giving the rest of the budget to the jobs that lose the most.

    Where no rest is worth it, a job's plan is made again if its part of the link has grown."""
    chosen, shares = division
    rest = budget_bytes - sum(part.bytes(chosen[job]) for job, part in parts.items())
    for job, part in sorted(parts.items(), key=lambda item: -item[1].loss(chosen[item[0]])):
        before = chosen[job]
        planner = part.planner.sharing(shares[job] if before.transfers else 1 / part.units)
        room = min(part.bytes(before) + rest, part.top)
        if not small and rest < WORTH_ANOTHER * budget_bytes:
            if not before.transfers:
                continue
            room = min(part.bytes(before), part.top)
        better = planner.best(room, None if small else 1)
        free = isinstance(better, Candidate) and (before.transfers or not better.transfers)
        if isinstance(better, Candidate) and free and is_better(better, before):
            rest -= part.bytes(better) - part.bytes(before)
            chosen[job] = better
    return Division(chosen, shares)


def _host_bytes(parts: Mapping[int, Part], chosen: Iterable[Candidate]) -> int:
    return sum(part.planner.host_bytes(candidate) for part, candidate in zip(parts.values(), chosen, strict=True))


def _pareto(splits: Iterable[_Split], units: int) -> list[_Split]:
    """Return the splits that no other split beats in memory, link and loss.

    If there are more than SPLITS, evenly spaced ones are kept for each of the numbers of units below `units`.
    """
    least_loss = [math.inf] * units  # of the splits so far, by most units
    best: list[list[_Split]] = [[] for _ in range(units)]
    for split in sorted(splits, key=lambda split: split[:3]):
        if split.loss < least_loss[split.units]:
            best[split.units].append(split)
            for more in range(split.units, units):
                least_loss[more] = min(least_loss[more], split.loss)
    if sum(map(len, best)) <= SPLITS:
        return [split for some in best for split in some]
    most = max(FEWEST_SPLITS, SPLITS // units)
    return [split for some in best for split in _evenly_spaced(some, most)]


def _evenly_spaced(splits: list[_Split], most: int) -> list[_Split]:
    if len(splits) <= most:
        return splits
    return [splits[round(index * (len(splits) - 1) / (most - 1))] for index in range(most)]
