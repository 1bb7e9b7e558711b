"""Making tensors again in place of swaps: what, when, and that the plans stay valid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.shares import least_bytes
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import in_order
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.swapadvisor import individuals
from pg_tensile.planning.policies.swapadvisor.individuals import Breeder, Individual
from pg_tensile.planning.policies.swapadvisor.planner import decide
from pg_tensile.planning.policies.swapadvisor.recompute import with_recomputations
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.graphs import dice, random_order, traces
from tests.unit.handmade import trace_of

READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE
UNIT = replace(RTX_A6000, transfer_latency_us=0.0, launch_us=0.0).with_link(1e6)  # a byte a µs
CELL, TANH, LARGE, OTHER = 1, 2, 3, 4


def lstm(*backward: dict[int, Mode], tanh_us: float = 1.0, forward: tuple[dict[int, Mode], ...] = ()) -> Trace:
    """A cell and its tanh of 10 bytes each, then something for which both have to go, then what reads them."""
    operators = [(10.0, {CELL: CREATE}), (tanh_us, {CELL: READ, TANH: CREATE}), *((10.0, each) for each in forward)]
    operators += [(10.0, {LARGE: CREATE}), (10.0, {LARGE: READ, OTHER: CREATE}), *((10.0, each) for each in backward)]
    return trace_of(*operators, sizes=(0, 10, 10, 30, 10))


def events_of(trace: Trace, budget: int = 40) -> tuple[list[Event], list[Event]]:
    """Return the events of the swapping plan, and of the plan with recomputations; check both."""
    plan = decide(trace, UNIT, budget, None, 0.0)
    assert plan is not None
    other = with_recomputations(AccessSequence(trace, plan), UNIT, budget)
    validate(trace, other)
    return list(plan.events), list(other.events)


def of(events: list[Event], tensor: int) -> list[tuple[EventKind, int, int]]:
    return [(event.kind, event.trigger, event.deadline) for event in events if event.tensor == tensor]


def test_what_is_made_of_a_tensor_that_comes_back_before_it_is_made_again():
    trace = lstm({CELL: READ, OTHER: READ}, {TANH: READ, OTHER: READ})
    before, after = events_of(trace)
    assert of(before, TANH) == [(EventKind.SWAP_OUT, 2, 2), (EventKind.SWAP_IN, 5, 6)]
    assert of(after, CELL) == of(before, CELL) == [(EventKind.SWAP_OUT, 2, 2), (EventKind.SWAP_IN, 4, 5)]
    assert of(after, TANH) == [(EventKind.RECOMPUTE, 5, 6)]


def test_it_is_made_before_its_input_goes_and_kept():
    trace = lstm({CELL: READ, OTHER: READ}, {OTHER: READ}, {TANH: READ, OTHER: READ})
    _, after = events_of(trace)
    assert of(after, TANH) == [(EventKind.RECOMPUTE, 5, 7)]


def test_an_input_that_the_same_operator_reads_comes_an_operator_earlier():
    trace = lstm({OTHER: READ}, {CELL: READ, TANH: READ})
    before, after = events_of(trace)
    assert of(before, CELL)[1] == (EventKind.SWAP_IN, 5, 6)
    assert of(after, CELL)[1] == (EventKind.SWAP_IN, 4, 5)
    assert of(after, TANH) == [(EventKind.RECOMPUTE, 5, 6)]


def test_what_takes_longer_than_its_copy_is_swapped():
    reads = {CELL: READ, OTHER: READ}, {TANH: READ, OTHER: READ}
    before, after = events_of(lstm(*reads, tanh_us=9.0))
    assert after == before
    assert events_of(lstm(*reads, tanh_us=5.0))[1] != before  # half of it


def test_an_input_that_has_changed_makes_nothing():
    reads = {CELL: READ, OTHER: READ}, {TANH: READ, OTHER: READ}
    before, after = events_of(lstm(*reads, forward=({CELL: WRITE},)))
    assert after == before
    assert EventKind.SWAP_IN in {event.kind for event in before if event.tensor == TANH}


def test_statistics_that_the_operator_changes_have_to_be_there():
    """They come back after the tensor is needed."""
    statistics = 5
    reads = {CELL: READ, OTHER: READ}, {TANH: READ, OTHER: READ}, {statistics: READ}
    makes = {CELL: CREATE, statistics: CREATE}, {CELL: READ, statistics: Mode.STATS, TANH: CREATE}
    large = {LARGE: CREATE}, {LARGE: READ, OTHER: CREATE}
    trace = trace_of(*((1.0, each) for each in (*makes, *large, *reads)), sizes=(0, 10, 10, 30, 10, 10))
    before, after = events_of(trace)
    assert {event.tensor for event in before} >= {CELL, TANH, statistics}
    assert after == before


def test_without_room_until_it_is_needed_it_is_swapped():
    """The cell is there long before its tanh is needed, and something large in between."""
    reads = {CELL: READ, OTHER: READ}, {OTHER: READ, LARGE: READ}, {TANH: READ, OTHER: READ}
    before, after = events_of(lstm(*reads))
    assert after == before
    assert of(before, TANH)


def made_again(events: list[Event]) -> set[int]:
    return {event.tensor for event in events if event.kind is EventKind.RECOMPUTE}


def test_what_is_kept_for_one_leaves_less_room_for_the_next():
    """Two are made of the cell; while something passes by there is room for one of them."""
    other, passing = 5, 6
    makes = {CELL: CREATE}, {CELL: READ, TANH: CREATE}, {CELL: READ, other: CREATE}
    large = {LARGE: CREATE}, {LARGE: READ, OTHER: CREATE}
    reads = {CELL: READ, OTHER: READ}, {OTHER: READ, passing: CREATE}, {TANH: READ, other: READ, OTHER: READ}
    trace = trace_of(*((1.0, each) for each in (*makes, *large, *reads)), sizes=(0, 10, 10, 30, 10, 10, 20))
    _, after = events_of(trace)
    assert len(made_again(after)) == 1
    assert footprint(trace, Plan.build(after)).device_peak_bytes <= 40


def test_an_input_that_comes_earlier_takes_room_there():
    """Two tensors and what each is made of are read at once, and before that there is room for one input."""
    cell, tanh = 5, 6
    makes = {CELL: CREATE}, {CELL: READ, TANH: CREATE}, {cell: CREATE}, {cell: READ, tanh: CREATE}
    large = {LARGE: CREATE}, {LARGE: READ, OTHER: CREATE}
    reads = {OTHER: READ}, dict.fromkeys((CELL, TANH, cell, tanh), READ)
    us = 10.0, 1.0, 10.0, 1.0, *[10.0] * 4
    trace = trace_of(*zip(us, (*makes, *large, *reads), strict=True), sizes=(0, 10, 10, 30, 10, 10, 10))
    workspace = np.zeros(trace.operator_count, np.int64)
    workspace[7] = 20  # of what reads OTHER
    trace = trace.with_latencies(trace.latency_us, workspace)
    _, after = events_of(trace)
    assert len(made_again(after)) == 1
    assert footprint(trace, Plan.build(after)).device_peak_bytes <= 40


def test_transfers_are_timed_again_with_what_operators_wait(monkeypatch):
    """In a plan with repeated operators as well."""
    seen: list[tuple[AccessSequence, Plan]] = []

    def spy(sequence, *limits):
        seen.append((sequence, schedule(sequence, *limits)))
        return seen[-1][1]

    monkeypatch.setattr(individuals, "schedule", spy)
    trace = lstm({CELL: READ, OTHER: READ}, {TANH: READ, OTHER: READ})
    Breeder(trace, UNIT, 40).make(Individual(np.arange(trace.operator_count, dtype=np.int32), distance=0.0))
    assert [len(made_again(list(plan.events))) for _, plan in seen] == [0, 0, 1, 1]
    for (first, plan), (second, _) in (seen[:2], seen[2:]):
        waits_us = evaluate(AccessSequence(trace, plan), UNIT).stalled_us[1:].sum()
        assert waits_us > 0
        assert second.trace.latency_us.sum() == pytest.approx(first.trace.latency_us.sum() + waits_us)


def test_a_search_makes_tensors_again_only_where_that_is_faster():
    trace = lstm({CELL: READ, OTHER: READ}, {TANH: READ, OTHER: READ})
    order = np.arange(trace.operator_count, dtype=np.int32)

    def kinds(gbps: float) -> set[EventKind]:
        breeder = Breeder(trace, UNIT.with_link(gbps), 40)
        made = breeder.make(Individual(order, distance=0.0))
        assert made is not None
        return {event.kind for event in made.plan.events}

    assert EventKind.RECOMPUTE in kinds(1e6)
    assert EventKind.RECOMPUTE not in kinds(1e12)


@given(trace=traces(most_operators=40, most_tensors=30), random=dice(), part=st.floats(0, 1))
@examples(40, long=150)
def test_every_plan_stays_valid(trace, random, part):
    ordered = in_order(trace, np.array(random_order(random, trace), np.int32))
    least, most = least_bytes(trace), footprint(ordered).device_peak_bytes
    budget = int(least + part * (most - least))
    slow = UNIT.with_link(random.choice((1.0, 1e6, 1e9)))
    plan = decide(ordered, slow, budget, None, random.choice((0.0, 1.0)))
    assert plan is not None
    other = with_recomputations(AccessSequence(ordered, plan), slow, budget)
    validate(ordered, other)
    if footprint(ordered, other).device_peak_bytes <= budget:
        timed = schedule(AccessSequence(ordered, other), slow, budget)
        validate(ordered, timed)
        assert footprint(ordered, timed).device_peak_bytes <= budget
