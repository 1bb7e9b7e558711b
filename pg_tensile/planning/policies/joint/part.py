"""One of several jobs that share memory and link: its terms, and the plans that it can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from pg_tensile.errors import BudgetError, PlanError
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import AbandonedError, JobPlanner
from pg_tensile.planning.job_planner.prices import PRICES, Prices
from pg_tensile.planning.job_planner.sweep import Shortage

# Tuning. How these numbers were found is not recorded. The benchmarks' section `jobs` measures what they achieve
# (docs/results/jobs.md).
LEVELS = 8  # steps from the largest to the smallest budget that are tried for each of several jobs
UNITS = 2  # of the link for each of several jobs
TOO_MANY_EVENTS = "every plan has more events than a plan may have"


T = TypeVar("T")


class Terms(NamedTuple):
    """Conditions for one of several jobs."""

    most_bytes: int | None = None  # that it may take; None means no limit of its own
    least_bytes: int = 0  # that it is given even if its plan takes less: its other graphs need them
    weight: float = 1.0  # of its loss
    most_slowdown: float = math.inf  # factor on its time without a plan that its plan must not exceed


class Division(NamedTuple):
    """A plan for each job, and the part of the link that it counts on; 1.0 for a plan that moves nothing."""

    chosen: dict[int, Candidate]
    shares: dict[int, float]


class UnplannableError(PlanError):
    """Raised if one of several jobs has no plan, for a reason other than memory.

    The others can be planned without it.
    """

    def __init__(self, job: int, message: str) -> None:
        super().__init__(message)
        self.job = job


class SlowdownError(PlanError):
    """Raised if no plans slow every job down by no more than its `Terms.most_slowdown`."""


class Rung(NamedTuple):
    """A plan that a job can have, and the units of the link that it needs."""

    candidate: Candidate
    units: int


class Part:
    """One of several jobs: the plans that it can have, and what they cost it. The link has `units` in all."""

    def __init__(self, job: int, planner: JobPlanner, terms: Terms, units: int, over: Callable[[], bool]) -> None:
        self._over = over
        self.job = job
        self.planner = planner
        self.terms = terms
        self.units = units
        most = planner.vanilla.device_peak_bytes
        self.top = most if terms.most_bytes is None else min(most, terms.most_bytes)
        self.ladder: list[Rung] = []
        if self.top < planner.least_bytes:
            raise BudgetError(self.top, planner.least_bytes, planner.largest_operator())

    def bytes(self, candidate: Candidate) -> int:
        return max(candidate.device_peak_bytes, self.terms.least_bytes)

    def loss(self, candidate: Candidate) -> float:
        return self.terms.weight * (candidate.us / self.planner.vanilla.us - 1)

    def is_like(self, other: Part) -> bool:
        """Return whether the other job has the same trace and terms, so that the same plans are the best for it."""
        return self.planner is other.planner and self.terms == other.terms

    def level_bytes(self, level: float) -> int:
        """Return a budget: at level 0 the largest that makes a difference, at level `LEVELS` the smallest possible."""
        saved = math.ceil((self.top - self.planner.least_bytes) * (level / LEVELS))
        return max(self.top - saved, self.terms.least_bytes)

    def keeps_promise(self, candidate: Candidate) -> bool:
        return candidate.us <= self.terms.most_slowdown * self.planner.vanilla.us

    def plan(self, share: float, room_bytes: int, passes: int | Prices | None) -> Candidate | Shortage:
        """Return the best plan within so much memory with a part of the link. Raises AbandonedError."""
        return self._best(self.planner.sharing(share), room_bytes, passes)

    def brief_plan(self, level: float) -> Candidate:
        """Return the plan of one pass for the budget of a level, with an equal part of the link.

        Raises UnplannableError and AbandonedError."""
        planner, budget = self.planner.sharing(UNITS / self.units), self.level_bytes(level)
        found = self._guarded(lambda: self._best(planner, budget, PRICES[0]))
        if isinstance(found, Shortage):  # more passes may find a plan
            found = self._guarded(lambda: self._best(planner, budget, None))
        if isinstance(found, Shortage):
            raise UnplannableError(self.job, TOO_MANY_EVENTS)
        return found

    def brief_saving(self) -> Candidate:
        """Return the plan with the least memory, of plans of one pass, that slows the job down as little as promised.

        It has an equal part of the link. Raises UnplannableError and AbandonedError."""
        planner = self.planner.sharing(UNITS / self.units)
        return self._guarded(lambda: planner.saving(self.terms.most_slowdown, PRICES[0]))

    def climb(self, budgets: Iterable[int], passes: int | Prices | None, units: int = UNITS) -> None:
        """Add the best plan for each of these budgets with a part of the link; `passes` as in `JobPlanner.best`.

        With a promise also the plan is added that just keeps it. Raises UnplannableError and AbandonedError."""
        planner = self.planner.sharing(units / self.units)
        found = self._guarded(lambda: [self._best(planner, budget, passes) for budget in budgets])
        rungs = [candidate for candidate in found if isinstance(candidate, Candidate)]
        if self.terms.most_slowdown < math.inf:
            rungs.append(self._guarded(lambda: planner.saving(self.terms.most_slowdown)))
        if not rungs and not self.ladder:
            raise UnplannableError(self.job, TOO_MANY_EVENTS)
        for candidate in rungs:
            if self.keeps_promise(candidate) and candidate.device_peak_bytes <= self.top:
                self.ladder.append(Rung(candidate, units if candidate.transfers else 0))

    def _guarded(self, plan: Callable[[], T]) -> T:
        try:
            return plan()
        except AbandonedError:
            raise
        except Exception as error:
            raise UnplannableError(self.job, f"{type(error).__name__}: {error}") from error

    def _best(self, planner: JobPlanner, budget: int, passes: int | Prices | None) -> Candidate | Shortage:
        if self._over():
            raise AbandonedError("the plans are not wanted any more")
        return planner.best(min(self.top, budget), passes)
