"""The optimum and the bounds that policies are compared with: known by hand, by trying everything, and never beaten."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.optimum.best import MOST_OPERATORS, TOLERANCE, Optimum, TraceTooLargeError, best
from benchmarks.optimum.program import Decisions, Program, is_ordered
from benchmarks.optimum.rows import Solved
from pg_tensile.errors import BudgetError, InvalidPlanError
from pg_tensile.planning.bounds import least_us
from pg_tensile.planning.bounds.knapsack import cut_us
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.steps import version_after
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Kind, Mode, Trace
from tests.examples import examples
from tests.unit.graphs import dice, planned, random_trace
from tests.unit.handmade import network, trace_of

READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE
OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE
MIB = 1 << 20
LINKS = (1e7, 1e8, 1e9)  # bytes/s
SLOW = RTX_A6000.with_link(1e9)


def us_of(trace: Trace, plan: Plan, profile: DeviceProfile) -> float:
    return simulate([SimulatedJob(trace, plan)], profile)[0].iteration_us


def device_peak(trace: Trace, plan: Plan = NO_EVENTS) -> int:
    return footprint(trace, plan).device_peak_bytes


def program(trace: Trace, profile: DeviceProfile, budget: int) -> Program:
    return Program(roofline.timed(trace, profile), profile, budget)


def kinds(plan: Plan) -> set[EventKind]:
    return {event.kind for event in plan.events}


def detour(made_us: float = 4000.0, before_us: float = 100.0, after_us: float = 100.0) -> Trace:
    """Tensor 1 is in the way of operator 3, which makes tensor 2, and needed again by operator 5; 0 is the batch."""
    return trace_of(
        (made_us, {0: READ, 1: CREATE}),
        (before_us, {0: READ}),
        (1000.0, {2: CREATE}),
        (after_us, {0: READ, 3: CREATE}),
        (100.0, {1: READ, 3: READ}),
        sizes=(MIB, 8 * MIB, 16 * MIB, MIB),
    )


# ---- known by hand ----


def test_the_floor_is_the_largest_working_set_with_its_workspace():
    trace = detour()
    assert floor_bytes(trace) == 16 * MIB
    workspaces = [0, 9 * MIB, 0, 0, 0, 0, 0]
    assert floor_bytes(trace.with_latencies(trace.latency_us, workspaces)) == 18 * MIB


@pytest.mark.parametrize("ask", [least_us, best])
def test_a_budget_below_the_floor_is_refused(ask):
    with pytest.raises(BudgetError, match="no plan needs less") as error:
        ask(detour(), SLOW, 16 * MIB - 1)
    assert error.value.smallest_bytes == 16 * MIB and "operator 3" in error.value.operator


def test_nothing_has_to_go_where_everything_fits():
    trace = detour()
    whole = device_peak(trace)
    compute = float(trace.latency_us.sum())
    assert least_us(trace, SLOW, whole) == pytest.approx(compute)
    assert best(trace, SLOW, whole) == (NO_EVENTS, compute, compute, True)


def check(trace: Trace, profile: DeviceProfile, budget: int, us: float, limit_s: float = 10.0) -> Optimum:
    """The optimum takes `us`."""
    optimum = best(trace, profile, budget, limit_s)
    validate(trace, optimum.plan)
    assert device_peak(trace, optimum.plan) <= budget
    assert optimum.us == us_of(trace, optimum.plan, profile) == pytest.approx(us, rel=1e-4)
    assert optimum.bound_us == pytest.approx(us, rel=1e-4)
    assert least_us(trace, profile, budget) <= us * (1 + 1e-9)
    assert optimum.proved and optimum.gap == 0
    return optimum


def test_swaps_that_are_hidden_cost_nothing():
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    trace = detour(before_us=moved, after_us=moved)
    optimum = check(trace, SLOW, 18 * MIB, float(trace.latency_us.sum()))
    assert kinds(optimum.plan) == {OUT, IN}


def test_what_a_swap_does_not_hide_is_waited_for():
    """Copied out while 100 µs are computed, and back while 100 µs are: the rest are stalls."""
    trace = detour(made_us=100_000.0)
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    us = 100_000.0 + moved + 1000.0 + moved + 100.0
    check(trace, SLOW, 18 * MIB, us)
    assert least_us(trace, SLOW, 18 * MIB) > 0.85 * us


def test_recomputing_is_chosen_where_it_costs_less():
    trace = detour(made_us=4000.0)
    optimum = check(trace, SLOW, 18 * MIB, float(trace.latency_us.sum()) + 4000.0)
    assert kinds(optimum.plan) == {RECOMPUTE}


def test_the_bound_for_any_trace_counts_both_halves_of_an_iteration():
    """Half of tensor 1 may stay in the bound's relaxation: 4 of its 8 MiB are too many."""
    trace = detour(made_us=1e6)
    moved = SLOW.transfer_us(8 * MIB, Direction.OUT)
    found = least_us(trace, SLOW, 21 * MIB)
    one_half = cut_us(trace, SLOW, trace.footprint - 21 * MIB)
    assert one_half == pytest.approx(1e6 + 100 + 1000 + moved / 2, rel=1e-3)
    assert one_half < found < float(trace.latency_us.sum()) + 2 * (moved / 2 - 100)
    assert least_us(trace, SLOW, 18 * MIB) > found


def test_a_chain_is_made_again_from_its_beginning():
    """1 → 2 → 3 are needed from the last to the first."""
    trace = trace_of(
        (10.0, {0: READ, 1: CREATE}), (20.0, {1: READ, 2: CREATE}), (40.0, {2: READ, 3: CREATE}),
        (1000.0, {0: READ, 4: CREATE}), (1000.0, {3: READ, 4: READ, 5: CREATE}), (1000.0, {2: READ, 5: READ}),
        sizes=(MIB, 8 * MIB, 8 * MIB, 8 * MIB, 16 * MIB, MIB),
    )  # fmt: skip
    slow = RTX_A6000.with_link(1e8)
    optimum = check(trace, slow, 32 * MIB, float(trace.latency_us.sum()) + 30.0)  # 3 stays, 2 comes from 1
    assert [event.tensor for event in optimum.plan.events] == [1, 2]


def test_persistent_tensors_are_away_between_iterations():
    trace = trace_of(
        (5000.0, {0: READ, 2: CREATE}), (10.0, {2: READ}), (5000.0, {0: READ}), (10.0, {1: WRITE}), (5000.0, {0: READ}),
        sizes=(MIB, 4 * MIB, 8 * MIB), persistent=1,
    )  # fmt: skip
    moved = SLOW.transfer_us(4 * MIB, Direction.OUT)
    assert moved < 5000
    optimum = check(trace, SLOW, 9 * MIB, float(trace.latency_us.sum()))
    assert {event.tensor for event in optimum.plan.events} == {1}


def test_what_nothing_writes_is_never_copied_out():
    trace = trace_of(
        (100.0, {0: READ, 1: READ}), (1000.0, {2: CREATE}), (100.0, {1: READ}),
        sizes=(MIB, 8 * MIB, 16 * MIB), persistent=1,
    )  # fmt: skip
    profile = RTX_A6000.with_link(1e8, 1e9)
    moved = profile.transfer_us(8 * MIB, Direction.IN)
    check(trace, profile, 18 * MIB, 1200.0 + moved)
    assert least_us(trace, profile, 16 * MIB) == pytest.approx(1200.0 + moved)


def test_recomputing_takes_the_operators_workspace_and_what_lies_there():
    """Tensor 1 can be made again only while tensor 3 is not there, which is then made as well, afterwards."""
    trace = trace_of(
        (4000.0, {0: READ, 1: CREATE}), (100.0, {0: READ, 3: CREATE}), (1000.0, {2: CREATE}), (100.0, {0: READ}),
        (100.0, {1: READ, 3: READ}),
        sizes=(MIB, 8 * MIB, 16 * MIB, 3 * MIB),
    )  # fmt: skip
    trace = trace.with_latencies(trace.latency_us, [0, 9 * MIB, 0, 0, 0, 0, 0])
    optimum = check(trace, RTX_A6000.with_link(1e8), 20 * MIB, float(trace.latency_us.sum()) + 4100.0)
    assert [event.tensor for event in optimum.plan.events] == [1, 3]


# ---- everything tried ----


def ways(trace: Trace, tensor: int) -> Iterator[list[Event]]:
    """All that can be done with one tensor between its accesses: kept, swapped, or made again in each gap."""
    last = trace.operator_count - 1
    span = slice(*trace.tensor_start[tensor : tensor + 2])
    accesses = trace.access_operator[trace.access_by_tensor[span]].tolist()
    options: list[list[list[Event]]] = []
    for here, need in pairwise(accesses):
        ways: list[list[Event]] = [[]]
        for gone in range(here, need):
            for back in range(gone, need):
                ways.append([Event(OUT, tensor, here, gone), Event(IN, tensor, back, need)])
        if not trace.persistent[tensor] and trace.tensor_kind[tensor] != Kind.INPUT:
            for gap in range(here + 1, need):
                version = version_after(trace, np.array([tensor]), np.array([gap]))
                ways.append([Event(RECOMPUTE, tensor, gap, need, int(version[0]))])
        options.append(ways)
    if trace.persistent[tensor] and accesses and accesses[0] > 0:
        away = [
            [Event(IN, tensor, back, accesses[0]), Event(OUT, tensor, accesses[-1], gone)]
            for back in range(accesses[0])
            for gone in range(accesses[-1], last + 1)
        ]
        options.append([[], *away])
    for chosen in product(*options):
        yield [event for events in chosen for event in events]


def fastest(trace: Trace, profile: DeviceProfile, budget: int, most: int) -> float | None:
    """The least time of all plans of that kind; None if there are too many."""
    choices = [list(ways(trace, tensor)) for tensor in range(trace.tensor_count) if trace.tensor_bytes[tensor] > 0]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > most:
        return None
    found = float("inf")
    for chosen in product(*choices):
        events = sorted((event for events in chosen for event in events), key=lambda event: event.kind is RECOMPUTE)
        plan = Plan.build(sorted(events, key=lambda event: (event.kind is RECOMPUTE, event.deadline)))
        try:
            if device_peak(trace, plan) <= budget:
                found = min(found, us_of(trace, plan, profile))
        except InvalidPlanError:
            continue
    return found


def tiny_trace(random: Random, repeatable: bool) -> Trace:
    """Three or four operators between placeholder and output, on up to five tensors. If they are not `repeatable`, all
    that create something change a parameter as well."""
    persistent = 1 if not repeatable else random.randint(0, 1)
    sizes = [random.choice((1, 2, 3)) * MIB for _ in range(1 + persistent)]
    operators: list[tuple[float, dict[int, Mode]]] = []
    for _ in range(random.randint(3, 4)):
        reads = random.sample(range(len(sizes)), k=min(len(sizes), random.randint(1, 2)))
        accesses = {tensor: WRITE if tensor == 1 and persistent and random.random() < 0.5 else READ for tensor in reads}
        if random.random() < 0.7 and len(sizes) < 5 and WRITE not in accesses.values():
            accesses[len(sizes)] = CREATE
            if not repeatable:
                accesses[1] = WRITE
            sizes.append(random.choice((1, 2, 3)) * MIB)
        operators.append((random.choice((200.0, 1000.0, 3000.0)), accesses))
    return trace_of(*operators, sizes=tuple(sizes), persistent=persistent)


@pytest.mark.long
@pytest.mark.parametrize("repeatable", [True, False])
@given(random=dice(), part=st.sampled_from((0.0, 0.3, 0.7)))
@examples(10)
def test_nothing_that_can_be_tried_is_faster(repeatable, random, part):
    least = None
    while least is None:
        trace = tiny_trace(random, repeatable)
        budget = floor_bytes(trace) + round((device_peak(trace) - floor_bytes(trace)) * part)
        if budget < device_peak(trace):
            least = fastest(trace, SLOW, budget, most=1000)
    assume(least < np.inf)
    optimum = best(trace, SLOW, budget, 2.0)
    assert optimum.us <= least * (1 + TOLERANCE)
    assert least_us(trace, SLOW, budget) <= optimum.bound_us <= optimum.us
    assert optimum.proved
    if not repeatable:  # what the program leaves out is about recomputations and about interrupted transfers
        assert optimum.gap < 0.05


# ---- never beaten ----


def linked(random: Random) -> DeviceProfile:
    return RTX_A6000.with_link(random.choice(LINKS), duplex_factor=random.choice((1.0, 0.6)))


@given(case=planned(), random=dice())
def test_no_plan_beats_the_bound_for_any_trace(case, random):
    trace, plan = case
    profile = linked(random)
    assert least_us(trace, profile, device_peak(trace, plan)) <= us_of(trace, plan, profile) * (1 + 1e-9)


def solved(trace: Trace, plan: Plan, profile: DeviceProfile, limit_s: float = 2.0) -> Solved:
    """The program within what the plan takes."""
    budget = device_peak(trace, plan)
    return program(trace, profile, budget).solve(limit_s)


@given(case=planned(), random=dice())
@examples(20)
def test_every_plan_is_a_solution_of_the_program_in_no_more_time(case, random):
    trace, plan = case
    assume(is_ordered(plan))
    profile = linked(random)
    fixed = program(trace, profile, device_peak(trace, plan))
    fixed.fix(Decisions.of(trace, plan))
    outcome = fixed.solve(5.0)
    assert outcome.values is not None and outcome.proved
    assert outcome.bound <= us_of(trace, plan, profile) * (1 + TOLERANCE)


@given(case=planned(8, 9), random=dice())
@examples(10)
def test_no_plan_beats_the_program(case, random):
    trace, plan = case
    assume(is_ordered(plan))
    profile = linked(random)
    assert solved(trace, plan, profile).bound <= us_of(trace, plan, profile) * (1 + TOLERANCE)


@pytest.mark.parametrize("policy", ["joint", "swap_all", "tensile", "recompute_all"])
@given(random=dice(), part=st.floats(0, 1))
@examples(5, long=15)
def test_no_policy_beats_the_bounds(policy, random, part):
    trace = random_trace(random, 12, 14)
    profile = linked(random)
    least = floor_bytes(trace)
    budget = least + round((device_peak(trace) - least) * part)
    try:
        plan = POLICIES[policy]({0: trace}, profile, budget)[0]
    except BudgetError:
        return
    us = us_of(trace, plan, profile) * (1 + TOLERANCE)
    assert is_ordered(plan)
    assert least_us(trace, profile, device_peak(trace, plan)) <= us
    assert solved(trace, plan, profile, 1.0).bound <= us


@given(random=dice(), part=st.floats(0, 1))
@examples(5, long=15)
def test_the_best_plan_is_valid_within_the_budget_and_as_fast_as_it_says(random, part):
    trace, profile = random_trace(random, 10, 12), linked(random)
    least = POLICIES["swap_all"]({0: trace}, profile, 0)[0]
    budget = device_peak(trace, least) + round((device_peak(trace) - device_peak(trace, least)) * max(0.0, part))
    optimum = best(trace, profile, budget, 2.0)
    validate(trace, optimum.plan)
    assert device_peak(trace, optimum.plan) <= budget
    assert optimum.us == us_of(trace, optimum.plan, profile) <= us_of(trace, least, profile)
    assert least_us(trace, profile, budget) <= optimum.bound_us * (1 + 1e-9) <= optimum.us * (1 + 2e-9)


# ---- limits ----


def test_a_trace_that_is_too_large_is_refused():
    trace = network(30)
    assert trace.operator_count > MOST_OPERATORS
    with pytest.raises(TraceTooLargeError, match="too large") as error:
        best(trace, SLOW, device_peak(trace))
    assert str(MOST_OPERATORS) in (error.value.hint or "")


def test_the_time_limit_is_kept_and_the_bound_holds_all_the_same():
    trace = network(12)
    budget = device_peak(trace) // 2
    optimum = best(trace, RTX_A6000.with_link(5e9), budget, 2.0)
    assert not optimum.proved and optimum.gap > 0
    assert trace.latency_us.sum() <= optimum.bound_us < optimum.us
    assert device_peak(trace, optimum.plan) <= budget
