"""Search for a better plan: a genetic algorithm over schedules, allocations and planners (SwapAdvisor, section 5.1).

Each generation is bred from pairs of the population, four children per pair, on all available processes. Survivors are
drawn with the softmax of the normalised time, and the best individual always survives. What a generation finds depends
on the seed alone, so a number of generations has the same result on any machine and in any number of processes; how
many there are within a time limit does not.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, NamedTuple

import numpy as np

from pg_tensile.errors import BudgetError, PlanSearchError
from pg_tensile.planning.building_blocks.shares import least_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.following import host_bytes as host_bytes_of
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.swapadvisor.individuals import Breeder, Individual, Scored
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace

POPULATION = 24  # individuals that survive a generation (the paper has two for each of its 72 cores)
BETTER = 1e-6  # relative gain below which a plan does not count as better
PERFECT = 1.0005  # factor on the time of the operators alone: a plan this fast ends the search
PRESSURE = 20.0  # factor on normalised times in the softmax: with 5 % more time, survival is e times less likely


# calls a method of the breeder for each tuple of arguments, in any process; results are in their order
Spread = Callable[[str, Sequence[tuple[Any, ...]]], Iterator[Any]]


class Found(NamedTuple):
    """The best plan so far.

    `generation` 0 means the first individuals, or the plan that the search started from.
    """

    plan: Plan
    iteration_us: float
    device_peak_bytes: int
    generation: int
    evaluations: int  # individuals evaluated until then
    seconds: float


def search_plan(
    trace: Trace,
    profile: DeviceProfile,
    budget_bytes: int,
    *,
    seconds: float | None = None,
    generations: int | None = None,
    seed: int = 0,
    processes: int | None = None,
    start: Plan | None = None,
    host_bytes: int | None = None,
    most_events: int | None = None,
    found: Callable[[Found], object] | None = None,
    population: int = POPULATION,
) -> Found:
    """Return the fastest plan of the captured `trace` found within `seconds` or `generations`, whichever ends first.

    If nothing is faster than `start`, that is returned. The search ends earlier where the job hardly waits any more.
    The plan's device peak (workspaces included) is at most `budget_bytes`, its host memory at most `host_bytes`, its
    events at most `most_events`. `processes`: 1 means this one, None means one for each core. `found` is called with
    every plan that is better than those before.

    Raises BudgetError if an operator alone exceeds the budget, InvalidPlanError for a start that is not a plan of the
    trace, and PlanSearchError if nothing limits the search, if limits make no sense or allow no plan, or if a process
    ends.
    """
    began = time.monotonic()
    _check(trace, budget_bytes, seconds, generations, processes, population)
    deadline = math.inf if seconds is None else began + seconds
    limits = _Limits(budget_bytes, host_bytes, most_events)
    count = processes or len(os.sched_getaffinity(0))
    breeder = Breeder(trace, profile, budget_bytes, most_events)
    course = _Course(breeder, limits, began, found)
    course.begin(start)
    if not course.is_perfect():
        first = breeder.first(population, seed, None if start is None else start.order)
        with _workers(breeder, count) as spread:
            _evolve(course, spread, first, population, seed, deadline, generations)
    return course.result()


def _evolve(
    course: _Course,
    spread: Spread,
    first: Sequence[Individual],
    population: int,
    seed: int,
    deadline: float,
    generations: int | None,
) -> None:
    """Breed generation after generation until a limit ends the search.

    Work in progress at the deadline does not count.
    """
    alive = list(_until(deadline, spread("score", [(individual,) for individual in first])))
    course.look(alive, 0)
    generation = 0
    while time.monotonic() < deadline and generation != generations and not course.is_perfect():
        alive = [scored for scored in course.allowed(alive) if scored.us < math.inf]
        if not alive:
            return
        generation += 1
        pairs = _pairs(alive, population // 4, seed, generation)
        litters = list(_until(deadline, spread("breed", pairs)))
        if len(litters) < len(pairs):
            return
        children = [child for litter in litters for child in litter]
        course.look(children, generation)
        alive = _survivors([*alive, *children], population, np.random.default_rng((seed, generation, 1 << 20)))


def _check(
    trace: Trace,
    budget_bytes: int,
    seconds: float | None,
    generations: int | None,
    processes: int | None,
    population: int,
) -> None:
    if seconds is None and generations is None:
        raise PlanSearchError("a search without end was asked for", "Give seconds or generations.")
    if seconds is not None and not 0 < seconds < math.inf:
        raise PlanSearchError(f"a plan cannot be searched for in {seconds:g} seconds", "Give it more than 0 seconds.")
    if generations is not None and generations < 0:
        raise PlanSearchError(f"a search cannot have {generations} generations", "Use 0 or more.")
    if processes is not None and processes < 1:
        raise PlanSearchError(f"a search cannot have {processes} processes", "Use 1 or more.")
    if population < 4:
        raise PlanSearchError(f"a search cannot have a population of {population}", "Use 4 or more.")
    if least_bytes(trace) > budget_bytes:
        raise BudgetError(budget_bytes, least_bytes(trace), trace.operator_label(trace.largest_operator))


# ---- results ----


class _Limits(NamedTuple):
    budget_bytes: int
    host_bytes: int | None
    most_events: int | None

    def allow(self, trace: Trace, plan: Plan) -> bool:
        if self.most_events is not None and len(plan) > self.most_events:
            return False
        return self.host_bytes is None or host_bytes_of([(trace, plan)]) <= self.host_bytes


class _Course:
    """The best plan so far, and the individuals whose plans exceed the limits on host memory or events."""

    def __init__(
        self,
        breeder: Breeder,
        limits: _Limits,
        began: float,
        found: Callable[[Found], object] | None,
    ) -> None:
        self.breeder = breeder
        self.limits = limits
        self.began = began
        self.tell = found
        self.best: Found | None = None
        self.evaluations = 0
        self.refused: set[tuple[object, ...]] = set()

    def begin(self, start: Plan | None) -> None:
        """Start with an existing plan, if it keeps to the limits."""
        if start is None:
            return
        (timeline,) = simulate([SimulatedJob(self.breeder.trace, start)], self.breeder.profile)
        peak_bytes = timeline.device_peak_bytes
        if peak_bytes <= self.limits.budget_bytes and self.limits.allow(self.breeder.trace, start):
            self.best = Found(start, timeline.iteration_us, peak_bytes, 0, 0, time.monotonic() - self.began)

    def look(self, scored: Sequence[Scored], generation: int) -> None:
        """Take the fastest individual whose plan is allowed, if it is better than the best one."""
        self.evaluations += len(scored)
        for individual, us in sorted(scored, key=lambda candidate: candidate.us):
            if us == math.inf or (self.best and us >= self.best.iteration_us * (1 - BETTER)):
                return
            planned = self.breeder.make(individual)
            assert planned is not None
            if not self.limits.allow(self.breeder.trace, planned.plan):
                self.refused.add(individual.key)
                continue
            peak_bytes = footprint(self.breeder.trace, planned.plan).device_peak_bytes
            now = time.monotonic() - self.began
            self.best = Found(planned.plan, planned.us, peak_bytes, generation, self.evaluations, now)
            if self.tell is not None:
                self.tell(self.best)

    def is_perfect(self) -> bool:
        """Return whether the iteration takes hardly more time than its operators."""
        return self.best is not None and self.best.iteration_us <= PERFECT * self.breeder.trace.latency_us.sum()

    def allowed(self, scored: Sequence[Scored]) -> list[Scored]:
        return [candidate for candidate in scored if candidate.individual.key not in self.refused]

    def result(self) -> Found:
        if self.best is None:
            hint = "Allow more host memory, more events or more time."
            raise PlanSearchError("no plan was found within the limits of the search", hint)
        return self.best._replace(evaluations=self.evaluations, seconds=time.monotonic() - self.began)


# ---- selection ----


def _pairs(
    alive: Sequence[Scored], count: int, seed: int, generation: int
) -> list[tuple[Individual, Individual, tuple[int, ...]]]:
    """Return pairs of parents, each with the seed of its children."""
    random = np.random.default_rng((seed, generation))
    pairs: list[tuple[Individual, Individual, tuple[int, ...]]] = []
    for number in range(count):
        first, second = random.integers(len(alive), size=2).tolist()
        pairs.append((alive[first].individual, alive[second].individual, (seed, generation, number)))
    return pairs


def _survivors(alive: Sequence[Scored], count: int, random: np.random.Generator) -> list[Scored]:
    """Return the best individual and others drawn by equation (1), none twice.

    Those drawn have the largest logarithms of their weights plus Gumbel noise. Of individuals with the same genes, one
    counts.
    """
    distinct = {scored.individual.key: scored for scored in alive if scored.us < math.inf}
    ranked = sorted(distinct.values(), key=lambda scored: scored.us)
    if len(ranked) <= count:
        return ranked
    slower = np.array([scored.us / ranked[0].us - 1 for scored in ranked[1:]])
    drawn = np.argsort(PRESSURE * slower - random.gumbel(size=len(slower)))[: count - 1]
    return [ranked[0], *(ranked[1 + index] for index in sorted(drawn.tolist()))]


# ---- processes ----


def _until(deadline: float, results: Iterator[Any]) -> Iterator[Any]:
    for result in results:
        yield result
        if time.monotonic() > deadline:
            return


@contextmanager
def _workers(breeder: Breeder, count: int) -> Iterator[Spread]:
    """Provide calls of the breeder's methods, in this process or in `count` others.

    Results are in the order of the tasks.
    """
    if count == 1:
        yield lambda name, tasks: (getattr(breeder, name)(*task) for task in tasks)
        return
    about = (breeder.trace.to_bytes(), breeder.profile, breeder.budget, breeder.most_events)
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_worker, about)
    try:
        yield lambda name, tasks: pool.map(_work, [name] * len(tasks), tasks)
    except BrokenProcessPool as error:
        raise PlanSearchError("a process of the search ended", "Use fewer processes.", str(error)) from error
    finally:
        pool.shutdown(cancel_futures=True)


_breeder: Breeder | None = None  # of a worker process


def _start_worker(trace: bytes, profile: DeviceProfile, budget_bytes: int, most_events: int | None) -> None:
    global _breeder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _breeder = Breeder(Trace.from_bytes(trace), profile, budget_bytes, most_events)


def _end_with_parent() -> None:
    """End this worker with its parent.

    A search that is killed ends nothing by itself, and its workers would wait for more work for ever.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(name: str, task: tuple[Any, ...]) -> Any:
    assert _breeder is not None
    return getattr(_breeder, name)(*task)
