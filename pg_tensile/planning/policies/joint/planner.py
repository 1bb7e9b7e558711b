"""The default policy: swapping, recomputing and waiting chosen together, for the least time that meets the budget.

The paper's algorithm plans swaps without stalls first and recomputes only what is still missing. On a fast device the
link alone does not suffice, and recomputing even a convolution is often cheaper than moving its output. Here every
tensor that leaves the device does so by the cheaper way (sweep.py), for several prices of the link, and the simulator
picks the fastest outcome. Tensors for which there is room stay after all (keep.py), and more passes are made in which
the most expensive decisions cost extra. Several jobs share the link equally, and the budget so that all together lose
the least time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from pg_tensile.errors import BudgetError, PlanError
from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.codecs import reserved_bytes, with_codecs
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.following import host_bytes
from pg_tensile.planning.plan.memory import floor_bytes, footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind, Plan
from pg_tensile.planning.policies.building_blocks.keep import (
    least_bytes,
    relaxed,
    relaxed_swap_all,
    without_superfluous,
)
from pg_tensile.planning.policies.building_blocks.transfer_times import schedule
from pg_tensile.planning.policies.joint.sweep import Dearer, Prices, Shortage, sweep
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Trace

FREE = 1.02  # factor on the time without a plan: what saving memory may cost where there is no budget
PERFECT = 1.001  # factor on the time without a plan: a plan this fast ends the search
OPERATORS = 19_000  # operators visited by all passes for one job and budget; at least three passes are made
PROMISING = 1.02  # factor on the best time so far up to which a plan is worth relaxing
SLOW = 1.3  # factor on the time without a plan: beyond it, a plan of swaps alone may be faster
REFINEMENTS = 40  # most passes that refine the best plan so far
REPAIRS = 4  # most attempts of a pass, each with a smaller budget while its plan takes more than estimated
LEVELS = 8  # steps from the largest to the smallest budget that are tried for each of several jobs
LEFT = 0.02  # fraction of a budget that is worth another attempt if it is left over
SPLITS = 512  # most ways to share a budget that are kept
REMEMBERED = 64  # entries in each cache of one job's planner
HOST_PRICES = (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 1000.0)  # of all host memory that is allowed, in relative losses
THRIFTY = tuple(Prices(link_price, 0.3, 24) for link_price in (1.0, 30.0, 1000.0))  # prefer recomputing to swapping
EXACT = 1e-9  # relative; times that differ by less count as equal
PRICES = tuple(
    Prices(*prices)
    for prices in (
        (0.06, 0.3, 2), (0.01, 0.3, 2), (0.09, 0.3, 2), (0.06, 0.6, 24), (0.25, 0.6, 1), (0.06, 0.3, 4),
        (0.005, 0.3, 1), (0.25, 0.3, 1), (0.01, 1.0, 1), (0.12, 1.0, 2), (0.25, 0.3, 2), (0.12, 0.6, 4), (0.02, 1.0, 1),
        (0.06, 0.3, 1), (0.09, 1.0, 1), (0.005, 0.6, 2), (0.03, 0.3, 2), (0.25, 1.0, 2), (0.045, 0.6, 2),
        (0.005, 1.0, 2),
    )
)  # fmt: skip


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return the plans with which all jobs together lose the least time and fit the budget.

    Every job has an equal part of the link. `budget_bytes`: None means that every job gives up the memory that costs it
    under 2 % of its time. Raises BudgetError with the smallest budget that is possible.
    """
    distinct = {identity(trace): JobPlanner(trace, profile, 1 / len(traces)) for trace in traces.values()}
    planners = {job: distinct[identity(trace)] for job, trace in traces.items()}
    if budget_bytes is None:
        chosen = {job: planner.for_free() for job, planner in planners.items()}
    else:
        chosen = share_out(planners, budget_bytes)
    return {job: candidate.plan for job, candidate in chosen.items()}


def identity(trace: Trace) -> Hashable:
    """Return a key of a trace; traces with equal keys have equal plans."""
    coding = None if trace.coding is None else tuple(column.tobytes() for column in trace.coding)
    return trace.fingerprint, trace.latency_us.tobytes(), trace.workspace_bytes.tobytes(), coding


@dataclass(frozen=True)
class Candidate:
    """A plan for one job, the memory that it takes (workspaces included), and its iterations.

    `us` is the time of one iteration, of which the job waits `stall_us`; `out_bytes` and `in_bytes` pass the link, and
    `recomputes` operators are executed again.
    """

    plan: Plan
    device_peak_bytes: int
    us: float
    stall_us: float
    out_bytes: int
    in_bytes: int
    recomputes: int


class _Found(NamedTuple):
    """A candidate, and the pass that it comes from: its prices, and its events without the times of transfers."""

    candidate: Candidate
    prices: Prices
    sequence: AccessSequence


def _rank(found: _Found) -> tuple[float, int]:
    """Return a sort key: the faster candidate first, of equally fast ones the one with fewer events."""
    return found.candidate.us, len(found.candidate.plan)


T = TypeVar("T")


class JobPlanner:
    """Planner for one job that owns `share` of the link, with at most `most_events` events per plan.

    Results are cached.
    """

    def __init__(
        self, trace: Trace, profile: DeviceProfile, share: float = 1.0, most_events: int | None = None
    ) -> None:
        self.trace = roofline.timed(trace, profile)
        self.profile = profile
        passes = max(3, OPERATORS // self.trace.operator_count)
        self.tries = min(len(PRICES), max(3, (passes + 1) // 2))
        self.refinements = min(REFINEMENTS, passes - self.tries)
        self._most_events = most_events
        self._host_bytes: dict[Plan, int] = {}
        self._take_share(share)

    def _take_share(self, share: float) -> None:
        self.share = share
        self.link = self.profile.with_share(share)
        self._remembered: dict[Hashable, Candidate | Shortage] = {}
        self._candidates: dict[Plan, Candidate] = {}

    def sharing(self, share: float) -> JobPlanner:
        """Return a planner for the same job with another part of the link."""
        other = copy(self)
        other._take_share(share)
        return other

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.trace)

    @cached_property
    def least_bytes(self) -> int:
        """Smallest budget in bytes for which there is a plan."""
        return least_bytes(self.trace)

    @cached_property
    def vanilla(self) -> Candidate:
        return self.candidate(NO_EVENTS)

    def candidate(self, plan: Plan) -> Candidate:
        """Return the plan with its simulated cost. Raises InvalidPlanError."""
        return _remember(self._candidates, plan, lambda: self._simulated(plan))

    def _simulated(self, plan: Plan) -> Candidate:
        (timeline,) = simulate([SimulatedJob(self.trace, plan)], self.link)
        return Candidate(
            plan,
            timeline.device_peak_bytes,
            timeline.iteration_us,
            timeline.stall_us,
            timeline.bytes_out,
            timeline.bytes_in,
            timeline.recomputes,
        )

    def host_bytes(self, candidate: Candidate) -> int:
        """Return the host memory in bytes that a plan takes."""
        graphs = [(self.trace, candidate.plan)] if len(candidate.plan) else []
        return _remember(self._host_bytes, candidate.plan, lambda: host_bytes(graphs))

    def best(self, budget_bytes: int, passes: int | Prices | None = None) -> Candidate | Shortage:
        """Return the fastest plan within the budget, or the smallest shortage if no pass finds a plan.

        `passes`: how many to make, or the prices of a single one; None means as many as OPERATORS allows, with
        refinements.
        """
        return _remember(self._remembered, (budget_bytes, passes), lambda: self._best(budget_bytes, passes))

    def _best(self, budget_bytes: int, passes: int | Prices | None) -> Candidate | Shortage:
        if self.vanilla.device_peak_bytes <= budget_bytes:
            return self.vanilla
        budget_bytes -= reserved_bytes(self.trace)
        found: list[_Found] = []
        least = Shortage(0, self.vanilla.device_peak_bytes)
        for prices in (passes,) if isinstance(passes, Prices) else PRICES[: passes or self.tries]:
            sequence = self._try(budget_bytes, prices)
            if isinstance(sequence, Shortage):
                least = min(least, sequence, key=lambda shortage: shortage.bytes)
            elif candidate := self._timed(sequence, budget_bytes):
                found.append(_Found(candidate, prices, sequence))
                if candidate.us <= PERFECT * self.vanilla.us:
                    return candidate
        found.sort(key=_rank)
        found += [self._relaxed(each, budget_bytes) for each in found[: max(1, len(found) // 2)]]
        best = min(found, key=_rank, default=None)
        if best is None:
            return self._slow(budget_bytes) or least
        if passes is None and self.refinements:
            best = self._refined(best, budget_bytes)
        slow = best.candidate.us > SLOW * self.vanilla.us and not isinstance(passes, Prices)
        other = self._slow(budget_bytes) if slow else None
        return other if other and other.us < best.candidate.us else best.candidate

    def _refined(self, best: _Found, budget_bytes: int) -> _Found:
        """Return the best outcome of more passes at the prices of `best`.

        In each, one way to take a tensor off the device costs extra: the one that costs the most in the best plan so
        far. In one more pass, parameters are swapped out ahead.
        """
        dearer: dict[tuple[int, bool], float] = {}
        costs = self._costs(best.candidate.plan)
        for _ in range(self.refinements):
            if not costs:
                break
            way = max(costs, key=lambda way: costs[way])
            tried = {**dearer, way: dearer.get(way, 0.0) + costs.pop(way)}
            if one := self._again(best, budget_bytes, best.prices, tried):
                best, dearer, costs = one, tried, self._costs(one.candidate.plan)
        return self._again(best, budget_bytes, best.prices._replace(ahead=True), dearer) or best

    def _again(self, best: _Found, budget_bytes: int, prices: Prices, dearer: Dearer) -> _Found | None:
        """Return the outcome of another pass if it is better than the best so far, else None."""
        sequence = self._try(budget_bytes, prices, dearer)
        if isinstance(sequence, Shortage) or not (candidate := self._timed(sequence, budget_bytes)):
            return None
        one = _Found(candidate, prices, sequence)
        if candidate.us < PROMISING * best.candidate.us:
            one = self._relaxed(one, budget_bytes)
        return one if _is_better(one.candidate, best.candidate) else None

    def _costs(self, plan: Plan) -> dict[tuple[int, bool], float]:
        """Return the µs that each tensor's swaps (key: tensor, True) and recomputations (tensor, False) cost."""
        costs: defaultdict[tuple[int, bool], float] = defaultdict(float)
        (timeline,) = simulate([SimulatedJob(self.trace, plan)], self.link)
        for stall in timeline.stalls:
            costs[stall.tensor, True] += stall.us
        for event in plan.events:
            if event.kind is EventKind.RECOMPUTE:
                costs[event.tensor, False] += self.columns.recomputations.us(event.tensor, event.version)
        return costs

    def within(self, budget_bytes: int) -> Candidate:
        """Return the fastest plan within the budget. Raises BudgetError."""
        best = self.best(budget_bytes)
        if isinstance(best, Shortage):
            raise BudgetError(budget_bytes, self.least_bytes, self.largest_operator())
        return best

    def for_free(self) -> Candidate:
        """Return a plan that saves memory and costs hardly any time: at most the factor FREE, by bisection."""
        low, best = floor_bytes(self.trace), self.vanilla
        for _ in range(6):
            middle = (low + best.device_peak_bytes) // 2
            one = self.best(middle, max(1, self.tries // 2))
            if isinstance(one, Shortage) or one.us > FREE * self.vanilla.us:
                low = middle
            else:
                best = one
        return best

    def largest_operator(self) -> str:
        """Return the label of the operator with the largest working set."""
        return self.trace.operator_label(self.trace.largest_operator)

    def _try(self, budget_bytes: int, prices: Prices, dearer: Dearer | None = None) -> AccessSequence | Shortage:
        """Return the outcome of one pass, run again with a smaller limit while its plan exceeds the budget."""
        limit = budget_bytes
        for _ in range(REPAIRS):
            outcome = sweep(self.columns, self.link, limit, prices, dearer)
            if outcome.shortage is not None:
                return outcome.shortage
            sequence = AccessSequence(self.trace, Plan.build(outcome.events))
            excess = footprint_of(sequence).device_peak_bytes - budget_bytes
            if excess <= 0:
                return sequence
            limit -= excess
        return Shortage(footprint_of(sequence).peak_step, excess)

    def _relaxed(self, found: _Found, budget_bytes: int) -> _Found:
        """Return the plan with tensors kept on the device where there is room, if that is better, else `found`."""
        sequence, rows = found.sequence, found.sequence.plan.rows
        cost_us = np.full(len(rows), self.link.launch_us)
        out_us, in_us = (swap_us(self.trace, direction, self.link) for direction in Direction)
        for event, tensor, _ in zip(*(column.tolist() for column in sequence.copies), strict=True):
            us = (out_us if rows["kind"][event] == EventKind.SWAP_OUT else in_us)[tensor]
            cost_us[event] += found.prices.link_price * us
        for event in np.flatnonzero(rows["kind"] == EventKind.RECOMPUTE).tolist():
            cost_us[event] += self.columns.recomputations.us(int(rows["tensor"][event]), int(rows["version"][event]))
        plan = without_superfluous(relaxed(sequence, budget_bytes, cost_us), self.columns)
        sequence = AccessSequence(self.trace, plan)
        candidate = self._timed(sequence, budget_bytes)
        return min(found, _Found(candidate, found.prices, sequence), key=_rank) if candidate else found

    def _slow(self, budget_bytes: int) -> Candidate | None:
        """Return the plan of swaps alone, which takes the least memory of all known plans; None if it does not fit."""
        plan = relaxed_swap_all(self.trace, budget_bytes)
        return None if plan is None else self._timed(AccessSequence(self.trace, plan), budget_bytes)

    def _timed(self, sequence: AccessSequence, budget_bytes: int) -> Candidate | None:
        """Return the plan with its transfers scheduled and coded; None if it has too many events."""
        if self._most_events is not None and len(sequence.plan) > self._most_events:
            return None
        return self.candidate(with_codecs(self.trace, schedule(sequence, self.link, budget_bytes)))


K = TypeVar("K", bound=Hashable)


def _remember(memory: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """Return the cached value, computing it on a miss."""
    if key not in memory:
        if len(memory) >= REMEMBERED:
            memory.clear()
        memory[key] = make()
    return memory[key]


# ---- several jobs ----


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
    left = budget_bytes - sum(part.bytes(chosen[job]) for job, part in parts.items())
    for job, part in sorted(parts.items(), key=lambda item: -item[1].loss(chosen[item[0]])):
        if not small and left < LEFT * budget_bytes:
            break
        before = chosen[job]
        better = part.planner.best(min(part.bytes(before) + left, part.top), None if small else 1)
        if isinstance(better, Candidate) and _is_better(better, before):
            left -= part.bytes(better) - part.bytes(before)
            chosen[job] = better
    return chosen


def _is_better(one: Candidate, other: Candidate) -> bool:
    """Return whether `one` takes less time, or has fewer events in the same time."""
    return one.us < other.us * (1 - EXACT) or (one.us <= other.us * (1 + EXACT) and len(one.plan) < len(other.plan))


def _host_bytes(parts: Mapping[int, _Part], chosen: Mapping[int, Candidate]) -> int:
    return sum(part.planner.host_bytes(chosen[job]) for job, part in parts.items())


def _pareto(splits: Iterable[_Split]) -> list[_Split]:
    """Return the splits that no other one beats in memory and loss, by ascending memory.

    If there are more than SPLITS, evenly spaced ones are kept.
    """
    best: list[_Split] = []
    for split in sorted(splits, key=lambda split: split[:2]):
        if not best or split.loss < best[-1].loss:
            best.append(split)
    if len(best) <= SPLITS:
        return best
    return [best[round(place * (len(best) - 1) / (SPLITS - 1))] for place in range(SPLITS)]
