"""Messages about invalid plans: every way to break one, by operator, tensor and event."""

from __future__ import annotations

import re

import pytest

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.steps import MAX_RECOMPUTED
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Access, Kind, Operator, Phase, Tensor, Trace
from tests.unit.graphs import CREATE, READ, WRITE, A, B, C, D, E, F, S, W, X, chain

OUT, IN, RECOMPUTE, RELEASE = EventKind


def test_the_chain_can_be_swapped_and_recomputed():
    events = [
        *[Event(RELEASE, A, 2, 2), Event(RECOMPUTE, A, 5, 6)],
        *[Event(OUT, B, 4, 4), Event(IN, B, 4, 5)],
        *[Event(IN, W, 0, 1), Event(OUT, W, 7, 9)],
        *[Event(OUT, F, 4, 6), Event(IN, F, 6, 8)],
    ]
    validate(chain(), Plan.build(events))


# @6 stands for operator 6 with its name, #4 for tensor 4 with its name
Place = tuple[int, int, int]  # operator, tensor, event
CASES: dict[str, tuple[list[Event], Place, str]] = {
    # accesses
    "read after release": (
        [Event(RELEASE, A, 3, 3)],
        (6, A, -1),
        "@6 reads #4, which was released after @3 and not made again",
    ),
    "read after swap-out": (
        [Event(OUT, A, 2, 4)],
        (6, A, -1),
        "@6 reads #4, which was swapped out after @4 and not brought back",
    ),
    "write after swap-out": (
        [Event(OUT, W, 1, 1)],
        (7, W, -1),
        "@7 changes #0, which was swapped out after @1 and not brought back",
    ),
    "read before the swap-in's deadline": (
        [Event(OUT, A, 2, 2), Event(IN, A, 3, 7)],
        (6, A, -1),
        "@6 reads #4, whose swap-in is not due yet",
    ),
    "write during the copy out": (
        [Event(OUT, W, 2, 7)],
        (7, W, -1),
        "@7 changes #0, which is being swapped out",
    ),
    "statistics during the copy out": (
        [Event(OUT, S, 0, 2), Event(IN, S, 3, 4)],
        (2, S, -1),
        "@2 changes #2, which is being swapped out",
    ),
    # swaps
    "swap-in while it is there": (
        [
            Event(OUT, F, 1, 1),
            Event(IN, F, 2, 3),
            Event(OUT, F, 6, 6),
            Event(IN, F, 6, 7),
            Event(OUT, F, 7, 7),
            Event(IN, F, 7, 8),
            Event(IN, F, 6, 7),
        ],
        (6, F, 4),
        "event 4 (swap_in) after @6 is about #1, which is being swapped in already",
    ),
    "swap-in during the copy out": (
        [Event(OUT, A, 2, 4), Event(IN, A, 3, 5)],
        (3, A, 1),
        "event 1 (swap_in) after @3 is about #4, which is being swapped out already",
    ),
    "swap-in without a copy": (
        [Event(RELEASE, A, 3, 3), Event(IN, A, 4, 5)],
        (4, A, 1),
        "event 1 (swap_in) after @4 is about #4, which has no copy on the host",
    ),
    "swap-in of an old copy": (
        [Event(OUT, B, 2, 2), Event(IN, B, 2, 3), Event(RELEASE, B, 4, 4), Event(IN, B, 4, 5)],
        (4, B, 3),
        "event 3 (swap_in) after @4 is about #5, which has no current copy on the host: "
        "@3 changed it after the last one",
    ),
    "swap-out of what is gone": (
        [Event(RELEASE, D, 6, 6), Event(OUT, D, 7, 8)],
        (7, D, 1),
        "event 1 (swap_out) after @7 is about #7, which was released after @6 and not made again",
    ),
    "swap-out of what does not exist yet": (
        [Event(OUT, D, 3, 4)],
        (3, D, 0),
        "event 0 (swap_out) after @3 is about #7, which does not exist yet",
    ),
    "swap-out twice": (
        [Event(OUT, A, 2, 4), Event(OUT, A, 3, 4), Event(IN, A, 4, 5)],
        (3, A, 1),
        "event 1 (swap_out) after @3 is about #4, which is being swapped out already",
    ),
    "swap-out during the swap-in": (
        [Event(OUT, A, 2, 2), Event(IN, A, 2, 5), Event(OUT, A, 4, 5)],
        (4, A, 2),
        "event 2 (swap_out) after @4 is about #4, which is being swapped in already",
    ),
    "release during the copy out": (
        [Event(OUT, C, 5, 7), Event(RELEASE, C, 6, 6), Event(IN, C, 7, 9)],
        (6, C, 1),
        "event 1 (release) after @6 is about #6, which is being swapped out already",
    ),
    "release of what does not exist yet": (
        [Event(RELEASE, E, 5, 5)],
        (5, E, 0),
        "event 0 (release) after @5 is about #8, which does not exist yet",
    ),
    # recomputation
    "recompute a parameter": (
        [Event(RECOMPUTE, W, 3, 4)],
        (3, W, 0),
        "event 0 (recompute) after @3 recomputes #0, which is persistent: no operator creates it",
    ),
    "recompute an input": (
        [Event(RECOMPUTE, X, 3, 4)],
        (3, X, 0),
        "event 0 (recompute) after @3 recomputes #3, which is an input: the placeholder cannot be repeated",
    ),
    "recompute what does not exist yet": (
        [Event(RECOMPUTE, D, 3, 4)],
        (3, D, 0),
        "event 0 (recompute) after @3 recomputes #7, which does not exist yet",
    ),
    "recompute an old version": (
        [Event(RELEASE, B, 4, 4), Event(RECOMPUTE, B, 4, 5, version=0)],
        (4, B, 1),
        "event 1 (recompute) after @4 makes version 0 of #5, which does not have that version there",
    ),
    "recompute what is being copied out": (
        [Event(OUT, B, 3, 4), Event(RECOMPUTE, B, 3, 5, version=1)],
        (2, B, 1),
        "event 1 (recompute) after @3 is about #5, which is being swapped out already",
    ),
    "recompute from what is gone": (
        [Event(RELEASE, A, 2, 2), Event(RECOMPUTE, B, 4, 5, version=1), Event(RECOMPUTE, A, 5, 6)],
        (2, A, 1),
        "event 1 (recompute) repeats @2, which reads #4, which was released after @2 and not made again",
    ),
    "recompute from what is on its way": (
        [Event(OUT, A, 2, 2), Event(IN, A, 3, 6), Event(RECOMPUTE, B, 4, 5, version=1)],
        (2, A, 2),
        "event 2 (recompute) repeats @2, which reads #4, whose swap-in is not due yet",
    ),
    "recompute from what has changed": (
        [Event(RELEASE, A, 6, 6), Event(RECOMPUTE, A, 7, 8)],
        (1, W, 1),
        "event 1 (recompute) repeats @1, which reads #0, which another operator has changed since",
    ),
    "repeat an operator without its statistics": (
        [Event(OUT, S, 2, 3), Event(RECOMPUTE, B, 4, 5, version=1), Event(IN, S, 5, 6)],
        (2, S, 1),
        "event 1 (recompute) repeats @2, which reads #2, which was swapped out after @3 and not brought back",
    ),
    # numbers
    "unknown tensor": (
        [Event(RELEASE, 9, 3, 3)],
        (-1, -1, 0),
        "event 0 (release) names tensor 9, but the trace has 9 tensors",
    ),
    "negative tensor": (
        [Event(RELEASE, -1, 3, 3)],
        (-1, -1, 0),
        "event 0 (release) names tensor -1, but the trace has 9 tensors",
    ),
    "unknown trigger": (
        [Event(RELEASE, A, 10, 10)],
        (-1, A, 0),
        "event 0 (release) has trigger operator 10, but the trace has 10 operators",
    ),
    "negative trigger": (
        [Event(OUT, A, -1, 3)],
        (-1, A, 0),
        "event 0 (swap_out) has trigger operator -1, but the trace has 10 operators",
    ),
    "deadline after the end": (
        [Event(OUT, A, 7, 10)],
        (7, A, 0),
        "event 0 (swap_out) after @7 has deadline operator 10, which must be between its trigger and 9",
    ),
    "deadline before the trigger": (
        [Event(OUT, A, 7, 6)],
        (7, A, 0),
        "event 0 (swap_out) after @7 has deadline operator 6, which must be between its trigger and 9",
    ),
    "swap-in due at its trigger": (
        [Event(IN, A, 7, 7)],
        (7, A, 0),
        "event 0 (swap_in) after @7 has deadline operator 7, which must be after its trigger and at most 9",
    ),
    "recompute due at its trigger": (
        [Event(RECOMPUTE, A, 5, 5)],
        (5, A, 0),
        "event 0 (recompute) after @5 has deadline operator 5, which must be after its trigger and at most 9",
    ),
    "release due later": (
        [Event(RELEASE, A, 7, 8)],
        (7, A, 0),
        "event 0 (release) after @7 has deadline operator 8, which must be its trigger",
    ),
    "negative delay": (
        [Event(OUT, C, 7, 8, delay_us=-1)],
        (7, C, 0),
        "event 0 (swap_out) after @7 has a delay of -1 µs",
    ),
    # the end of the iteration
    "lost at the end": (
        [Event(RELEASE, W, 8, 8)],
        (9, W, -1),
        "#0 is lost: it went after @8 without a current copy on the host",
    ),
    "swapped in at the start without a copy from the end": (
        [Event(IN, W, 0, 1), Event(OUT, W, 1, 1), Event(IN, W, 1, 7)],
        (0, W, 0),
        "event 0 (swap_in) after @0 is about #0, which has no copy on the host",
    ),
    "not brought back for the next iteration": (
        [Event(OUT, W, 8, 8)],
        (9, W, -1),
        "#0 is on the device when an iteration starts but not when it ends: it went after @8",
    ),
    "there at the start only": (
        [Event(OUT, F, 2, 2), Event(RELEASE, W, 0, 0)],
        (1, W, -1),
        "@1 reads #0, which was released after @0 and not made again",
    ),
    "the first of two": (
        [Event(RELEASE, A, 3, 3), Event(RELEASE, B, 4, 4)],
        (5, B, -1),
        "@5 reads #5, which was released after @4 and not made again",
    ),
}


def test_what_is_made_again_while_it_is_there_is_dead_before():
    validate(chain(), Plan.build([Event(OUT, F, 1, 1), Event(IN, F, 2, 3), Event(IN, F, 5, 6)]))
    validate(chain(), Plan.build([Event(RECOMPUTE, B, 3, 4, version=1)]))


def spell(trace: Trace, message: str) -> str:
    message = re.sub(r"@(\d)", lambda found: trace.operator_label(int(found[1])), message)
    return re.sub(r"#(\d)", lambda found: trace.tensor_label(int(found[1])), message)


@pytest.mark.parametrize("case", CASES)
def test_a_bad_plan_is_refused_with_the_first_thing_that_it_breaks(case):
    events, place, message = CASES[case]
    with pytest.raises(InvalidPlanError) as caught:
        validate(chain(), Plan.build(events))
    error = caught.value
    assert (error.operator, error.tensor, error.event) == place
    assert error.message == spell(chain(), message)
    assert error.hint
    if error.event >= 0:
        assert error.detail and str(error.event) in error.detail


def test_an_operator_that_changes_another_tensor_cannot_be_repeated():
    trace = Trace.build(
        [
            Operator("placeholder", Phase.FORWARD, ()),
            Operator("make", Phase.FORWARD, (Access(1, CREATE), Access(0, WRITE))),
            Operator("use", Phase.FORWARD, (Access(1, READ),)),
            Operator("output", Phase.OPTIMIZER, (Access(1, READ),)),
        ],
        [Tensor(4, Kind.BUFFER, "counter"), Tensor(4, Kind.ACTIVATION, "a")],
    )
    with pytest.raises(
        InvalidPlanError, match=r"event 0 .*recomputes tensor 1 \(a\), but one of its writers changes"
    ) as c:
        validate(trace, Plan.build([Event(RECOMPUTE, 1, 2, 3)]))
    assert (c.value.operator, c.value.tensor, c.value.event) == (2, 1, 0)


def test_recomputing_without_end_is_refused_before_memory_is_asked_for():
    """A tensor with 3,000 writers, made again 3,000 times: nine million steps."""
    writers = 3000
    operators = [
        Operator("placeholder", Phase.FORWARD, ()),
        Operator("make", Phase.FORWARD, (Access(0, CREATE),)),
        *[Operator("add_", Phase.FORWARD, (Access(0, WRITE),))] * writers,
        *[Operator("use", Phase.FORWARD, (Access(0, READ),))] * writers,
        Operator("output", Phase.OPTIMIZER, (Access(0, READ),)),
    ]
    trace = Trace.build(operators, [Tensor(4, Kind.ACTIVATION, "a")])
    events = [Event(RECOMPUTE, 0, writers + 1 + k, writers + 2 + k, version=writers) for k in range(writers)]
    with pytest.raises(InvalidPlanError, match=f"the plan recomputes too much: more than {MAX_RECOMPUTED}") as caught:
        validate(trace, Plan.build(events))
    assert caught.value.event == MAX_RECOMPUTED // (writers + 1)
    validate(trace, Plan.build(events[:10]))
