"""The swap planner: valid cyclic plans within the budget, for any schedule and allocation; and what they cost."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.shares import least_bytes
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import in_order
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.policies.swapadvisor.allocation import Allocation, distinct_sizes, scattered
from pg_tensile.planning.policies.swapadvisor.planner import decide
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.examples import examples
from tests.unit.graphs import dice, random_order, traces, valid_plans
from tests.unit.handmade import network, trace_of
from tests.unit.unrolled import unrolled

READ, CREATE = Mode.READ, Mode.CREATE
UNIT = replace(RTX_A6000, transfer_latency_us=0.0).with_link(1e6)  # a byte a µs
BOTH_WAYS = replace(UNIT.with_link(2e8, 1e8, 0.7), transfer_latency_us=0.5, handover_us=0.25)


def plan_swaps(
    trace: Trace, profile, budget: int, allocation: Allocation | None = None, distance: float = 1.0
) -> Plan | None:
    """Return the planner's plan with times for its transfers; None if there is none within the budget."""
    without_times = decide(trace, profile, budget, allocation, distance)
    if without_times is None or footprint(trace, without_times).device_peak_bytes > budget:
        return None
    return schedule(AccessSequence(trace, without_times), profile, budget)


def planned(trace: Trace, *asked, **more) -> Plan:
    plan = plan_swaps(trace, *asked, **more)
    assert plan is not None
    return plan


def decided(trace: Trace, *asked) -> Plan:
    plan = decide(trace, *asked)
    assert plan is not None
    return plan


def iteration_us(trace: Trace, plan: Plan, profile=UNIT) -> float:
    return simulate([SimulatedJob(trace, plan)], profile)[0].iteration_us


# ---- plans ----


@given(trace=traces(most_operators=20, most_tensors=20), random=dice(), part=st.floats(0, 1))
@examples(20, long=150)
def test_every_plan_is_valid_cyclic_and_within_the_budget(trace, random, part):
    ordered = in_order(trace, np.array(random_order(random, trace), np.int32))
    least, most = least_bytes(trace), footprint(ordered).device_peak_bytes
    budget = int(least + part * (most - least))
    sizes = distinct_sizes(trace)
    places = None
    if sizes.size and random.random() < 0.7:
        places = scattered(trace, sizes, budget, np.random.default_rng(random.randrange(1000)))
    plan = planned(ordered, BOTH_WAYS, budget, places, random.choice((0.0, 1.0, 3.0)))
    validate(ordered, plan)  # from the plan's own boundary state, in which it has to end
    assert footprint(ordered, plan).device_peak_bytes <= budget


@given(trace=traces(most_operators=20, most_tensors=20))
def test_there_is_no_plan_below_the_largest_operator(trace):
    assert plan_swaps(trace, UNIT, least_bytes(trace) - 1) is None
    assert plan_swaps(trace, UNIT, footprint(trace).device_peak_bytes) is not None


def test_where_everything_fits_nothing_is_swapped():
    trace = network(6)
    plan = planned(trace, UNIT, footprint(trace).device_peak_bytes)
    assert len(plan) == 0


def test_what_is_needed_farthest_in_the_future_goes():
    """Tensors 1, 2 and 3 are made in turn; 2 is needed last."""
    makes = [(10, {tensor: CREATE}) for tensor in (1, 2, 3)]
    reads = [(10, {tensor: READ}) for tensor in (1, 3, 2)]
    trace = trace_of(*makes, *reads, sizes=(0, 10, 10, 10))
    plan = planned(trace, UNIT, 20, distance=0.0)
    assert {event.tensor for event in plan.events} == {2}
    assert [event.kind for event in plan.events] == [EventKind.SWAP_OUT, EventKind.SWAP_IN]


def test_what_was_used_just_now_stays_if_something_else_can_go():
    """As above, but 2 is used right before 3 needs room, and its copy takes 10 µs."""
    makes = [(10, {1: CREATE}), (10, {2: CREATE}), (10, {3: CREATE})]
    reads = [(10, {tensor: READ}) for tensor in (3, 1, 2)]
    trace = trace_of(*makes, *reads, sizes=(0, 10, 10, 10))
    gone = [decided(trace, UNIT, 20, None, distance).events[0].tensor for distance in (0.0, 1.0)]
    assert gone == [2, 1]


def test_parameters_that_are_there_at_the_end_are_there_at_the_start():
    trace = trace_of(*[(10, {tensor: READ}) for tensor in (1, 2, 3)], sizes=(0, 10, 10, 10), persistent=3)
    plan = planned(trace, UNIT, 20)
    resident = boundary(trace, plan).device
    assert 1 <= len(resident) <= 2
    validate(trace, plan)
    timeline = simulate([SimulatedJob(trace, plan)], UNIT)[0]
    assert timeline.bytes_out == 0  # nothing writes them
    assert timeline.bytes_in <= 20


def test_a_class_takes_the_place_of_its_own():
    """A small tensor makes room for a third one of its class, not the large tensor that is needed last."""
    makes = [(10, {tensor: CREATE}) for tensor in (1, 2, 3, 4)]
    reads = [(10, {tensor: READ}) for tensor in (4, 2, 1, 3)]
    trace = trace_of(*makes, *reads, sizes=(0, 10, 10, 20, 10))
    plain = decided(trace, UNIT, 40, None, 0.0)
    classes = decided(trace, UNIT, 40, Allocation((0, 1), (2, 1)), 0.0)
    assert plain.events[0].tensor == 3
    assert classes.events[0].tensor == 1


def test_a_large_tensor_finds_room_among_small_ones_of_other_classes():
    makes = [(10, {tensor: CREATE}) for tensor in (1, 2, 3)]
    reads = [(10, {tensor: READ}) for tensor in (1, 2)]
    trace = trace_of(*makes, (10, {4: CREATE}), (10, {4: READ}), *reads, (1, {3: READ}), sizes=(0, 10, 10, 10, 25))
    assert plan_swaps(trace, UNIT, 34, Allocation((0, 1), (3, 0))) is not None


def branches(right_first: bool) -> Trace:
    """Figure 1: conv1 makes A1 on the left, conv2, conv3 and conv4 make A2, A3 and A4 on the right, concat makes A5; a
    unit of time each, and all that they make is needed long after."""
    names = ["A0", "W1", "W2", "W3", "W4", "A1", "A2", "A3", "A4", "A5"]
    number = {name: place for place, name in enumerate(names)}
    tensors = [
        Tensor(2 if name in ("A2", "A5") else 1, Kind.PARAMETER if name[0] == "W" else Kind.ACTIVATION, name)
        for name in names
    ]
    tensors[0] = tensors[0]._replace(kind=Kind.INPUT)
    left = [("conv1", ["A0", "W1"], "A1")]
    right = [("conv2", ["A0", "W2"], "A2"), ("conv3", ["A2", "W3"], "A3"), ("conv4", ["A3", "W4"], "A4")]
    convolutions = right + left if right_first else left + right
    operators = [Operator("placeholder", Phase.FORWARD, (Access(0, CREATE),), latency_us=1.0)]
    for target, reads, made in [*convolutions, ("concat", ["A1", "A4"], "A5")]:
        accesses = (*(Access(number[name], READ) for name in reads), Access(number[made], CREATE))
        operators.append(Operator(target, Phase.FORWARD, accesses, latency_us=1.0))
    operators.append(Operator("rest", Phase.BACKWARD, (), latency_us=40.0))
    later = [Access(number[name], READ) for name in names if name[0] == "A"]
    operators += [Operator("backward", Phase.BACKWARD, (access,), latency_us=4.0) for access in later]
    operators.append(Operator("output", Phase.OPTIMIZER, ()))
    return Trace.build(operators, tensors)


def test_schedule_and_classes_of_the_papers_example():
    """Figure 1: of a coarse pool (five objects of 2) and a fine one (eight of 1, one of 2), and either branch first,
    the right branch with the fine pool is the fastest."""
    coarse, fine = Allocation((0, 0), (5,)), Allocation((0, 1), (8, 1))
    us = {}
    for right_first in (False, True):
        trace = branches(right_first)
        for name, places in (("coarse", coarse), ("fine", fine)):
            plan = planned(trace, UNIT, 10, places)
            us[right_first, name] = iteration_us(trace, plan)
    fastest = us.pop((True, "fine"))
    assert all(fastest < other for other in us.values())


def test_classes_decide_and_the_budget_binds_whatever_the_counts():
    trace = network(10)
    budget = footprint(trace).device_peak_bytes // 3
    sizes = distinct_sizes(trace)
    plans = [planned(trace, UNIT, budget, Allocation((0,) * len(sizes), (count,))) for count in (1, 2, 4, 100)]
    assert all(footprint(trace, plan).device_peak_bytes <= budget for plan in plans)
    assert len({plan.rows.tobytes() for plan in plans}) > 1


# ---- what they cost ----


@pytest.mark.parametrize("profile", [UNIT, BOTH_WAYS, replace(UNIT, handover_us=3.0)], ids=["lanes", "shared", "late"])
@given(trace=traces(most_operators=16), data=st.data())
@examples(10)
def test_an_evaluation_is_what_the_simulator_says(profile, trace, data):
    timed = roofline.timed(trace, profile)
    plan = data.draw(valid_plans(timed))
    found = evaluate(AccessSequence(timed, plan), profile)
    timeline = simulate([SimulatedJob(timed, plan)], profile)[0]
    assert found.iteration_us == pytest.approx(timeline.iteration_us, rel=1e-9)
    assert found.stalled_us.sum() == pytest.approx(timeline.stall_us, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("policy", ["lru", "capuchin", "joint"])
def test_the_evaluation_of_other_policies_plans_agrees_as_well(policy):
    trace = unrolled(layers=4, steps=4)
    budget = footprint(trace).device_peak_bytes // 2
    for profile in (RTX_A6000.with_link(2e9), RTX_A6000.with_link(2e9, duplex_factor=0.6)):
        plan = POLICIES[policy]({0: trace}, profile, budget)[0]
        expected = simulate([SimulatedJob(trace, plan)], profile)[0]
        found = evaluate(AccessSequence(trace, plan), profile)
        assert found.iteration_us == pytest.approx(expected.iteration_us, rel=1e-9)
        assert expected.stall_us > 0


def test_belady_beats_least_recently_used():
    trace, profile = network(20), RTX_A6000.with_link(10e9)
    budget = footprint(trace).device_peak_bytes // 3
    lru = POLICIES["lru"]({0: trace}, profile, budget)[0]
    plan = planned(trace, profile, budget)
    assert iteration_us(trace, plan, profile) < 0.7 * iteration_us(trace, lru, profile)


def test_random_schedules_have_plans_too():
    trace = unrolled(layers=3, steps=3)
    budget = least_bytes(trace)
    for seed in range(5):
        ordered = in_order(trace, np.array(random_order(Random(seed), trace), np.int32))
        plan = planned(ordered, UNIT, budget)
        assert footprint(ordered, plan).device_peak_bytes <= budget
