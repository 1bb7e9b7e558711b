"""The policy to use: swapping, recomputing and waiting chosen together, at the least time that meets the budget.

The paper's algorithm plans swaps without stalls first and recomputes what is then still missing; on a fast device the
link alone does not suffice, and recomputing even a convolution is often cheaper than moving its output. Here every
absence of a tensor takes the cheaper way (sweep.py), for several prices of the link; the simulator says which outcome
is the fastest. Several jobs share the link in equal parts, and the budget so that all together lose the least time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import BudgetError
from pg_tensile.latency import roofline
from pg_tensile.peak import floor_bytes, footprint_of
from pg_tensile.plan import NO_EVENTS, Plan
from pg_tensile.policies.columns import Columns
from pg_tensile.policies.prefetch import schedule
from pg_tensile.policies.relax import least_bytes, relaxed_swap_all
from pg_tensile.policies.sweep import Prices, Shortage, sweep
from pg_tensile.profile import DeviceProfile
from pg_tensile.sequence import AccessSequence
from pg_tensile.simulator import SimulatedJob, simulate
from pg_tensile.trace import Trace

FREE = 1.02  # what memory may cost in time where there is no budget
PERFECT = 1.001  # of the time without a plan: nothing better is looked for
OPERATORS = 15_000  # passes over so many operators are made for one job and budget, but at least three
REPAIRS = 4  # passes with a smaller budget where a plan turned out to take more than the pass had thought
LEVELS = 8  # budgets that are tried for each of several jobs, at most
LEFT = 0.02  # of a budget: so much of it is worth another look
SPLITS = 512  # ways to share a budget that are kept at most
PRICES = tuple(
    Prices(*prices)
    for prices in (
        (0.06, 0.3, 2), (0.06, 0.6, 4), (0.12, 0.6, 2), (0.03, 0.3, 4), (0.12, 0.3, 4), (0.06, 1.0, 24), (0.25, 0.6, 4),
        (0.06, 0.3, 4), (0.03, 0.6, 1), (0.12, 0.3, 2), (0.0, 0.6, 4), (0.12, 0.6, 4), (0.06, 0.6, 1), (0.03, 0.3, 24),
        (0.25, 0.3, 2), (0.0, 0.0, 24), (0.03, 0.6, 4), (0.06, 0.6, 2), (0.12, 0.6, 1), (0.0, 0.3, 24),
    )
)  # fmt: skip


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """The plans with which all jobs lose the least time and fit into the budget together, each with an equal part of
    the link. Without a budget every job gives back the memory that costs it under 2 % of time. Raises BudgetError with
    the least bytes that are possible."""
    distinct = {_key(trace): JobPlanner(trace, profile, 1 / len(traces)) for trace in traces.values()}
    planners = {job: distinct[_key(trace)] for job, trace in traces.items()}
    if budget_bytes is None:
        chosen = {job: planner.for_free() for job, planner in planners.items()}
    elif len(planners) <= 1:
        chosen = {job: planner.within(budget_bytes) for job, planner in planners.items()}
    else:
        chosen = share_out(planners, budget_bytes)
    return {job: candidate.plan for job, candidate in chosen.items()}


def _key(trace: Trace) -> Hashable:
    """Equal for traces whose plans are."""
    return trace.fingerprint, trace.latency_us.tobytes(), trace.workspace_bytes.tobytes()


@dataclass(frozen=True)
class Candidate:
    """A plan for one job, the memory that it takes (workspaces included) and the time of its iterations."""

    plan: Plan
    device_peak_bytes: int
    us: float


class JobPlanner:
    """Plans for one job of which `share` of the link is its own."""

    def __init__(self, trace: Trace, profile: DeviceProfile, share: float = 1.0) -> None:
        self.trace = roofline.timed(trace, profile)
        self.profile = profile
        self.share = share
        self.columns = Columns(self.trace)
        self.link = profile.with_link(
            profile.out_bytes_per_s * share, profile.in_bytes_per_s * share, profile.duplex_factor
        )
        self.tries = min(len(PRICES), max(3, OPERATORS // self.trace.operator_count))

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget that there is a plan for."""
        return least_bytes(self.trace)

    @cached_property
    def vanilla(self) -> Candidate:
        return self._candidate(AccessSequence(self.trace, NO_EVENTS))

    def best(self, budget_bytes: int, tries: int | None = None) -> Candidate | Shortage:
        """The fastest plan within the budget."""
        if self.vanilla.device_peak_bytes <= budget_bytes:
            return self.vanilla
        found: Candidate | None = None
        least = Shortage(0, self.vanilla.device_peak_bytes)
        for prices in PRICES[: tries or self.tries]:
            one = self._try(budget_bytes, prices)
            if isinstance(one, Shortage):
                least = min(least, one, key=lambda shortage: shortage.bytes)
            elif found is None or one.us < found.us:
                found = one
                if one.us <= PERFECT * self.vanilla.us:
                    break
        return found or self._slow(budget_bytes) or least

    def within(self, budget_bytes: int) -> Candidate:
        """The fastest plan within the budget. Raises BudgetError."""
        best = self.best(budget_bytes)
        if isinstance(best, Shortage):
            raise BudgetError(budget_bytes, self.least_bytes, self.largest_operator())
        return best

    def for_free(self) -> Candidate:
        """The least memory at hardly any time."""
        low, best = floor_bytes(self.trace), self.vanilla
        for _ in range(6):
            middle = (low + best.device_peak_bytes) // 2
            one = self.best(middle, max(1, self.tries // 2))
            if isinstance(one, Shortage) or one.us > FREE * self.vanilla.us:
                low = middle
            else:
                best = one
        return best

    def rung(self, level: int) -> Candidate | Shortage:
        """A plan for one of `LEVELS` budgets, each smaller than the one before; the last is the smallest possible."""
        most, least = self.vanilla.device_peak_bytes, self.least_bytes
        return self.best(most - (most - least) * level // LEVELS, 1)

    def largest_operator(self) -> str:
        """The operator with the largest working set."""
        trace = self.trace
        accessed = np.concatenate(([0], np.cumsum(trace.tensor_bytes[trace.access_tensor])))
        return trace.operator_label(int(np.argmax(np.diff(accessed[trace.access_start]) + trace.workspace_bytes)))

    def _try(self, budget_bytes: int, prices: Prices) -> Candidate | Shortage:
        limit = budget_bytes
        for _ in range(REPAIRS):
            outcome = sweep(self.columns, self.link, limit, prices)
            if outcome.shortage is not None:
                return outcome.shortage
            sequence = AccessSequence(self.trace, Plan.build(outcome.events))
            excess = footprint_of(sequence).device_peak_bytes - budget_bytes
            if excess <= 0:
                plan = schedule(sequence, self.link, budget_bytes)
                return self._candidate(AccessSequence(self.trace, plan))
            limit -= excess
        return Shortage(footprint_of(sequence).peak_step, excess)

    def _slow(self, budget_bytes: int) -> Candidate | None:
        """Without recomputation, the least memory that there is a plan for."""
        plan = relaxed_swap_all(self.trace, budget_bytes)
        if plan is None:
            return None
        plan = schedule(AccessSequence(self.trace, plan), self.link, budget_bytes)
        return self._candidate(AccessSequence(self.trace, plan))

    def _candidate(self, sequence: AccessSequence) -> Candidate:
        (timeline,) = simulate([SimulatedJob(self.trace, sequence.plan)], self.link)
        return Candidate(sequence.plan, timeline.device_peak_bytes, timeline.iteration_us)


# ---- several jobs ----


class _Split(NamedTuple):
    """A plan for each of the jobs so far: their memory and what they lose, in parts of their own time."""

    bytes: int
    loss: float
    chosen: tuple[Candidate, ...]


def share_out(planners: Mapping[int, JobPlanner], budget_bytes: int) -> dict[int, Candidate]:
    """A plan for each job; together within the budget and with the least sum of relative losses. What is left over goes
    to those that lose the most. Raises BudgetError."""
    splits = [_Split(0, 0.0, ())]
    ladders = {planner: [planner.vanilla] for planner in planners.values()}
    small = sum(planner.trace.operator_count for planner in ladders) <= OPERATORS
    for level in range(1, LEVELS + 1):
        if not small and sum(ladders[planner][-1].device_peak_bytes for planner in planners.values()) <= budget_bytes:
            break
        for planner, ladder in ladders.items():
            rung = planner.rung(level)
            if isinstance(rung, Candidate):
                ladder.append(rung)
    for planner in planners.values():
        splits = _pareto(
            _Split(
                split.bytes + rung.device_peak_bytes,
                split.loss + rung.us / planner.vanilla.us - 1,
                (*split.chosen, rung),
            )
            for split in splits
            for rung in ladders[planner]
        )
    fitting = [split for split in splits if split.bytes <= budget_bytes]
    if not fitting:
        hungriest = max(planners.values(), key=lambda planner: floor_bytes(planner.trace))
        raise BudgetError(budget_bytes, splits[0].bytes, hungriest.largest_operator())
    split = min(fitting, key=lambda split: split.loss)
    chosen = dict(zip(planners, split.chosen, strict=True))
    left = budget_bytes - split.bytes
    for job in sorted(planners, key=lambda job: planners[job].vanilla.us / chosen[job].us):
        if not small and left < LEFT * budget_bytes:
            break
        better = planners[job].best(chosen[job].device_peak_bytes + left, None if small else 1)
        if isinstance(better, Candidate) and better.us < chosen[job].us:
            left -= better.device_peak_bytes - chosen[job].device_peak_bytes
            chosen[job] = better
    return chosen


def _pareto(splits: Iterable[_Split]) -> list[_Split]:
    """Those to which no other one is better in memory and loss, by ascending memory; at most SPLITS, evenly."""
    best: list[_Split] = []
    for split in sorted(splits, key=lambda split: split[:2]):
        if not best or split.loss < best[-1].loss:
            best.append(split)
    if len(best) <= SPLITS:
        return best
    return [best[round(place * (len(best) - 1) / (SPLITS - 1))] for place in range(SPLITS)]
