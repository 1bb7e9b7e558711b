"""Delays on a device that runs ahead become places in the program."""

from __future__ import annotations

import numpy as np
import pytest

from pg_tensile.execution.runtime.delays import delayed_steps
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE
TEN_US = 10.0


def trace(latency_us=TEN_US) -> Trace:
    """Operators 1 and 2 make a and b, 8 and 9 read them; each operator takes 10 µs, operator k begins at k * 10."""
    tensors = [Tensor(64, Kind.INPUT), Tensor(64, Kind.ACTIVATION, "a"), Tensor(64, Kind.ACTIVATION, "b")]
    accesses = {0: [(0, Mode.CREATE)], 1: [(0, Mode.READ), (1, Mode.CREATE)], 2: [(0, Mode.READ), (2, Mode.CREATE)]}
    accesses |= {8: [(1, Mode.READ)], 9: [(2, Mode.READ)]}
    operators = [
        Operator(target, Phase.FORWARD, tuple(Access(*pair) for pair in accesses.get(index, [(0, Mode.READ)])))
        for index, target in enumerate(["placeholder", *["aten.a.default"] * 10, "output"])
    ]
    return Trace.build(operators, tensors).with_latencies(np.full(12, latency_us))


def delayed(events: list[Event], latency_us=TEN_US) -> dict[int, int]:
    sequence = AccessSequence(trace(latency_us), Plan.build(events))
    sequence.check()
    return delayed_steps(sequence, sequence.actions())


@pytest.mark.parametrize(
    ("delay_us", "step"),
    [(0, None), (1, 5), (10, 5), (11, 6), (1000, 7)],
    ids=["at the trigger", "next starts before it", "the one after starts just then", "two on", "before the deadline"],
)
def test_a_copy_in_is_asked_for_after_the_latest_operator_that_starts_before_the_delay(delay_us, step):
    events = [Event(OUT, 1, trigger=1, deadline=3), Event(IN, 1, trigger=4, deadline=8, delay_us=delay_us)]
    assert delayed(events) == ({} if step is None else {1: step})


def test_a_copy_out_is_asked_for_before_the_gap_that_waits_for_it():
    events = [Event(OUT, 1, trigger=1, deadline=3, delay_us=1000), Event(IN, 1, trigger=4, deadline=8)]
    assert delayed(events) == {0: 2}


def test_a_copy_that_is_freed_on_the_spot_is_not_delayed():
    events = [Event(OUT, 1, trigger=1, deadline=1, delay_us=1000), Event(IN, 1, trigger=4, deadline=8)]
    assert delayed(events) == {}


def test_a_lane_stays_first_in_first_out():
    events = [Event(OUT, 1, 1, 1), Event(OUT, 2, 2, 3), Event(IN, 1, 4, 8, delay_us=15), Event(IN, 2, 5, 9)]
    assert delayed(events) == {2: 6, 3: 6}


def test_a_deadline_overtakes_a_copy_that_can_wait():
    events = [Event(OUT, 2, 2, 2), Event(OUT, 1, 1, 1), Event(IN, 2, 3, 9, delay_us=1000), Event(IN, 1, 5, 7)]
    assert delayed(events) == {2: 8, 3: 6}


def test_a_delay_of_one_lane_does_not_hold_up_the_other():
    events = [Event(OUT, 1, 1, 6, delay_us=30), Event(OUT, 2, 2, 2), Event(IN, 2, 3, 9), Event(IN, 1, 7, 8)]
    found = delayed(events)
    assert found[0] == 4
    assert 2 not in found


def test_recomputations_count_as_the_steps_they_are():
    """b is made again after operator 4, so operator 5 is step 6; the delay ends while that recomputation runs."""
    events = [Event(OUT, 1, 1, 3), Event(EventKind.RELEASE, 2, 3, 3), Event(IN, 1, 4, 8, delay_us=5)]
    assert delayed([*events, Event(RECOMPUTE, 2, 4, 9)]) == {2: 5}


def test_without_latencies_nothing_is_delayed():
    events = [Event(OUT, 1, 1, 3), Event(IN, 1, 4, 8, delay_us=25)]
    assert delayed(events, latency_us=0.0) == {}
    assert delayed(events) == {1: 7}
