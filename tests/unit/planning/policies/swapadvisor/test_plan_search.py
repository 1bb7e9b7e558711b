"""The search: better plans than without, the same ones every time, and an answer to whatever it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given

from pg_tensile.errors import BudgetError, InvalidPlanError, PlanSearchError
from pg_tensile.planning.building_blocks.shares import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.prices import PRICES
from pg_tensile.planning.plan.following import host_bytes
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import check_order
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.policies.swapadvisor.individuals import Breeder, Individual, Scored
from pg_tensile.planning.policies.swapadvisor.plan_search import Found, _survivors, search_plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from tests.examples import examples
from tests.unit.executing import FAST, captured_net, eager, run, same, starting
from tests.unit.graphs import traces
from tests.unit.handmade import network
from tests.unit.unrolled import unrolled

PROFILE = RTX_A6000.with_link(4e9)


def iteration_us(trace, plan: Plan) -> float:
    return simulate([SimulatedJob(trace, plan)], PROFILE)[0].iteration_us


def small():
    """A trace, and a budget that is too small for it."""
    trace = network(10)
    return trace, footprint(trace).device_peak_bytes // 3


def found_in(trace, budget, generations: int = 2, **options) -> Found:
    options = {"processes": 1, "population": 8, **options}
    return search_plan(trace, PROFILE, budget, generations=generations, **options)


# ---- what it finds ----


def test_layers_that_share_weights_are_executed_together():
    """Six layers, unrolled; an eighth of the memory. In the captured order every weight comes and goes each time."""
    trace = unrolled(layers=6, steps=8, hidden_bytes=1 << 14)
    budget = max(footprint(trace).device_peak_bytes // 8, least_bytes(trace))
    best = found_in(trace, budget, 1)
    captured = [iteration_us(trace, POLICIES[name]({0: trace}, PROFILE, budget)[0]) for name in ("joint", "lru")]
    assert captured[0] > 2 * best.iteration_us
    assert captured[1] > 2 * best.iteration_us
    assert best.iteration_us < 1.6 * trace.latency_us.sum()


@given(trace=traces(most_operators=16))
@examples(6, long=20)
def test_every_plan_found_is_valid_within_the_budget_and_as_fast_as_is_said(trace):
    budget = (least_bytes(trace) + footprint(trace).device_peak_bytes) // 2
    seen: list[Found] = []
    best = found_in(trace, budget, 1, found=seen.append)
    assert best.plan == seen[-1].plan
    for each in seen:
        validate(trace, each.plan)
        assert footprint(trace, each.plan).device_peak_bytes == each.device_peak_bytes <= budget
        assert iteration_us(trace, each.plan) == pytest.approx(each.iteration_us, rel=1e-6)
    assert all(one.iteration_us > other.iteration_us for one, other in pairwise(seen))


def test_generations_make_plans_better():
    trace, budget = small()
    none, some = found_in(trace, budget, 0), found_in(trace, budget, 12)
    assert some.iteration_us < none.iteration_us
    assert none.evaluations < some.evaluations


def test_the_same_seed_finds_the_same_plan_in_any_number_of_processes():
    trace, budget = small()
    once, again, spread = (found_in(trace, budget, 3, seed=5, processes=count) for count in (1, 1, 2))
    assert once.plan == again.plan == spread.plan
    assert once[1:5] == again[1:5] == spread[1:5]
    plans = {found_in(trace, budget, 3, seed=seed).plan for seed in range(4)}
    assert len(plans) > 1


# ---- who survives ----


def scored(times: Sequence[float]) -> list[Scored]:
    """Individuals with genes of their own, each of which takes so many µs."""
    order = np.arange(2, dtype=np.int32)
    return [Scored(Individual(order, distance=1.0 + place), us) for place, us in enumerate(times)]


def test_the_best_one_survives_whatever_is_drawn():
    """Forty of nearly equal times, of which four survive: by chance alone the best would in one generation of ten."""
    alive = scored([1000 + place / 1000 for place in range(40)])
    for seed in range(50):
        found = _survivors(alive, 4, np.random.default_rng(seed))
        assert len(found) == 4 and found[0] is alive[0]


def test_who_survives_is_drawn_by_how_fast_it_is():
    """Equation (1): of two for one place, one a twentieth of the best one's time slower, e times less likely."""
    best, fast, slow = scored([1000, 1010, 1060])
    drawn = [_survivors([slow, best, fast], 2, np.random.default_rng(seed))[1] for seed in range(2000)]
    assert drawn.count(fast) / drawn.count(slow) == pytest.approx(np.e, rel=0.15)


# ---- what it starts from ----


def test_a_start_that_nothing_beats_is_returned():
    trace, budget = small()
    good = found_in(trace, budget, 8)
    assert found_in(trace, budget, 0, start=good.plan).plan == good.plan
    vanilla = found_in(trace, footprint(trace).device_peak_bytes, start=NO_EVENTS)
    assert (vanilla.plan, vanilla.generation, vanilla.evaluations) == (NO_EVENTS, 0, 0)


def test_a_start_above_the_budget_is_not():
    trace, budget = small()
    assert found_in(trace, budget, 0, start=NO_EVENTS).device_peak_bytes <= budget


def test_a_start_of_another_trace_is_refused():
    trace, budget = small()
    with pytest.raises(InvalidPlanError):
        found_in(trace, budget, start=Plan.build([Event(EventKind.RELEASE, 10_000, 1, 1)]))


def test_the_order_of_the_start_is_bred_from():
    trace, budget = small()
    order = found_in(trace, budget).plan.order
    assert order is not None
    first = Breeder(trace, PROFILE, budget).first(8, 0, order)
    assert any(each.order.tolist() == order.tolist() for each in first)
    for each in first:
        check_order(trace, each.order)


# ---- limits ----


def test_time_ends_it():
    trace, budget = small()
    best = search_plan(trace, PROFILE, budget, seconds=0.5, processes=1)
    assert best.seconds < 10  # the first individuals, and what is under way then
    validate(trace, best.plan)


def test_fewer_events_are_kept_to_and_too_few_are_an_error():
    trace, budget = small()
    most = len(found_in(trace, budget).plan) + 10
    assert len(found_in(trace, budget, most_events=most).plan) <= most
    with pytest.raises(PlanSearchError, match="no plan was found") as error:
        found_in(trace, budget, most_events=1)
    assert "more events" in str(error.value.hint)


def test_host_memory_is_kept_to_and_too_little_is_an_error():
    trace, budget = small()
    free = found_in(trace, budget)
    needed = host_bytes([(trace, free.plan)])
    least = min(host_bytes([(trace, found_in(trace, budget, seed=seed).plan)]) for seed in range(3))
    assert host_bytes([(trace, found_in(trace, budget, host_bytes=least).plan)]) <= least <= needed
    with pytest.raises(PlanSearchError, match="no plan was found"):
        found_in(trace, budget, host_bytes=0)


def test_an_operator_larger_than_the_budget_is_named():
    trace, _ = small()
    with pytest.raises(BudgetError) as error:
        found_in(trace, least_bytes(trace) - 1)
    assert error.value.smallest_bytes == least_bytes(trace)
    found_in(trace, least_bytes(trace), 0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "without end"),
        ({"seconds": 0}, "in 0 seconds"),
        ({"seconds": -1.5}, "in -1.5 seconds"),
        ({"seconds": float("nan")}, "in nan seconds"),
        ({"seconds": float("inf")}, "in inf seconds"),
        ({"generations": -1}, "-1 generations"),
        ({"generations": 1, "processes": 0}, "0 processes"),
        ({"generations": 1, "population": 3}, "a population of 3"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    trace, budget = small()
    with pytest.raises(PlanSearchError, match=message) as error:
        search_plan(trace, PROFILE, budget, **limits)
    assert error.value.hint


# ---- individuals ----


def test_children_depend_on_parents_and_seed_alone():
    trace, budget = small()
    litters = []
    for _ in range(2):
        breeder = Breeder(trace, PROFILE, budget)
        one, other = breeder.first(8, 1, None)[:2]
        litters.append(breeder.breed(one, other, (1, 2, 3)))
    assert [each.individual.key for each in litters[0]] == [each.individual.key for each in litters[1]]
    assert [each.us for each in litters[0]] == [each.us for each in litters[1]]
    assert len(litters[0]) == 4


def test_recomputing_is_one_of_the_ways():
    trace, budget = small()
    breeder = Breeder(trace, RTX_A6000.with_link(5e8), budget)
    order = np.arange(trace.operator_count, dtype=np.int32)
    chains = [prices.longest_chain for prices in PRICES]
    swapping, both = breeder.make(Individual(order)), breeder.make(Individual(order, prices=chains.index(2)))
    assert swapping is not None and both is not None
    assert EventKind.RECOMPUTE not in {event.kind for event in swapping.plan.events}
    assert EventKind.RECOMPUTE in {event.kind for event in both.plan.events}
    assert both.us < swapping.us


# ---- the policy ----


def test_the_policy_is_never_slower_than_joint_and_shares_the_budget():
    one, other = network(3), unrolled(layers=2, steps=3, hidden_bytes=1 << 16)
    total = sum(footprint(trace).device_peak_bytes for trace in (one, other))
    plans = POLICIES["swapadvisor"]({0: one, 1: other}, PROFILE, int(0.7 * total))
    assert sum(footprint(*each).device_peak_bytes for each in ((one, plans[0]), (other, plans[1]))) <= 0.7 * total
    alone = POLICIES["swapadvisor"]({0: one}, PROFILE, int(0.7 * footprint(one).device_peak_bytes))[0]
    joint = POLICIES["joint"]({0: one}, PROFILE, int(0.7 * footprint(one).device_peak_bytes))[0]
    assert iteration_us(one, alone) <= iteration_us(one, joint)
    with pytest.raises(BudgetError):
        POLICIES["swapadvisor"]({0: one, 1: other}, PROFILE, 1000)


@pytest.mark.parametrize("part", [0.4, 0.7])
def test_a_plan_found_trains_to_the_same_bits(part):
    trace = captured_net().trace
    budget = int(part * footprint(trace).device_peak_bytes)
    budget = max(budget, least_bytes(trace))
    link = FAST.with_link(1e8)
    best = search_plan(trace, link, budget, generations=2, processes=1, population=8)
    assert best.plan.order is not None and len(best.plan)
    reference, losses = eager(3)
    with starting() as start:
        executor = start(best.plan)
        assert all(map(torch.equal, run(executor, 3), losses))
        assert same(executor.state_dict().model, dict(reference.model.state_dict()))
        assert executor.counters.peak_bytes <= budget
