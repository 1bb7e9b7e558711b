"""Traces and plans as text: what a listing shows of an iteration, and the difference between two plans."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.listing import plan_difference, plan_listing
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.text import size
from tests.unit.graphs import A, B, W, chain, dice, random_order, traces, valid_plans

OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE
LINE = re.compile(r" *(\d+)  (forward|backward|optimizer) +\d")


def operators(listing: str) -> list[int]:
    return [int(found[1]) for line in listing.splitlines() if (found := LINE.match(line))]


def test_a_listing_has_operators_with_their_calls_and_events_below_their_triggers() -> None:
    events = [Event(IN, W, 0, 1), Event(OUT, A, 2, 3), Event(IN, A, 4, 6), Event(OUT, W, 7, 9, delay_us=5)]
    plan = Plan.build(events, 3)
    lines = plan_listing(chain(), plan).splitlines()
    assert lines[0].startswith("10 operators, 9 tensors; plan 3: 2 swap_out, 2 swap_in; device peak ")
    place = next(number for number, line in enumerate(lines) if line.endswith("b = norm(a, ~bn.mean)"))
    assert lines[place + 1].strip() == "swap out a, 20 B, freed after 3"
    assert lines[place + 2].endswith("relu_(!b)")
    assert any(line.strip() == "swap in a, 20 B, needed by 6" for line in lines)
    assert any(line.strip() == "swap out fc.weight, 10 B, freed after 9, 5 µs later" for line in lines)


def test_a_brief_listing_has_operators_with_events_only() -> None:
    plan = Plan.build([Event(OUT, A, 2, 3), Event(IN, A, 4, 6)])
    assert operators(plan_listing(chain(), plan, brief=True)) == [2, 4]
    assert operators(plan_listing(chain(), NO_EVENTS, brief=True)) == []


def test_a_recomputation_does_not_change_the_bytes_of_the_operators_own_step() -> None:
    plan = Plan.build([Event(RECOMPUTE, B, 4, 5, version=1)])
    trace = chain()
    first = footprint(trace, plan)
    own = first.bytes[first.steps.tolist().index(2)]
    line = next(line for line in plan_listing(trace, plan).splitlines() if "norm" in line and "=" in line)
    assert f"  {size(own)}  " in line


@given(st.data())
def test_every_plan_has_a_listing_with_all_operators_and_events(data: st.DataObject) -> None:
    trace = data.draw(traces())
    plan = data.draw(valid_plans(trace))
    listing = plan_listing(trace, plan)
    assert sorted(operators(listing)) == list(range(trace.operator_count))
    assert len(listing.splitlines()) == 1 + trace.operator_count + len(plan)


@given(traces(), dice())
def test_operators_stand_in_the_plans_order_by_their_captured_numbers(trace: Trace, random) -> None:
    order = random_order(random, trace)
    assert operators(plan_listing(trace, Plan.build([], order=order))) == order


def test_a_difference_has_the_events_that_one_plan_has_and_the_other_has_not() -> None:
    old = Plan.build([Event(OUT, A, 2, 3), Event(IN, A, 4, 6)], 1)
    new = Plan.build([Event(OUT, A, 2, 3), Event(IN, A, 3, 6)], 2)
    lines = plan_difference(chain(), old, new).splitlines()
    assert lines[:2] == ["--- plan 1", "+++ plan 2"]
    assert lines[3:] == ["-after 4: swap in a, 20 B, needed by 6", "+after 3: swap in a, 20 B, needed by 6"]
    assert plan_difference(chain(), old, old) == ""


@given(traces())
def test_a_trace_prints_as_the_listing_of_an_empty_plan(trace: Trace) -> None:
    assert str(trace) == plan_listing(trace, NO_EVENTS)
    assert repr(trace) == f"<Trace: {trace.operator_count} operators, {trace.tensor_count} tensors, {trace.device}>"


def test_a_plan_prints_its_events() -> None:
    events = [Event(OUT, A, 2, 3, codec=1), Event(IN, A, 4, 6), Event(RECOMPUTE, B, 4, 5, version=1, delay_us=7)]
    assert str(Plan.build(events, 3)).splitlines() == [
        "plan 3: 1 swap_out, 1 swap_in, 1 recompute",
        f"after 2: swap out %{A}, freed after 3, coded by zvc",
        f"after 4: swap in %{A}, needed by 6",
        f"after 4: recompute %{B}, version 1, needed by 5, 7 µs later",
    ]
    assert repr(Plan.build(events, 3)) == "<plan 3: 1 swap_out, 1 swap_in, 1 recompute>"
    assert str(NO_EVENTS) == "plan 0: no events"


def test_a_plan_with_an_order_prints_captured_numbers() -> None:
    plan = Plan.build([Event(OUT, A, 1, 2)], order=[0, 2, 1, 3])
    assert str(plan).splitlines()[1] == f"after 2: swap out %{A}, freed after 1"


def test_a_plan_that_fits_no_trace_prints_as_well() -> None:
    plan = Plan.build([Event(OUT, -1, 7, 99, codec=9)], order=[1, 0])
    assert str(plan).splitlines()[1] == "after 7: swap out %-1, freed after 99, coded by codec 9"


def test_a_plan_of_another_trace_is_refused() -> None:
    with pytest.raises(InvalidPlanError):
        plan_listing(chain(), Plan.build([Event(OUT, 99, 2, 3)]))
