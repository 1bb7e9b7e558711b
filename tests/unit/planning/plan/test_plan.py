"""Plans: rows like those in shared memory, any bytes make a plan or a PlanError; the boundary state."""

from __future__ import annotations

import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import InvalidPlanError, PlanError
from pg_tensile.planning.plan.access_sequence import boundary
from pg_tensile.planning.plan.plan import EVENT_ROW, NO_EVENTS, Boundary, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from tests.examples import examples
from tests.repository import REPOSITORY
from tests.unit import graphs
from tests.unit.graphs import A, F, S, W, chain

OUT, IN, RECOMPUTE, RELEASE = EventKind
HEADER = REPOSITORY / "pg_tensile" / "csrc" / "state" / "plan.h"

EVENTS = [
    Event(OUT, 3, trigger=5, deadline=7, delay_us=12),
    Event(IN, 3, trigger=2, deadline=4),
    Event(RECOMPUTE, 1, trigger=2, deadline=3, version=1),
    Event(RELEASE, 1, trigger=1, deadline=1),
]


def events() -> st.SearchStrategy[list[Event]]:
    number = st.integers(-(2**31), 2**31 - 1)
    codec = st.integers(0, 255)
    return st.lists(st.builds(Event, st.sampled_from(EventKind), number, number, number, number, number, codec))


def test_a_row_is_the_struct_of_the_shim():
    """Names, types and order of the C struct; it has no padding (its size is asserted there)."""
    body = re.search(r"typedef struct TensilePlanEvent\s*{(.*?)}", HEADER.read_text(), re.DOTALL)
    assert body
    fields = re.findall(r"^\s*(\w+)\s+(\w+)(?:\[(\d+)\])?;", body[1], re.MULTILINE)
    names = {"trigger_operator": "trigger", "deadline_operator": "deadline"}
    types = {"uint8": "u1", "int32": "<i4", "int64": "<i8"}
    of_c = np.dtype(
        [(names.get(n, n), types[t], (int(c),)) if c else (names.get(n, n), types[t]) for t, n, c in fields]
    )
    assert of_c == EVENT_ROW
    assert EVENT_ROW.itemsize == 32
    kinds = re.search(r"(1 swap_out.*?) \*/", body[1])
    assert kinds and kinds[1] == ", ".join(f"{kind} {kind.label}" for kind in EventKind)


def test_events_are_sorted_by_trigger_and_otherwise_keep_their_order():
    plan = Plan.build(EVENTS, generation=3)
    assert list(plan.events) == [EVENTS[3], EVENTS[1], EVENTS[2], EVENTS[0]]
    assert plan.events[-1] == EVENTS[0]
    assert list(plan.events[1:3]) == EVENTS[1:3]
    assert isinstance(plan.events[0].kind, EventKind)
    assert (len(plan), plan.generation, len(NO_EVENTS)) == (4, 3, 0)


def test_plans_are_equal_by_value():
    assert Plan.build(EVENTS) == Plan.build(list(EVENTS))
    assert hash(Plan.build(EVENTS)) == hash(Plan.build(list(EVENTS)))
    assert Plan.build(EVENTS) != Plan.build(EVENTS, generation=1)
    assert Plan.build(EVENTS) != Plan.build(EVENTS[1:])
    assert NO_EVENTS != "a plan"


def test_a_plan_cannot_be_changed_not_even_through_the_rows_it_was_made_of():
    rows = Plan.build(EVENTS).rows.copy()
    plan = Plan(rows)
    rows["tensor"] = 99
    assert plan == Plan.build(EVENTS)
    with pytest.raises(ValueError, match="read-only"):
        plan.rows["tensor"] = 1


def test_numbers_that_fit_no_row_are_refused():
    for event in (EVENTS[0]._replace(tensor=2**31), EVENTS[0]._replace(delay_us=-(2**31) - 1)):
        with pytest.raises(PlanError, match="do not fit into a row"):
            Plan.build([event])
    for kind in (0, 5, 255):
        with pytest.raises(PlanError, match=f"event 1 of the plan is of unknown kind {kind}"):
            Plan.build([EVENTS[3], EVENTS[0]._replace(kind=kind)])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="do not fit into a row"):
        Plan.build([EVENTS[0]._replace(kind=256)])  # type: ignore[arg-type]
    for generation in (-1, 1 << 63):
        with pytest.raises(PlanError, match="generation"):
            Plan.build([], generation)


def test_rows_of_shared_memory_make_the_plan():
    plan = Plan.build(EVENTS)
    assert Plan.from_rows(plan.rows.tobytes()) == plan
    with pytest.raises(PlanError, match="a plan of 33 bytes is not a number of rows of 32 bytes"):
        Plan.from_rows(bytes(33))
    with pytest.raises(PlanError, match="unknown kind 0"):
        Plan.from_rows(bytes(32))
    with pytest.raises(PlanError, match="unknown kind 1"):  # what must be zero is not
        Plan.from_rows(b"\x01\x00\x00\x07" + bytes(28))


def test_rows_name_their_bytes_for_people():
    trace, plan = chain(), Plan.build([Event(RELEASE, A, 1, 1), Event(RELEASE, 77, 1, 1)])
    assert plan.with_bytes(trace).rows["bytes"].tolist() == [20, 0]
    assert list(plan.with_bytes(trace).events) == list(plan.events)


# ---- orders ----


def test_an_order_is_part_of_a_plan():
    plan = Plan.build(EVENTS, 3, [0, 2, 1, 3])
    assert plan.order is not None and plan.order.dtype == np.int32 and plan.order.tolist() == [0, 2, 1, 3]
    assert plan == Plan.build(EVENTS, 3, np.array([0, 2, 1, 3])) != Plan.build(EVENTS, 3)
    assert hash(plan) == hash(Plan.build(EVENTS, 3, (0, 2, 1, 3)))
    assert Plan.from_rows(plan.rows.tobytes(), 3, plan.order_bytes) == plan
    assert plan.with_bytes(chain()).order_bytes == plan.order_bytes
    with pytest.raises(ValueError, match="read-only"):
        plan.order[1] = 0


def test_the_captured_order_is_none():
    assert Plan.build(EVENTS, 3, range(9)).order is None
    assert Plan.build(EVENTS, 3, []).order is None
    assert Plan.build(EVENTS, 3, range(9)) == Plan.build(EVENTS, 3)
    assert Plan.build(EVENTS, 3).order_bytes == b""


def test_what_is_no_row_of_operators_is_no_order():
    for order in ([[0, 1]], [0.5, 1.0], ["a"], [1, -1], [2**31, 0]):
        with pytest.raises(PlanError, match="order of a plan"):
            Plan.build(EVENTS, 3, order)
    with pytest.raises(PlanError, match="an order of 7 bytes"):
        Plan.from_rows(b"", 0, bytes(7))


# ---- bytes ----


@given(events(), st.integers(0, 2**63 - 1), st.none() | st.integers(0, 9).flatmap(lambda n: st.permutations(range(n))))
def test_every_plan_survives_its_bytes(listed, generation, order):
    plan = Plan.build(listed, generation, order)
    assert Plan.from_bytes(plan.to_bytes()) == plan


def sealed(body: bytes, version: int = 2) -> bytes:
    return struct.pack("<8sII", b"tensileP", version, zlib.crc32(body)) + body


def test_truncated_or_flipped_bytes_are_refused():
    data = Plan.build(EVENTS, 7, [0, 2, 1]).to_bytes()
    assert data == sealed(data[16:])
    for end in range(len(data)):
        with pytest.raises(PlanError):
            Plan.from_bytes(data[:end])
    for place in range(len(data)):
        with pytest.raises(PlanError):
            Plan.from_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    with pytest.raises(PlanError):
        Plan.from_bytes(data + bytes(32))


def test_another_version_is_refused_by_name():
    with pytest.raises(PlanError, match="a plan of format 9 cannot be read") as caught:
        Plan.from_bytes(sealed(bytes(24), version=9))
    with pytest.raises(PlanError, match="a plan of format 1 cannot be read") as caught:
        Plan.from_bytes(sealed(bytes(24), version=1))
    assert caught.value.hint


def test_rows_out_of_order_are_refused():
    rows = Plan.build(EVENTS).rows[::-1].tobytes()
    with pytest.raises(PlanError, match="order of their triggers"):
        Plan.from_bytes(sealed(struct.pack("<QQQ", 0, 4, 0) + rows))


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@examples(100)
def test_any_bytes_make_a_plan_or_an_error(data, generation, count):
    bodies = [
        data,
        struct.pack("<QQ", generation, count) + data,
        struct.pack("<QQ", generation >> 1, len(data) // 32) + data[: len(data) // 32 * 32],
    ]
    for whole in (data, *map(sealed, bodies)):
        try:
            plan = Plan.from_bytes(whole)
        except PlanError:
            continue
        assert plan.to_bytes() == whole


@given(graphs.traces(), events())
@examples(50, long=400)
def test_a_hostile_plan_is_refused_or_accepted_and_nothing_else(trace, listed):
    small = [event._replace(tensor=event.tensor % 20, trigger=event.trigger % 15) for event in listed]
    for hostile in (listed, small, [event._replace(deadline=event.trigger + 1) for event in small]):
        plan = Plan.build([event._replace(delay_us=abs(event.delay_us) >> 1) for event in hostile])
        try:
            validate(trace, plan)
        except InvalidPlanError as error:
            assert str(error)
            assert error.event < len(plan)


# ---- states between iterations ----


def test_the_boundary_follows_from_the_events():
    trace = chain()
    assert boundary(trace, NO_EVENTS) == Boundary(frozenset({W, F, S}), frozenset())
    off = Plan.build([Event(IN, W, 0, 1), Event(OUT, W, 7, 9)])
    assert boundary(trace, off) == Boundary(frozenset({F, S}), frozenset({W}))
    copied = Plan.build([Event(OUT, S, 3, 4), Event(IN, S, 4, 5), Event(OUT, F, 4, 4), Event(IN, F, 6, 8)])
    assert boundary(trace, copied) == Boundary(frozenset({W, F, S}), frozenset({F, S}))
    old = Plan.build([Event(OUT, W, 1, 1), Event(IN, W, 2, 3)])  # written after the copy
    assert boundary(trace, old) == Boundary(frozenset({W, F, S}), frozenset())


def test_another_initial_state_needs_passive_swap_ins():
    trace = chain()
    plan = Plan.build([Event(OUT, W, 2, 2), Event(IN, W, 5, 7)])
    begin = Boundary(frozenset({F, S}), frozenset({W}))
    with pytest.raises(
        InvalidPlanError, match=r"operator 1 \(f\) reads .*is not on the device when the iteration starts"
    ):
        validate(trace, plan, begin)
    validate(trace, plan, begin, passive=True)
    with pytest.raises(InvalidPlanError, match=r"not on the device when the iteration starts"):
        validate(trace, plan, Boundary(frozenset({F, S}), frozenset()), passive=True)


def test_an_initial_state_of_tensors_that_have_none_is_refused():
    for tensor in (A, 9, -1):
        with pytest.raises(InvalidPlanError, match="not a persistent one"):
            validate(chain(), NO_EVENTS, Boundary(frozenset({tensor}), frozenset()))
