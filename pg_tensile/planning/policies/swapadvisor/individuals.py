"""Individuals that a search breeds: schedules with the choices of a planner, and the plans that they stand for.

Besides the schedule and the allocation, an individual determines how long ago a tensor that leaves should have been
used, and which planner plans: the swap planner, or a pass of the policy `joint`, which recomputes as well, at one of
its prices. Everything here is deterministic: the same individual has the same plan, the same seed the same children, in
any process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.prices import PRICES
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.order import in_order
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.swapadvisor import allocation, schedules
from pg_tensile.planning.policies.swapadvisor.allocation import Allocation
from pg_tensile.planning.policies.swapadvisor.planner import decide
from pg_tensile.planning.policies.swapadvisor.recompute import with_recomputations
from pg_tensile.planning.policies.swapadvisor.schedules import WAITING, DependencyLists
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.trace.trace import Int32s, Trace

RATE = 0.1  # largest probability that a gene mutates (5.2; 6.1 starts from it); each child draws a smaller one
DISTANCES = (0.0, 1.0, 2.0)  # how long ago a tensor was used, in times of its own copy out
REPLANNED = 0.02  # fraction of the time without stalls: if an iteration waits longer, its transfers are timed again
# the first greedy schedules: capacity as a fraction of the budget, `thrift` and `waiting` (see `schedules.greedy`)
GREEDY = (
    (1.5, 0.0, WAITING), (1.25, 0.0, WAITING), (1.0, 0.0, WAITING), (0.75, 0.0, WAITING), (1.0, 0.0, 1.0),
    (1.0, 1.0, 1.0), (0.5, 1.0, 1.0),
)  # fmt: skip
REMEMBERED = 4096  # cached times of individuals


@dataclass(frozen=True, eq=False)
class Individual:
    """The genes of one plan.

    `prices`: index into `PRICES` of `joint`; None means the swap planner, which alone uses `allocation` and `distance`.
    """

    order: Int32s
    allocation: Allocation | None = None
    distance: float = 1.0
    prices: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for individuals with the same plan."""
        planner = (self.allocation, self.distance) if self.prices is None else (self.prices,)
        return self.order.tobytes(), *planner


class Scored(NamedTuple):
    individual: Individual
    us: float  # of an iteration; infinite if it has no plan


class TimedPlan(NamedTuple):
    """A plan of a captured trace, and the time of its iteration."""

    plan: Plan
    us: float


class Breeder:
    """Plans, times and children of individuals, for one job that has the link to itself."""

    def __init__(self, trace: Trace, profile: DeviceProfile, budget_bytes: int, most_events: int | None = None) -> None:
        self.trace = roofline.timed(trace, profile)
        self.profile = profile
        self.budget = budget_bytes
        self.most_events = most_events
        self.dependencies = DependencyLists.of(self.trace)
        self.sizes = allocation.distinct_sizes(self.trace)
        self._times: dict[tuple[object, ...], float] = {}

    # ---- plans ----

    def make(self, individual: Individual) -> TimedPlan | None:
        """Return the individual's plan; None if it has none within the budget, or one with too many events."""
        ordered = in_order(self.trace, individual.order)
        if individual.prices is not None:
            planned = self._jointly(ordered, individual.prices)
        else:
            planned = self._swapping(ordered, individual)
        if planned is None or (self.most_events is not None and len(planned.plan) > self.most_events):
            return None
        return planned._replace(plan=Plan(planned.plan.rows, 0, individual.order))

    def _jointly(self, ordered: Trace, prices: int) -> TimedPlan | None:
        """Return the plan of a pass of `joint`, or None."""
        try:
            best = JobPlanner(ordered, self.profile).best(self.budget, PRICES[prices])
        except InvalidPlanError:  # a recomputation needs a tensor that has left
            return None
        return TimedPlan(best.plan, best.us) if isinstance(best, Candidate) else None

    def _swapping(self, ordered: Trace, individual: Individual) -> TimedPlan | None:
        """Return the swap planner's plan, or None.

        Where the iteration waits, it is the plan with recomputations, if that is faster.
        """
        decided = decide(ordered, self.profile, self.budget, individual.allocation, individual.distance)
        if decided is None:
            return None
        sequence = AccessSequence(ordered, decided)
        planned = self._timed(sequence)
        if planned is not None and planned.us > (1 + REPLANNED) * ordered.latency_us.sum():
            mixed = self._timed(AccessSequence(ordered, with_recomputations(sequence, self.profile, self.budget)))
            if mixed is not None and mixed.us < planned.us:
                return mixed
        return planned

    def _timed(self, sequence: AccessSequence) -> TimedPlan | None:
        """Return the plan with its transfers scheduled; None if it exceeds the budget.

        Where the iteration waits, transfers are scheduled once more, for operators that run as late as the stalls make
        them; the faster plan is returned.
        """
        if footprint_of(sequence).device_peak_bytes > self.budget:
            return None
        ordered, decided = sequence.trace, sequence.plan
        planned: TimedPlan | None = None
        for _ in range(2):
            plan = schedule(sequence, self.profile, self.budget)
            evaluation = evaluate(AccessSequence(ordered, plan), self.profile)
            if planned is None or evaluation.iteration_us < planned.us:
                planned = TimedPlan(plan, evaluation.iteration_us)
            if evaluation.stalled_us.sum() <= REPLANNED * ordered.latency_us.sum():
                break
            stalled_us = np.add.reduceat(evaluation.stalled_us[1:], sequence.operator_step)  # after each operator
            sequence = AccessSequence(ordered.with_latencies(ordered.latency_us + stalled_us), decided)
        return planned

    def score(self, individual: Individual) -> Scored:
        key = individual.key
        if key not in self._times:
            if len(self._times) >= REMEMBERED:
                self._times.clear()
            planned = self.make(individual)
            self._times[key] = np.inf if planned is None else planned.us
        return Scored(individual, self._times[key])

    # ---- first individuals ----

    def first(self, count: int, seed: int, start: Int32s | None) -> list[Individual]:
        """Return at least `count` individuals to start with.

        Schedules are that of the plan to start from, the captured one, and greedy ones, each with every planner. The
        rest are mutations of these.
        """
        captured = np.arange(self.trace.operator_count, dtype=np.int32)
        greedy = [(int(part * self.budget), thrift, waiting) for part, thrift, waiting in GREEDY]
        orders = [
            schedules.greedy(self.trace, self.dependencies, *parameters) for parameters in (*greedy, (None, 1.0, 1.0))
        ]
        orders += [captured, captured if start is None else start]
        distinct = list({order.tobytes(): order for order in orders}.values())
        separate = allocation.separate(self.trace, self.sizes, self.budget) if self.sizes.size else None
        planners = [(None, 1.0, None), (None, DISTANCES[-1], None), (None, 1.0, 0), (separate, 1.0, None)]
        individuals = [Individual(order, *planner) for planner in planners for order in distinct]
        for number in range(len(individuals), count):
            parent = individuals[number % len(distinct)]
            random = np.random.default_rng((seed, 0, number))
            individuals.append(self._mutated(replace(parent, allocation=self._scattered(random)), random))
        return individuals

    def _scattered(self, random: np.random.Generator) -> Allocation | None:
        if not self.sizes.size or random.random() < 0.5:
            return None
        return allocation.scattered(self.trace, self.sizes, self.budget, random)

    # ---- children ----

    def breed(self, first: Individual, second: Individual, seed: tuple[int, ...]) -> list[Scored]:
        """Return four children of two parents: two schedules, each with two allocations (5.1), mutated."""
        random = np.random.default_rng(seed)
        orders = schedules.crossover(first.order, second.order, int(random.integers(1, len(first.order))))
        allocations = [first.allocation, second.allocation]
        if first.allocation is not None and second.allocation is not None:
            point = int(random.integers(0, len(self.sizes) + 1))
            allocations = [*allocation.crossover(self.sizes, first.allocation, second.allocation, point, self.budget)]
        planners = [(parent.distance, parent.prices) for parent in (first, second)]
        children = []
        for order in orders:
            for slots, planner in zip(allocations, planners, strict=True):
                children.append(self.score(self._mutated(Individual(order, slots, *planner), random)))
        return children

    def _mutated(self, individual: Individual, random: np.random.Generator) -> Individual:
        """Return a mutation at a random rate between one gene of a schedule and RATE, to try local and far changes."""
        count = len(individual.order)
        rate = float(np.exp(random.uniform(np.log(min(1 / count, RATE)), np.log(RATE))))
        order = schedules.mutate(self.dependencies, individual.order, rate, random)
        slots, distance, prices = individual.allocation, individual.distance, individual.prices
        if slots is not None:
            slots = allocation.mutate(self.sizes, slots, RATE, self.budget, random)
        turns = random.random(3) < RATE
        if turns[0]:
            slots = self._scattered(random)
        if turns[1]:
            distance = DISTANCES[random.integers(len(DISTANCES))]
        if turns[2]:
            prices = None if random.random() < 0.5 else int(random.integers(len(PRICES)))
        return Individual(order, slots, distance, prices)
