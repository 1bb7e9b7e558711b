"""The search for plans that are faster than those of the policy joint's passes."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.sweep import Shortage
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.joint import policy
from pg_tensile.planning.policies.joint.plan_search import PlanSearch
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from tests.examples import examples
from tests.unit.graphs import random_trace
from tests.unit.handmade import network

PROFILE = RTX_A6000.with_link(2e7)  # so slow that random traces of some megabytes have to choose
TRIES = 6


def budgets_of(planner: JobPlanner, count: int) -> list[int]:
    """Return budgets from the least to what the job takes without a plan."""
    least, most = planner.least_bytes, planner.vanilla.device_peak_bytes
    return [least + (most - least) * step // (count - 1) for step in range(count)]


@given(seed=st.integers(0, 1 << 32))
@examples(4, long=8)
def test_less_memory_never_takes_less_time(seed):
    planner = JobPlanner(random_trace(Random(seed), 24, 30), PROFILE)
    plans = PlanSearch(planner, TRIES).ladder(budgets_of(planner, 6))
    found = [(budget, plan) for budget, plan in plans.items() if isinstance(plan, Candidate)]
    assert found
    for (_, less), (_, more) in pairwise(found):
        assert more.us <= less.us
    for budget, candidate in found:
        validate(planner.trace, candidate.plan)
        assert footprint(planner.trace, candidate.plan).device_peak_bytes <= budget
        (timeline,) = simulate([SimulatedJob(planner.trace, candidate.plan)], PROFILE)
        assert timeline.iteration_us == candidate.us
        first = planner.best(budget)
        assert isinstance(first, Shortage) or candidate.us <= first.us


@pytest.fixture(scope="module")
def trace() -> Trace:
    return network(5)


def test_a_search_finds_faster_plans_and_tells_of_each():
    trace = network(12)
    planner = JobPlanner(trace, RTX_A6000.with_link(1e9))
    budget = budgets_of(planner, 5)[2]
    told: list[Candidate] = []
    found = PlanSearch(planner, 60, found=told.append).within(budget)
    first = planner.best(budget)
    assert isinstance(found, Candidate) and isinstance(first, Candidate)
    assert found.us < first.us
    assert told[0].us <= first.us and told[-1] == found
    assert all(later.us <= earlier.us for earlier, later in pairwise(told))


def test_the_seed_determines_the_plan(trace):
    budget = budgets_of(JobPlanner(trace, PROFILE), 5)[1]
    first, again = (policy.plan({0: trace}, PROFILE, budget, tries=TRIES, seed=4) for _ in range(2))
    assert first == again


def test_jobs_together_stay_within_the_budget(trace):
    planner = JobPlanner(trace, PROFILE, 0.5)
    budget = 2 * budgets_of(planner, 5)[2]
    plain = policy.plan({1: trace, 2: trace}, PROFILE, budget)
    searched = policy.plan({1: trace, 2: trace}, PROFILE, budget, tries=TRIES)
    assert sum(footprint(trace, plan).device_peak_bytes for plan in searched.values()) <= budget
    us = [sum(planner.candidate(plan).us for plan in plans.values()) for plans in (searched, plain)]
    assert us[0] <= us[1]


def test_a_budget_that_is_too_small_is_a_shortage(trace):
    planner = JobPlanner(trace, PROFILE)
    assert isinstance(PlanSearch(planner, TRIES).best(planner.least_bytes // 2), Shortage)
    assert PlanSearch(planner, TRIES).best(planner.vanilla.device_peak_bytes) == planner.vanilla
