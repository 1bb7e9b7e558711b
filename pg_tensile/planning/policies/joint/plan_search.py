"""Search for faster plans than the passes of planner.py find, for one job and for several budgets.

The passes make one greedy descent for each of a few prices. Here more are made from the best plan so far, at prices
drawn near those of that plan, or with extra costs for some of its swaps and recomputations, drawn by what they cost; an
outcome that is not slower replaces it. The simulator judges every plan. With equal arguments the outcome is the same.

A plan for less memory is one for more memory as well, and with some tensors kept on the device a faster one. So the
plans for several budgets are searched for from the smallest to the largest, and less memory never takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from random import Random

from pg_tensile.planning.job_planner.candidate import Candidate, Outcome, is_better
from pg_tensile.planning.job_planner.planner import PERFECT, JobPlanner
from pg_tensile.planning.job_planner.prices import PRICES, ExtraCosts, Prices, Way
from pg_tensile.planning.job_planner.sweep import Shortage

TRIES = 80  # passes of a search
STARTS = 2  # plans that a search starts from, half of the tries each
FEWER = 3  # plans for less memory that a search takes into account
STEP = 0.05  # of the budget, between two of them
PENALISED = 0.5  # of the tries have extra costs, the others have other prices
# Standard deviations: of the link price's logarithm, of the weight, of the stretch's logarithm
PRICE_SPREAD, WEIGHT_SPREAD, STRETCH_SPREAD = 0.5, 0.15, 0.2
OTHER_CHAIN = 0.2  # of the tries with other prices have another longest chain, too
MOST_PENALTIES = 10


class PlanSearch:
    """Search for the plans of one job; `found` is called with each plan that is better than those before it."""

    def __init__(
        self,
        planner: JobPlanner,
        tries: int = TRIES,
        seed: int = 0,
        found: Callable[[Candidate], object] | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to make `tries` passes for each budget, until `over` returns True."""
        self.evaluations = 0  # plans that were simulated
        self._planner = planner
        self._tries = tries
        self._seed = seed
        self._found = found or (lambda _: None)
        self._over = over

    def best(self, budget_bytes: int) -> Candidate | Shortage:
        """Return the plan for a budget in bytes, after those for somewhat smaller ones."""
        steps = [int(budget_bytes * (1 - STEP * step)) for step in range(FEWER + 1)]
        return self.ladder(step for step in steps if step >= self._planner.least_bytes or step == budget_bytes)[
            budget_bytes
        ]

    def ladder(self, budgets: Iterable[int]) -> Mapping[int, Candidate | Shortage]:
        """Return the plans for several budgets in bytes, by budget. Of two, the larger never has the slower plan."""
        plans: dict[int, Candidate | Shortage] = {}
        for budget in sorted(set(budgets)):
            fewer = [candidate for candidate in plans.values() if isinstance(candidate, Candidate)]
            plans[budget] = self.within(budget, fewer[-FEWER:])
        return plans

    def within(self, budget_bytes: int, fewer: Iterable[Candidate] = ()) -> Candidate | Shortage:
        """Return the fastest plan found within a budget in bytes; `fewer` are plans for smaller budgets.

        It is not slower than any of them, nor than the planner's own."""
        planner = self._planner
        first = planner.best(budget_bytes)
        candidates = [first] if isinstance(first, Candidate) else []
        for candidate in fewer:
            candidates += [candidate, planner.relaxed(candidate.plan, budget_bytes)]
        candidates = [candidate for candidate in candidates if candidate.device_peak_bytes <= budget_bytes]
        if not candidates:
            return first
        best = min(candidates, key=lambda candidate: (candidate.us, len(candidate.plan)))
        self._found(best)
        if best.us <= PERFECT * planner.vanilla.us:
            return best
        # PyTorch's allocator may take more than the tensors.
        footprint = budget_bytes - max(0, best.device_peak_bytes - best.footprint_bytes)
        random = Random(f"{self._seed}, {budget_bytes}")
        starts = planner.starts(footprint)[:STARTS]
        for start in starts:
            for outcome in self._descents(start, footprint, self._tries // len(starts), random):
                if is_better(outcome.candidate, best) and outcome.candidate.device_peak_bytes <= budget_bytes:
                    best = outcome.candidate
                    self._found(best)
        return best

    def _descents(self, best: Outcome, footprint_bytes: int, tries: int, random: Random) -> Iterable[Outcome]:
        """Yield ever better outcomes."""
        planner = self._planner
        extra = best.extra_costs
        costs: Mapping[Way, float] | None = None
        for _ in range(tries):
            if self._over():
                return
            prices, penalties = best.prices, extra
            if random.random() < PENALISED:
                costs = planner.costs(best.candidate.plan) if costs is None else costs
                penalties = _penalised(extra, costs, random)
            else:
                prices = _near(prices, random)
            self.evaluations += 1
            outcome = planner.descend(footprint_bytes, prices, penalties)
            if outcome is not None and outcome.candidate.us <= best.candidate.us:
                better = is_better(outcome.candidate, best.candidate)
                best, extra, costs = outcome, penalties, None
                if better:
                    yield outcome


def _near(prices: Prices, random: Random) -> Prices:
    link_price = prices.link_price * math.exp(random.gauss(0, PRICE_SPREAD))
    weight = min(1.5, max(0.0, prices.duration_weight + random.gauss(0, WEIGHT_SPREAD)))
    chain = prices.longest_chain
    if random.random() < OTHER_CHAIN:
        chain = random.choice(sorted({each.longest_chain for each in PRICES}))
    stretch = prices.stretch
    if stretch > 1:
        stretch = max(1.0, stretch * math.exp(random.gauss(0, STRETCH_SPREAD)))
    return prices._replace(link_price=link_price, duration_weight=weight, longest_chain=chain, stretch=stretch)


def _penalised(extra: ExtraCosts, costs: Mapping[Way, float], random: Random) -> ExtraCosts:
    """Return the extra costs with more for some ways, drawn by what they cost in the present plan."""
    ways = sorted(way for way, us in costs.items() if us > 0)
    if not ways:
        return extra
    weights = [costs[way] for way in ways]
    drawn = set(random.choices(ways, weights, k=random.randint(1, MOST_PENALTIES)))
    return {**extra, **{way: extra.get(way, 0.0) + costs[way] * random.uniform(0.2, 1.5) for way in drawn}}
