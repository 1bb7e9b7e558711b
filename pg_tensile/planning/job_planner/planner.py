"""Plans for one job: swapping, recomputing and waiting chosen together, for the least time that meets the budget.

The paper's algorithm plans swaps without stalls first and recomputes only what is still missing. On a fast device the
link alone does not suffice, and recomputing even a convolution is often cheaper than moving its output. Here every
tensor that leaves the device does so by the cheaper way (sweep.py), for several prices of the link, and the simulator
picks the fastest outcome. Tensors for which there is room stay after all (keep.py), and more passes are made in which
the most expensive decisions cost extra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from pg_tensile.errors import BudgetError, PlanError
from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.keep import (
    least_bytes,
    relaxed,
    relaxed_swap_all,
    without_superfluous,
)
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.job_planner.candidate import Candidate, Outcome, is_better, rank
from pg_tensile.planning.job_planner.prices import CONGESTED, PRICES, ExtraCosts, Prices, Way
from pg_tensile.planning.job_planner.sweep import Shortage, sweep
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import fits
from pg_tensile.planning.plan.codecs import reserved_bytes, with_codecs
from pg_tensile.planning.plan.following import host_bytes
from pg_tensile.planning.plan.memory import floor_bytes, footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind, Plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Int64s, Trace

# Tuning. The benchmarks' section `prices` measures what changes with OPERATORS to REPAIRS, `tensile` how long planning
# takes.
FREE = 1.02  # factor on the time without a plan: what saving memory may cost where there is no budget
PERFECT = 1.001  # factor on the time without a plan: a plan this fast ends the search
OPERATORS = 19_000  # operators visited by all passes for one job and budget; at least three passes are made
SLOW = 1.3  # factor on the time without a plan: beyond it, a plan of swaps alone may be faster
STRETCHED = 1.1  # factor on the time without a plan: beyond it, passes count on the time in which the job waits
STRETCHES = (0.25, 0.5, 0.75)  # powers of the slowdown so far, by which the link has more time
STRETCHED_PASSES = 2  # prices that are tried with each of them, besides CONGESTED
FEW_STRETCHED = 4  # such passes beyond SLOW where the usual ones are few
REFINEMENTS = 20  # most passes that refine the best plan so far
REPAIRS = 4  # most attempts of a pass, each with a smaller budget while its plan takes more than estimated
RESERVED = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)  # parts of the free memory left to the allocator
CLOSE = 1.1  # factor on the time of the plan that is too large for the allocator: a plan this fast ends the search
REMEMBERED = 64  # entries in each cache of one job's planner
SEQUENCES = 16  # plans whose meaning is kept: passes at several prices often make the same one
LATEST = 2  # budgets whose passes are kept for a search, which begins with their outcomes


def identity(trace: Trace) -> Hashable:
    """Return a key of a trace; traces with equal keys have equal plans."""
    coding = None if trace.coding is None else tuple(column.tobytes() for column in trace.coding)
    return trace.fingerprint, trace.latency_us.tobytes(), trace.workspace_bytes.tobytes(), coding, trace.allocator


class AbandonedError(PlanError):
    """Raised if the caller wants no plans any more."""


class JobPlanner:
    """Planner for one job that owns `share` of the link, with at most `most_events` events per plan.

    Results are cached. Before each pass, `over` is asked whether plans are still wanted; if it returns True,
    AbandonedError is raised.
    """

    def __init__(
        self,
        trace: Trace,
        profile: DeviceProfile,
        share: float = 1.0,
        most_events: int | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.trace = roofline.timed(trace, profile)
        self.profile = profile
        passes = max(3, OPERATORS // self.trace.operator_count)
        self.tries = min(len(PRICES), max(3, (passes + 1) // 2))
        self.refinements = min(REFINEMENTS, passes - self.tries)
        self._spare_passes = passes - self.tries
        self._most_events = most_events
        self._over = over
        self._cached_host_bytes = lru_cache(REMEMBERED)(self._host_bytes)
        self._cached_sequence = lru_cache(SEQUENCES)(self._sequence)
        self._cached_scheduled = lru_cache(SEQUENCES)(self._scheduled)
        self._by_share: dict[float, JobPlanner] = {}
        self._take_share(share)

    def _take_share(self, share: float) -> None:
        self.share = share
        self._by_share[share] = self
        self.link = self.profile.with_share(share)
        # Transfers start in time even if the other lane is busy all the time, unless that is too early for other ones.
        self.busy_link = self.profile.with_share(share * self.profile.duplex_factor)
        self._cached_candidate = lru_cache(REMEMBERED)(self._candidate)
        self._cached_best = lru_cache(REMEMBERED)(self._best)
        self._cached_outcomes = lru_cache(LATEST)(self._outcomes)
        self._cached_refined = lru_cache(LATEST)(self._refined)

    def sharing(self, share: float) -> JobPlanner:
        """Return the planner for the same job with another part of the link."""
        if share not in self._by_share:
            copy(self)._take_share(share)
        return self._by_share[share]

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
        return self._cached_candidate(plan)

    def _candidate(self, plan: Plan) -> Candidate:
        (timeline,) = simulate([SimulatedJob(self.trace, plan)], self.link)
        return Candidate(
            self.trace,
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
        return self._cached_host_bytes(candidate.plan)

    def _host_bytes(self, plan: Plan) -> int:
        return host_bytes([(self.trace, plan)] if len(plan) else [])

    def best(self, budget_bytes: int, passes: int | Prices | None = None) -> Candidate | Shortage:
        """Return the fastest plan within the budget, or the smallest shortage if no pass finds a plan.

        `passes`: how many to make, or the prices of a single one; None means as many as OPERATORS allows, with
        refinements.
        """
        return self._cached_best(budget_bytes, passes)

    def _best(self, budget_bytes: int, passes: int | Prices | None) -> Candidate | Shortage:
        if self.vanilla.device_peak_bytes <= budget_bytes:
            return self.vanilla
        candidate = self._within(budget_bytes, passes)
        if isinstance(candidate, Shortage) or candidate.device_peak_bytes <= budget_bytes:
            return candidate
        # The allocator takes more than the tensors, how much more depends on the plan.
        bare = self._bare_swap_all()
        found = self._reserving(budget_bytes, bare, passes, CLOSE * candidate.us)
        if bare.device_peak_bytes <= budget_bytes and (
            self._most_events is None or len(bare.plan) <= self._most_events
        ):
            found.append(bare)
        if found:
            return min(found, key=lambda candidate: (candidate.us, len(candidate.plan)))
        excess = bare.device_peak_bytes - budget_bytes
        return Shortage(self.trace.largest_operator, excess) if excess > 0 else Shortage(0, 0)

    def _reserving(
        self, budget_bytes: int, bare: Candidate, passes: int | Prices | None, enough_us: float
    ) -> list[Candidate]:
        """Return plans that the allocator can execute within the budget, since they leave memory free for its pieces.

        They leave a part of what is free under `bare`, the plan of swapping everything: first the same number of bytes
        at every operator, which costs little time, then a part of what each operator leaves free, which ends with that
        plan. For each of both, the plan that reserves least is returned; one that takes at most `enough_us` ends the
        search.
        """
        sequence = AccessSequence(self.trace, bare.plan)
        free = (
            np.full(self.trace.operator_count, budget_bytes - reserved_bytes(self.trace)) - self.trace.workspace_bytes
        )
        free[sequence.steps] -= sequence.footprint
        if free.min() < 0:
            return []
        found = []
        for most in (np.full_like(free, free.min()), free):
            for part in RESERVED:
                planner = _Reserving(self, budget_bytes, (part * most).astype(np.int64))
                candidate = planner._within(budget_bytes, passes)
                if isinstance(candidate, Candidate) and candidate.device_peak_bytes <= budget_bytes:
                    found.append(candidate)
                    break
            if found and found[-1].us <= enough_us:
                break
        return found

    def _within(self, budget_bytes: int, passes: int | Prices | None) -> Candidate | Shortage:
        """Return the fastest plan whose footprint is within the budget, as `best`."""
        budget_bytes -= reserved_bytes(self.trace)
        few = (passes,) if isinstance(passes, Prices) else PRICES[: passes or self.tries]
        outcomes, least = self._cached_outcomes(budget_bytes, few)
        if not outcomes:
            return self._swap_all(budget_bytes) or least
        best = outcomes[0]
        if best.candidate.us <= PERFECT * self.vanilla.us or isinstance(passes, Prices):
            return best.candidate
        best = (
            self._cached_refined(budget_bytes) if passes is None else self._stretched(outcomes, budget_bytes, passes)
        )[0]
        is_slow = best.candidate.us > SLOW * self.vanilla.us
        swapping = self._swap_all(budget_bytes) if is_slow else None
        return swapping if swapping and swapping.us < best.candidate.us else best.candidate

    def _outcomes(self, budget_bytes: int, passes: tuple[Prices, ...]) -> tuple[list[Outcome], Shortage]:
        """Return the outcomes of passes, the best first, and the smallest shortage.

        A pass whose plan is as fast as it can be ends them."""
        outcomes: list[Outcome] = []
        least = Shortage(0, self.vanilla.footprint_bytes)
        for prices in passes:
            sequence = self._try(budget_bytes, prices)
            if isinstance(sequence, Shortage):
                least = min(least, sequence, key=lambda shortage: shortage.bytes)
            elif candidate := self._timed(sequence, budget_bytes, prices.stretch):
                outcomes.append(Outcome(candidate, prices, sequence, {}))
                if candidate.us <= PERFECT * self.vanilla.us:
                    return outcomes[-1:], least
        outcomes.sort(key=rank)
        outcomes += [self._relaxed(outcome, budget_bytes) for outcome in outcomes[: max(1, len(outcomes) // 2)]]
        return sorted(outcomes, key=rank), least

    # ---- for plan searches (policies/joint/plan_search.py) ----

    def starts(self, footprint_bytes: int) -> list[Outcome]:
        """Return outcomes within a footprint, the best first: refined ones, and others of the usual passes."""
        budget_bytes = footprint_bytes - reserved_bytes(self.trace)
        outcomes, _ = self._cached_outcomes(budget_bytes, PRICES[: self.tries])
        ranked = sorted([*self._cached_refined(budget_bytes), *outcomes], key=rank)
        return list({outcome.prices._replace(stretch=1.0): outcome for outcome in reversed(ranked)}.values())[::-1]

    def descend(self, footprint_bytes: int, prices: Prices, extra_costs: ExtraCosts) -> Outcome | None:
        """Return the outcome of one pass within a footprint; None if it finds no plan."""
        budget_bytes = footprint_bytes - reserved_bytes(self.trace)
        sequence = self._try(budget_bytes, prices, extra_costs)
        if isinstance(sequence, Shortage) or not (candidate := self._timed(sequence, budget_bytes, prices.stretch)):
            return None
        return self._relaxed(Outcome(candidate, prices, sequence, extra_costs), budget_bytes)

    def relaxed(self, plan: Plan, footprint_bytes: int) -> Candidate:
        """Return a plan with tensors kept on the device for which a larger footprint has room, if that is faster."""
        outcome = Outcome(self.candidate(plan), PRICES[0], AccessSequence(self.trace, plan), {})
        return self._relaxed(outcome, footprint_bytes - reserved_bytes(self.trace)).candidate

    # ---- passes ----

    def _sequence(self, plan: Plan) -> AccessSequence:
        return AccessSequence(self.trace, plan)

    def _scheduled(self, sequence: AccessSequence, link: DeviceProfile, budget_bytes: int, stretch: float) -> Plan:
        """Return the plan with its transfers scheduled and coded."""
        return with_codecs(self.trace, schedule(sequence, link, budget_bytes, stretch))

    def _stretched(self, outcomes: Sequence[Outcome], budget_bytes: int, passes: int | None) -> list[Outcome]:
        """Return the outcomes, the best first; of a slow iteration also of passes that count on the time it waits.

        Beyond SLOW they gain up to a third of the time, and are made whatever OPERATORS allows; before it up to half a
        per cent (measured on the networks of the benchmarks' section `prices`). `passes`: as in `best`."""
        outcomes = list(outcomes)
        slowdown = outcomes[0].candidate.us / self.vanilla.us
        if slowdown < STRETCHED:
            return outcomes
        most: int | None
        if slowdown < SLOW:
            most = self._spare_passes if passes is None else 0
        else:
            most = None if passes is None else FEW_STRETCHED
        for prices, exponent in _stretches(outcomes, most):
            best = min(outcomes, key=rank)
            stretched = self._tried(best, budget_bytes, prices._replace(stretch=slowdown**exponent), {})
            outcomes += [stretched] if stretched else []
        return sorted(outcomes, key=rank)

    def _refined(self, budget_bytes: int) -> list[Outcome]:
        """Return the best outcome of the usual passes, and the best stretched one, both after more passes."""
        outcomes, _ = self._cached_outcomes(budget_bytes, PRICES[: self.tries])
        if not outcomes:
            return []
        starts = [outcomes[0]]
        if (stretched := self._stretched(outcomes, budget_bytes, None)[0]) is not starts[0]:
            starts.append(stretched)
        return sorted([self._refine(start, budget_bytes) for start in starts], key=rank)

    def _refine(self, best: Outcome, budget_bytes: int) -> Outcome:
        """Return the best outcome of more passes at the prices of `best`.

        In each, one way to take a tensor off the device costs extra: the one that costs the most in the best plan so
        far. In one more pass, parameters are swapped out early.
        """
        if not self.refinements:
            return best
        costs = self.costs(best.candidate.plan)
        for _ in range(self.refinements):
            if not costs:
                break
            way = max(costs, key=lambda way: costs[way])
            extra_costs = best.extra_costs
            tried = {**extra_costs, way: extra_costs.get(way, 0.0) + costs.pop(way)}
            if better := self._improved(best, budget_bytes, best.prices, tried):
                best, costs = better, self.costs(better.candidate.plan)
        early = best.prices._replace(early_swap_outs=True)
        return self._improved(best, budget_bytes, early, best.extra_costs) or best

    def _improved(self, best: Outcome, budget_bytes: int, prices: Prices, extra_costs: ExtraCosts) -> Outcome | None:
        """Return the outcome of another pass if it is better than the best so far, else None."""
        outcome = self._tried(best, budget_bytes, prices, extra_costs)
        return outcome if outcome and is_better(outcome.candidate, best.candidate) else None

    def _tried(self, best: Outcome, budget_bytes: int, prices: Prices, extra_costs: ExtraCosts) -> Outcome | None:
        """Return the outcome of another pass, relaxed if it is faster than the best; None if it has no plan."""
        sequence = self._try(budget_bytes, prices, extra_costs)
        if isinstance(sequence, Shortage) or not (candidate := self._timed(sequence, budget_bytes, prices.stretch)):
            return None
        outcome = Outcome(candidate, prices, sequence, extra_costs)
        return self._relaxed(outcome, budget_bytes) if candidate.us < best.candidate.us else outcome

    def costs(self, plan: Plan) -> dict[Way, float]:
        """Return the µs that each tensor's swaps and recomputations cost."""
        costs: defaultdict[Way, float] = defaultdict(float)
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

    def saving(self, slowdown: float = FREE, passes: Prices | None = None) -> Candidate:
        """Return the plan that takes the least memory, found by bisection, of those that slow the job down no more.

        `slowdown`: a factor on the time without a plan; the default is hardly any. `passes`: the prices of a single
        one for each plan; None means half of the usual ones."""
        low, best = floor_bytes(self.trace), self.vanilla
        for _ in range(6):
            middle = (low + best.device_peak_bytes) // 2
            candidate = self.best(middle, passes or max(1, self.tries // 2))
            if isinstance(candidate, Shortage) or candidate.us > slowdown * self.vanilla.us:
                low = middle
            else:
                best = candidate
        return best

    def largest_operator(self) -> str:
        """Return the label of the operator with the largest working set."""
        return self.trace.operator_label(self.trace.largest_operator)

    def _try(
        self, budget_bytes: int, prices: Prices, extra_costs: ExtraCosts | None = None
    ) -> AccessSequence | Shortage:
        """Return the outcome of one pass, run again with a smaller limit while its plan exceeds the budget."""
        limit = budget_bytes
        for _ in range(REPAIRS):
            if self._over():
                raise AbandonedError("the plans are not wanted any more")
            outcome = sweep(self.columns, self.link, limit, prices, extra_costs)
            if outcome.shortage is not None:
                return outcome.shortage
            sequence = self._cached_sequence(Plan.build(outcome.events))
            excess = footprint_of(sequence).device_peak_bytes - budget_bytes
            if excess <= 0:
                return sequence
            limit -= excess
        return Shortage(footprint_of(sequence).peak_step, excess)

    def _relaxed(self, outcome: Outcome, budget_bytes: int) -> Outcome:
        """Return the plan with tensors kept on the device where there is room, if that is better, else `outcome`."""
        sequence, rows = outcome.sequence, outcome.sequence.plan.rows
        cost_us, kinds = np.full(len(rows), self.link.launch_us), rows["kind"].tolist()
        out_us, in_us = (swap_us(self.trace, direction, self.link) for direction in Direction)
        for event, tensor, _ in zip(*(column.tolist() for column in sequence.copies), strict=True):
            us = (out_us if kinds[event] == EventKind.SWAP_OUT.value else in_us)[tensor]
            cost_us[event] += outcome.prices.link_price * us
        for event in np.flatnonzero(rows["kind"] == EventKind.RECOMPUTE.value).tolist():
            cost_us[event] += self.columns.recomputations.us(int(rows["tensor"][event]), int(rows["version"][event]))
        plan = without_superfluous(relaxed(sequence, budget_bytes, cost_us), self.columns)
        sequence = self._cached_sequence(plan)
        candidate = self._timed(sequence, budget_bytes, outcome.prices.stretch)
        if candidate is None:
            return outcome
        return min(outcome, outcome._replace(candidate=candidate, sequence=sequence), key=rank)

    def _swap_all(self, budget_bytes: int) -> Candidate | None:
        """Return the plan of swaps alone, which takes the least memory of all known plans; None if it does not fit."""
        plan = relaxed_swap_all(self.trace, budget_bytes)
        return None if plan is None else self._timed(self._cached_sequence(plan), budget_bytes)

    def _bare_swap_all(self) -> Candidate:
        """Return the plan of `least_bytes`."""
        return self.candidate(swaps(self.trace, idle_intervals(self.trace)))

    def _timed(self, sequence: AccessSequence, budget_bytes: int, stretch: float = 1.0) -> Candidate | None:
        """Return the plan with its transfers scheduled and coded; None if it has too many events."""
        if self._most_events is not None and len(sequence.plan) > self._most_events:
            return None

        def scheduled(link: DeviceProfile) -> Candidate:
            return self.candidate(self._cached_scheduled(sequence, link, budget_bytes, stretch))

        candidate = scheduled(self.busy_link)
        if candidate.stall_us and self.busy_link != self.link:
            candidate = min(candidate, scheduled(self.link), key=lambda candidate: candidate.us)
        return candidate


def _stretches(outcomes: Sequence[Outcome], most: int | None) -> list[tuple[Prices, float]]:
    """Return prices, and the power of the slowdown to stretch latencies by, of stretched passes after `outcomes`.

    Of more than `most` those are left that together gain the most, found on the same networks by greedy selection.
    None means no limit."""
    own = list(dict.fromkeys(outcome.prices for outcome in outcomes))[:STRETCHED_PASSES]
    passes = [*own, *(prices for prices in CONGESTED if prices not in own)]
    every = [(prices, exponent) for exponent in STRETCHES for prices in passes]
    if most is None or len(every) <= most:
        return every
    first, second = CONGESTED
    best = [(first, 0.75), *((prices, 0.5) for prices in own[:1]), (second, 0.75), (first, 0.5)]
    return [*(each for each in best if each in every), *(each for each in every if each not in best)][:most]


class _Reserving(JobPlanner):
    """Planner for plans of the planner `job` that leave `reserved` bytes free at each operator.

    Only plans that the allocator can execute within `budget_bytes` count. Their costs are without the reservations.
    """

    def __init__(self, job: JobPlanner, budget_bytes: int, reserved: Int64s) -> None:
        trace = replace(job.trace, workspace_bytes=job.trace.workspace_bytes + reserved)
        super().__init__(trace, job.profile, job.share, job._most_events, job._over)
        self._job = job
        self._budget_bytes = budget_bytes

    def _candidate(self, plan: Plan) -> Candidate:
        return self._job.candidate(plan)

    def _timed(self, sequence: AccessSequence, budget_bytes: int, stretch: float = 1.0) -> Candidate | None:
        candidate = super()._timed(sequence, budget_bytes, stretch)
        if candidate is None or not fits(AccessSequence(candidate.trace, candidate.plan), self._budget_bytes):
            return None
        return candidate
