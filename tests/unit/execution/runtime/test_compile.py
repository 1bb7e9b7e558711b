"""Programs: operators as generated functions, actions as instructions."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.capture import Call, Slot
from pg_tensile.execution.runtime.compile import Code, Functions, Program, _Source, compile_program
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.memory import host_arena
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Mode
from tests.unit.graphs import A, B, C, F, chain, random_plan, random_trace
from tests.unit.realised import Realised, realise, with_learning_rate

aten = torch.ops.aten
randoms = st.integers(0, 1 << 40).map(Random)
DEVICE = HostDevice(replace(RTX_A6000, kind="host"))


def call(target: Any, *args: Any, results: tuple[int | None, ...], **kwargs: Any) -> Call:
    return Call(target, args, kwargs, results)


def execute(calls: list[Call], values: list[Any], copied: frozenset[int] = frozenset()) -> list[Any]:
    source = _Source()
    source.define("function", calls, copied)
    values = [*values, *[None] * 5]
    source.compile()["function"](values)
    return values


ONE, TEN = torch.arange(6.0).view(2, 3), torch.full((2, 3), 10.0)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call(aten.add.Tensor, Slot(0), Slot(1), results=(2,), alpha=3), ONE + 3 * TEN),
        (call(aten.mul.Tensor, Slot(0), -math.inf, results=(2,)), ONE * -math.inf),
        (call(aten.cat.default, [Slot(0), Slot(1)], 1, results=(2,)), torch.cat([ONE, TEN], 1)),
        (call(aten.index.Tensor, Slot(0), [None, Slot(1)], results=(2,)), ONE[:, :2]),
        (call(aten._to_copy.default, Slot(0), results=(2,), dtype=torch.int64), ONE.long()),
        (call(aten.view.default, Slot(0), [3, 2], results=(2,)), ONE.view(3, 2)),
        (call(aten.linalg_vector_norm.default, Slot(0), 2, [0], True, results=(2,)), ONE.norm(2, 0, True)),
        (call(aten.sum.dim_IntList, Slot(0), (1,), results=(2,)), ONE.sum(1)),
        (call(aten.clamp.default, Slot(0), None, 2.0, results=(2,)), ONE.clamp(max=2)),
        (
            call(aten.pad.default, Slot(0), [1, 1], "constant", 7.5, results=(2,)),
            torch.constant_pad_nd(ONE, [1, 1], 7.5),
        ),
    ],
    ids=lambda value: str(value.target) if isinstance(value, Call) else "",
)
def test_arguments_are_slots_lists_and_constants(made, expected):
    second = torch.tensor([0, 1]) if made.target is aten.index.Tensor else TEN
    found = execute([made], [ONE, second])[2]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_several_results_go_to_their_slots_and_the_others_nowhere():
    made = call(aten.native_layer_norm.default, Slot(0), [3], None, None, 1e-5, results=(2, None, 3))
    output, mean, deviation = torch.native_layer_norm(ONE, [3], None, None, 1e-5)
    values = execute([made], [ONE, TEN])
    assert torch.equal(values[2], output)
    assert torch.equal(values[3], deviation)
    assert values[4] is None
    assert not torch.equal(values[3], mean)


def test_lists_of_results_are_flattened():
    values = execute([call(aten.split.Tensor, Slot(0), 2, 1, results=(2, 3))], [ONE, TEN])
    assert torch.equal(values[2], ONE[:, :2])
    assert torch.equal(values[3], ONE[:, 2:])


def test_functions_of_python_may_return_anything():
    made = call(lambda a, options: ([a + 1], None, (a * options[0],)), Slot(0), [2], results=(2, None, 3))
    values = execute([made], [ONE, TEN])
    assert torch.equal(values[2], ONE + 1)
    assert torch.equal(values[3], ONE * 2)


def test_a_call_in_place_defines_nothing_and_later_calls_see_it():
    target = ONE.clone()
    calls = [call(aten.add_.Tensor, Slot(0), 1, results=(None,)), call(aten.neg.default, Slot(0), results=(2,))]
    values = execute(calls, [target, TEN])
    assert values[0] is target
    assert torch.equal(values[2], -(ONE + 1))


def test_a_keyword_may_be_one_of_pythons():
    generator_state = torch.get_rng_state()
    made = Call(aten.random_.default, (Slot(0),), {"generator": None}, (None,))
    target = ONE.clone()
    execute([made], [target, TEN])
    torch.set_rng_state(generator_state)
    assert torch.equal(target, ONE.clone().random_())
    taking_from = Call(lambda **options: options["from"], (), {"from": Slot(1)}, (2,))
    assert execute([taking_from], [ONE, TEN])[2] is TEN


def test_statistics_are_copied_for_an_operator_that_is_executed_again():
    mean, variance = torch.zeros(3), torch.ones(3)
    arguments = (Slot(0), None, None, Slot(1), Slot(2), True, 0.1, 1e-5)
    made = Call(aten.native_batch_norm.default, arguments, {}, (3, None, None))
    values = execute([made], [ONE, mean, variance], frozenset({1, 2}))
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(variance, torch.ones(3))
    assert torch.equal(values[3], torch.native_batch_norm(ONE, None, None, mean, variance, True, 0.1, 1e-5)[0])
    assert not torch.equal(mean, torch.zeros(3))


# ---- instructions ----


def draw(random: Random) -> tuple[Realised, Plan]:
    realised = realise(with_learning_rate(random_trace(random)), random)
    return realised, random_plan(random, realised.trace)


def compiled(realised: Realised, plan: Plan = NO_EVENTS, delays_in_program: bool = False) -> Program:
    functions = Functions(realised.captured, DEVICE)
    sequence = AccessSequence(realised.trace, plan)
    return compile_program(functions, sequence, host_arena(realised.trace, plan), delays_in_program)


@settings(max_examples=100, deadline=None)
@given(randoms)
def test_instructions_are_the_actions_one_for_one(random):
    realised, plan = draw(random)
    program = compiled(realised, plan)
    actions = program.sequence.actions()
    assert [tuple(action) for action in actions] == [(i.code, i.step, i.tensor, i.event) for i in program.instructions]
    delays = [event.delay_us for event in plan.events]
    assert all(i.delay_us == (delays[i.event] if i.event >= 0 else 0) for i in program.instructions)


@settings(max_examples=100, deadline=None)
@given(randoms)
def test_works_account_for_every_byte_of_the_footprint(random):
    realised, plan = draw(random)
    program = compiled(realised, plan)
    sequence = program.sequence
    sizes = realised.trace.tensor_bytes
    there = {tensor: int(sizes[tensor]) for tensor in sequence.boundary.device}
    for code, step, tensor, work, *_ in program.instructions:
        if work is not None:
            assert sum(there.values()) + work.bytes == sequence.footprint[step]
            there.update(work.created)
        elif code in (Code.COPY_IN, Code.PASSIVE_IN):
            there[tensor] = int(sizes[tensor])
        elif code in (Code.FREE, Code.WAIT_OUT):
            del there[tensor]
    assert there.keys() == sequence.boundary.device


@settings(max_examples=100, deadline=None)
@given(randoms)
def test_delayed_copies_keep_allocations_and_deadlines_where_they_are(random):
    realised, plan = draw(random)
    latencies = [float(random.choice((1, 20))) for _ in range(realised.trace.operator_count)]
    captured = replace(realised.captured, trace=realised.trace.with_latencies(latencies))
    realised = realised._replace(captured=captured)
    program = compiled(realised, plan, delays_in_program=True)
    assert all(instruction.delay_us == 0 for instruction in program.instructions)
    moved = [i for i in program.instructions if i.code not in (Code.COPY_OUT, Code.COPY_IN, Code.ALLOCATE)]
    others = [tuple(a) for a in program.sequence.actions() if a.kind not in (Code.COPY_OUT, Code.COPY_IN)]
    assert [(i.code, i.step, i.tensor, i.event) for i in moved] == others
    place = {(i.code, i.event): at for at, i in enumerate(program.instructions)}
    for (code, event), at in place.items():
        if code is Code.COPY_IN:
            assert place.get((Code.ALLOCATE, event), at - 1) < at < place[Code.WAIT_IN, event]
        elif code is Code.COPY_OUT:
            assert at < place[Code.WAIT_OUT, event]


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
    gone = {(i.tensor, i.step): i.keeps for i in program.instructions if i.code in (Code.FREE, Code.WAIT_OUT)}
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
