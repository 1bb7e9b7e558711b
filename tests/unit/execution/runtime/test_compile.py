"""Programs: actions as instructions, and delays as places in the program on a device that runs ahead."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.runtime.compile import compile_program, delayed_steps
from pg_tensile.execution.runtime.functions import Functions
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.program import ALLOCATE, Program
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.memory import host_arena
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.examples import examples
from tests.unit.graphs import A, B, C, F, chain, random_plan, random_trace
from tests.unit.realised import Realised, realise, with_learning_rate

randoms = st.integers(0, 1 << 40).map(Random)
DEVICE = HostDevice(replace(RTX_A6000, kind="host"))


def draw(random: Random) -> tuple[Realised, Plan]:
    realised = realise(with_learning_rate(random_trace(random)), random)
    return realised, random_plan(random, realised.trace)


def compiled(realised: Realised, plan: Plan = NO_EVENTS, delays_in_program: bool = False) -> Program:
    functions = Functions(realised.captured, DEVICE)
    sequence = AccessSequence(realised.trace, plan)
    return compile_program(functions, sequence, host_arena(realised.trace, plan), delays_in_program)


@examples(15)
@given(randoms)
def test_instructions_are_the_actions_one_for_one(random):
    realised, plan = draw(random)
    program = compiled(realised, plan)
    actions = program.sequence.actions()
    assert [tuple(action) for action in actions] == [(i.code, i.step, i.tensor, i.event) for i in program.instructions]
    delays = [event.delay_us for event in plan.events]
    assert all(i.delay_us == (delays[i.event] if i.event >= 0 else 0) for i in program.instructions)


@examples(15)
@given(randoms)
def test_works_account_for_every_byte_of_the_footprint(random):
    realised, plan = draw(random)
    program = compiled(realised, plan)
    sequence = program.sequence
    sizes = realised.trace.tensor_bytes
    resident = {tensor: int(sizes[tensor]) for tensor in sequence.boundary.device}
    for code, step, tensor, work, *_ in program.instructions:
        if work is not None:
            assert sum(resident.values()) + work.bytes == sequence.footprint[step]
            resident.update(work.created)
        elif code in (ActionKind.COPY_IN, ActionKind.PASSIVE_IN):
            resident[tensor] = int(sizes[tensor])
        elif code in (ActionKind.FREE, ActionKind.WAIT_OUT):
            del resident[tensor]
    assert resident.keys() == sequence.boundary.device


@examples(15)
@given(randoms)
def test_delayed_copies_keep_allocations_and_deadlines_where_they_are(random):
    realised, plan = draw(random)
    latencies = [float(random.choice((1, 20))) for _ in range(realised.trace.operator_count)]
    captured = replace(realised.captured, trace=realised.trace.with_latencies(latencies))
    realised = realised._replace(captured=captured)
    program = compiled(realised, plan, delays_in_program=True)
    assert all(instruction.delay_us == 0 for instruction in program.instructions)
    moved = [i for i in program.instructions if i.code not in (ActionKind.COPY_OUT, ActionKind.COPY_IN, ALLOCATE)]
    others = [tuple(a) for a in program.sequence.actions() if a.kind not in (ActionKind.COPY_OUT, ActionKind.COPY_IN)]
    assert [(i.code, i.step, i.tensor, i.event) for i in moved] == others
    positions = {(i.code, i.event): position for position, i in enumerate(program.instructions)}
    for (code, event), position in positions.items():
        if code is ActionKind.COPY_IN:
            assert positions.get((ALLOCATE, event), position - 1) < position < positions[ActionKind.WAIT_IN, event]
        elif code is ActionKind.COPY_OUT:
            assert position < positions[ActionKind.WAIT_OUT, event]


def chained(*events: Event) -> tuple[Realised, Program]:
    """The example of graphs.py as a step, and its program under a plan."""
    realised = realise(with_learning_rate(chain()), Random(0), view_share=0.0)
    return realised, compiled(realised, Plan.build(events))


def test_what_comes_back_is_kept_and_what_does_not_is_dropped():
    _, program = chained(
        Event(EventKind.SWAP_OUT, B, 4, 4),
        Event(EventKind.SWAP_IN, B, 4, 5),
        Event(EventKind.SWAP_OUT, A, 2, 2),
        Event(EventKind.RECOMPUTE, A, 5, 6),
        Event(EventKind.SWAP_OUT, F, 4, 4),
        Event(EventKind.SWAP_IN, F, 5, 8),
    )
    gone = {
        (i.tensor, i.step): i.keeps for i in program.instructions if i.code in (ActionKind.FREE, ActionKind.WAIT_OUT)
    }
    assert gone[B, 4] and gone[F, 4]  # swapped in again
    assert not gone[A, 2]  # made again
    assert not gone[B, 5] and not gone[C, 10]  # dead


def test_a_recomputation_makes_its_tensor_and_nothing_else():
    realised, program = chained(Event(EventKind.RELEASE, B, 4, 4), Event(EventKind.RECOMPUTE, B, 4, 5, version=1))
    again = [i.work for i in program.instructions if i.work and program.sequence.step_event[i.step] >= 0]
    assert [work.operator for work in again] == [2, 3]  # its two writers
    assert [work.created for work in again] == [{B: 21}, {}]
    assert [work.scratch for work in again] == [12, 0]  # a copy of the statistics
    assert program.recomputes == 2
    plain = [i.work for i in program.instructions if i.work and program.sequence.step_event[i.step] < 0]
    assert again[0].function is not plain[2].function
    assert realised.trace.access_mode[realised.trace.access_tensor == 2].tolist() == [Mode.STATS]


def test_the_first_change_of_a_persistent_tensor_is_known():
    _, program = chained()
    assert program.first_change == 2  # the running statistics
    assert program.operator_label(program.first_change) == "operator 2 (norm)"


def test_a_program_is_held_against_a_budget():
    realised, program = chained()
    workspace = np.zeros(realised.trace.operator_count, np.int64)
    workspace[4] = 1000
    needed = int(np.max(program.sequence.footprint + workspace[program.sequence.steps]))
    program.check_budget(needed, workspace)
    with pytest.raises(OutOfDeviceMemoryError) as info:
        program.check_budget(needed - 1, workspace)
    assert info.value.operator == "operator 4 (h)"
    assert info.value.requested == 1022  # what it makes, and its workspace
    assert info.value.in_use + info.value.requested == needed
    assert info.value.budget == needed - 1
    assert "1,022 bytes" in str(info.value)


# ---- delays on a device that runs ahead ----

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
    steps = delayed(events)
    assert steps[0] == 4
    assert 2 not in steps


def test_recomputations_count_as_the_steps_they_are():
    """b is made again after operator 4, so operator 5 is step 6; the delay ends while that recomputation runs."""
    events = [Event(OUT, 1, 1, 3), Event(EventKind.RELEASE, 2, 3, 3), Event(IN, 1, 4, 8, delay_us=5)]
    assert delayed([*events, Event(RECOMPUTE, 2, 4, 9)]) == {2: 5}


def test_without_latencies_nothing_is_delayed():
    events = [Event(OUT, 1, 1, 3), Event(IN, 1, 4, 8, delay_us=25)]
    assert delayed(events, latency_us=0.0) == {}
    assert delayed(events) == {1: 7}
