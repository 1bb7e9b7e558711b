"""A budget shared among jobs, so that all together lose the least time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pg_tensile.errors import BudgetError, PlanError
from pg_tensile.planning.plan.memory import floor_bytes
from pg_tensile.planning.policies.joint.planner import OPERATORS, Candidate, JobPlanner, is_better
from pg_tensile.planning.policies.joint.prices import THRIFTY, Prices

# Tuning. How these numbers were found is not recorded. `python -m benchmarks.bench_jobs` measures what they achieve
# (docs/benchmarks.md, jobs at once).
LEVELS = 8  # steps from the largest to the smallest budget that are tried for each of several jobs
WORTH_ANOTHER = 0.02  # fraction of a budget that is worth another attempt if it is left over
SPLITS = 512  # most ways to share a budget that are kept
HOST_PRICES = (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 1000.0)  # of all host memory that is allowed, in relative losses


class Terms(NamedTuple):
    """Conditions for one of several jobs."""

    most_bytes: int | None = None  # that it may take; None means no limit of its own
    least_bytes: int = 0  # that it is given even if its plan takes less: its other graphs need them
    weight: float = 1.0  # of its loss


class UnplannableError(PlanError):
    """Raised if one of several jobs has no plan, for a reason other than memory.

    The others can be planned without it.
    """

    def __init__(self, job: int, message: str) -> None:
        super().__init__(message)
        self.job = job


class _Part:
    """One of several jobs: the candidates that it can have, and what they cost it."""

    def __init__(self, job: int, planner: JobPlanner, terms: Terms) -> None:
        self.job = job
        self.planner = planner
        self.terms = terms
        most = planner.vanilla.device_peak_bytes
        self.top = most if terms.most_bytes is None else min(most, terms.most_bytes)
        self.ladder: list[Candidate] = []
        if self.top < planner.least_bytes:
            raise BudgetError(self.top, planner.least_bytes, planner.largest_operator())

    def bytes(self, candidate: Candidate) -> int:
        return max(candidate.device_peak_bytes, self.terms.least_bytes)

    def loss(self, candidate: Candidate) -> float:
        return self.terms.weight * (candidate.us / self.planner.vanilla.us - 1)

    def level_bytes(self, level: float) -> int:
        """Return a budget: at level 0 the largest that makes a difference, at level `LEVELS` the smallest possible."""
        saved = math.ceil((self.top - self.planner.least_bytes) * (level / LEVELS))
        return max(self.top - saved, self.terms.least_bytes)

    def climb(self, budgets: Iterable[int], passes: int | Prices | None) -> None:
        """Add the best plan for each of these budgets; `passes` as in `JobPlanner.best`. Raises UnplannableError."""
        for budget in budgets:
            try:
                rung = self.planner.best(min(self.top, budget), passes)
            except Exception as error:
                raise UnplannableError(self.job, f"{type(error).__name__}: {error}") from error
            if isinstance(rung, Candidate):
                self.ladder.append(rung)
        if not self.ladder:
            raise UnplannableError(self.job, "every plan has more events than a plan may have")


class _Split(NamedTuple):
    """A plan for each of the jobs so far, with their memory and the sum of their relative losses."""

    bytes: int
    loss: float
    chosen: tuple[Candidate, ...]


def share_out(
    planners: Mapping[int, JobPlanner],
    budget_bytes: int,
    terms: Mapping[int, Terms] | None = None,
    host_limit: int | None = None,
) -> dict[int, Candidate]:
    """Return a plan for each job, together within the budget and with the least sum of relative losses.

    `terms`: conditions by job; a job without an entry has none. Memory left over goes to the jobs that lose the most.
    `host_limit`: bytes of host memory for all of them, kept to if possible; the caller has to check. Raises
    BudgetError, or UnplannableError for a job without a plan for another reason.
    """
    parts = {job: _Part(job, planner, (terms or {}).get(job, Terms())) for job, planner in planners.items()}
    _check_budget(parts, budget_bytes, sum(part.level_bytes(LEVELS) for part in parts.values()))
    small = sum(part.planner.trace.operator_count for part in parts.values()) <= OPERATORS
    levels = _levels(parts, budget_bytes, small)
    tries = 1 if len(parts) > 1 else None
    for part in parts.values():
        budgets = map(part.level_bytes, levels) if len(parts) > 1 else [budget_bytes]
        part.climb(budgets, tries)
    chosen = _use_rest(parts, _cheapest(parts, budget_bytes), budget_bytes, small)
    if host_limit is None or _host_bytes(parts, chosen) <= host_limit:
        return chosen
    for job, part in parts.items():
        part.ladder.append(chosen[job])
        for prices in THRIFTY:
            budgets = [budget_bytes, *map(part.level_bytes, levels)]
            part.climb(budgets, prices)
    for price in HOST_PRICES:
        chosen = _cheapest(parts, budget_bytes, price / max(host_limit, 1))
        if _host_bytes(parts, chosen) <= host_limit:
            break
    return chosen


def _check_budget(parts: Mapping[int, _Part], budget_bytes: int, smallest_bytes: int) -> None:
    if smallest_bytes > budget_bytes:
        hungriest = max((part.planner for part in parts.values()), key=lambda planner: floor_bytes(planner.trace))
        raise BudgetError(budget_bytes, smallest_bytes, hungriest.largest_operator())


def _levels(parts: Mapping[int, _Part], budget_bytes: int, small: bool) -> Iterable[float]:
    """Return the level at which all jobs together fill the budget, and others.

    For large traces the others are 0 and one level on either side.
    """
    low, high = 0.0, float(LEVELS)
    for _ in range(20):
        middle = (low + high) / 2
        fits = sum(part.level_bytes(middle) for part in parts.values()) <= budget_bytes
        low, high = (low, middle) if fits else (middle, high)
    others = range(LEVELS + 1) if small else (0, max(high - 1, 0.0), min(high + 1, float(LEVELS)))
    return sorted({high, *others})


def _cheapest(parts: Mapping[int, _Part], budget_bytes: int, host_price: float = 0.0) -> dict[int, Candidate]:
    """Return one plan for each job, with the least sum of losses and of `host_price` for each byte of host memory."""
    splits = [_Split(0, 0.0, ())]
    for part in parts.values():
        rungs = [
            (part.bytes(rung), part.loss(rung) + (host_price and host_price * part.planner.host_bytes(rung)), rung)
            for rung in part.ladder
        ]
        splits = _pareto(
            _Split(split.bytes + size, split.loss + loss, (*split.chosen, rung))
            for split in splits
            for size, loss, rung in rungs
        )
    _check_budget(parts, budget_bytes, splits[0].bytes)
    fitting = (split for split in splits if split.bytes <= budget_bytes)
    return dict(zip(parts, min(fitting, key=lambda split: split.loss).chosen, strict=True))


def _use_rest(
    parts: Mapping[int, _Part], chosen: dict[int, Candidate], budget_bytes: int, small: bool
) -> dict[int, Candidate]:
    """Return the plans after giving the rest of the budget to the jobs that lose the most."""
    rest = budget_bytes - sum(part.bytes(chosen[job]) for job, part in parts.items())
    for job, part in sorted(parts.items(), key=lambda item: -item[1].loss(chosen[item[0]])):
        if not small and rest < WORTH_ANOTHER * budget_bytes:
            break
        before = chosen[job]
        better = part.planner.best(min(part.bytes(before) + rest, part.top), None if small else 1)
        if isinstance(better, Candidate) and is_better(better, before):
            rest -= part.bytes(better) - part.bytes(before)
            chosen[job] = better
    return chosen


def _host_bytes(parts: Mapping[int, _Part], chosen: Mapping[int, Candidate]) -> int:
    return sum(part.planner.host_bytes(chosen[job]) for job, part in parts.items())


def _pareto(splits: Iterable[_Split]) -> list[_Split]:
    """Return the splits that no other split beats in memory and loss, by ascending memory.

    If there are more than SPLITS, evenly spaced ones are kept.
    """
    best: list[_Split] = []
    for split in sorted(splits, key=lambda split: split[:2]):
        if not best or split.loss < best[-1].loss:
            best.append(split)
    if len(best) <= SPLITS:
        return best
    return [best[round(index * (len(best) - 1) / (SPLITS - 1))] for index in range(SPLITS)]
