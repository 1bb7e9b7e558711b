"""Compiler from an access sequence to a program.

The instructions are the actions of the sequence, one for one and in their order, except for delays on a device that
runs ahead. The host gives work to such a device long before it is executed, so it cannot
start a copy by the clock. Instead the copy is requested later in the program: in the gap of the latest step that
starts, by the trace's latencies, before the delay has passed. Allocation and deadline stay where the plan puts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pg_tensile.errors import InvalidPlanError
from pg_tensile.execution.runtime.functions import Functions
from pg_tensile.execution.runtime.program import ALLOCATE, BEGIN_GROUP, Instruction, Program, Work
from pg_tensile.planning.latency.collectives import exchanges
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import Action, ActionKind
from pg_tensile.planning.plan.memory import Arena
from pg_tensile.planning.plan.plan import EventKind
from pg_tensile.planning.trace.trace import Kind, Mode, Trace

_ALLOCATING = (ActionKind.COPY_IN, ALLOCATE)
_COPIES = (ActionKind.COPY_OUT, ActionKind.COPY_IN)


Placed = tuple[int, int, int, int]  # code, step, tensor, event: an action, or an ALLOCATE


def compile_program(
    functions: Functions,
    sequence: AccessSequence,
    arena: Arena,
    delays_in_program: bool,
    groups: Sequence[Group] = (),
) -> Program:
    """Compile an access sequence of `functions.captured.trace`.

    `arena` is the layout of the plan's host copies. With `delays_in_program`, for devices that ignore delays
    (`Device.runs_ahead`), delayed copies are moved to later gaps. `groups`: of a plan whose memory flows. Raises
    InvalidPlanError."""
    if groups and groups[-1].last + 1 != len(sequence.steps):
        raise InvalidPlanError(f"its groups have {groups[-1].last + 1} steps, the iteration {len(sequence.steps)}")
    actions, keys = sequence.actions(), functions.keys
    placed = [
        (code, step, keys[tensor] if tensor >= 0 else tensor, event)
        for code, step, tensor, event in (_delayed(sequence, actions) if delays_in_program else actions)
    ]
    delays = [0] * len(sequence.plan) if delays_in_program else sequence.plan.rows["delay_us"].tolist()
    codecs = sequence.plan.rows["codec"].tolist()
    works = _works(functions, sequence, actions)
    instructions = [
        Instruction(code, step, tensor, works[step] if code is ActionKind.RUN else None, keeps, event, delay_us, codec)
        for (code, step, tensor, event), keeps in zip(placed, _kept(sequence, keys, works, placed), strict=True)
        for delay_us, codec in ((delays[event], codecs[event]) if event >= 0 else (0, 0),)
    ]
    grouped = tuple(_with_groups(instructions, groups))
    return Program(sequence, grouped, arena, _first_change(sequence), keys, groups)


def _with_groups(instructions: Sequence[Instruction], groups: Sequence[Group]) -> Iterator[Instruction]:
    """Yield the instructions, with a BEGIN_GROUP before the first one that takes memory for a group's steps.

    Swap-ins for a step may allocate in the gap before it."""
    begins = enumerate(groups)
    number, group = next(begins, (0, None))
    for instruction in instructions:
        takes = instruction.step + (instruction.code in _ALLOCATING)  # the first step that it can take memory for
        while group is not None and takes >= group.first:
            yield Instruction(BEGIN_GROUP, max(group.first - 1, 0), number)
            number, group = next(begins, (0, None))
        yield instruction


def _delayed(sequence: AccessSequence, actions: Sequence[Action]) -> list[Placed]:
    """Place delayed copies at the end of a later gap; a delayed swap-in still allocates where the plan has it."""
    delayed = delayed_steps(sequence, actions)
    placed: list[Placed] = []
    due: dict[int, list[Placed]] = {}
    step = 0
    for action in actions:
        for passed in range(step, action.step):
            placed.extend(due.pop(passed, ()))
        step = action.step
        if action.event in delayed and action.kind in _COPIES:
            due.setdefault(delayed[action.event], []).append(action)
            if action.kind is ActionKind.COPY_IN:
                placed.append((ALLOCATE, *action[1:]))
        else:
            placed.append(action)
    return placed


def _kept(sequence: AccessSequence, keys: Sequence[int], works: Sequence[Work], placed: Sequence[Placed]) -> list[bool]:
    """Return for each instruction whether its tensor is next restored by a swap-in, not by being created again."""
    comes_in = dict(zip(keys, sequence.trace.persistent.tolist(), strict=True))  # at the iteration's end
    kept = [False] * len(placed)
    for position in range(len(placed) - 1, -1, -1):
        code, step, tensor, _ = placed[position]
        if code is ActionKind.RUN:
            comes_in.update(dict.fromkeys(works[step].created, False))
        elif code in (ActionKind.PASSIVE_IN, ActionKind.COPY_IN, ALLOCATE):
            comes_in[tensor] = True
        else:
            kept[position] = comes_in[tensor]
    return kept


def _works(functions: Functions, sequence: AccessSequence, actions: Sequence[Action]) -> list[Work]:
    """Return the operator call of each step."""
    landing = _left_while_exchanged(sequence, actions)
    trace, sizes, created_by = sequence.trace, sequence.trace.tensor_bytes.tolist(), _created(sequence.trace)
    steps, events, scratch = sequence.steps.tolist(), sequence.step_event.tolist(), sequence.scratch_bytes.tolist()
    captured = trace.captured_operator.tolist()
    recomputed = {index for index, event in zip(steps, events, strict=True) if event >= 0}
    works = []
    for step, (index, event) in enumerate(zip(steps, events, strict=True)):
        operator, tensors = captured[index], created_by[index]
        if event >= 0:
            tensor = int(sequence.plan.rows["tensor"][event])
            function, tensors = functions.recompute(operator, tensor), [tensor] if tensor in tensors else []
        elif index in recomputed and trace.random[index]:
            function = functions.remembering(operator)
        elif index in landing:
            function = functions.landing(operator)
        else:
            function = functions.plain(operator)
        created = {functions.keys[tensor]: sizes[tensor] for tensor in tensors}
        works.append(Work(function, operator, created, sum(created.values()) + scratch[step], scratch[step]))
    return works


def _left_while_exchanged(sequence: AccessSequence, actions: Sequence[Action]) -> set[int]:
    """Return the operators that begin a collective whose tensor is copied out before the wait for it."""
    copied: dict[int, list[int]] = {}
    for action in actions:
        if action.kind is ActionKind.COPY_OUT:
            copied.setdefault(action.tensor, []).append(action.step)
    step = sequence.operator_step
    return {
        exchange.begin
        for exchange in exchanges(sequence.trace)
        if any(step[exchange.begin] <= at < step[exchange.wait] for at in copied.get(exchange.tensor, ()))
    }


def _created(trace: Trace) -> list[list[int]]:
    """Return the tensors that each operator creates."""
    created: list[list[int]] = [[] for _ in range(trace.operator_count)]
    chosen = trace.access_mode == Mode.CREATE
    for operator, tensor in zip(
        trace.access_operator[chosen].tolist(), trace.access_tensor[chosen].tolist(), strict=True
    ):
        created[operator].append(tensor)
    return created


def _first_change(sequence: AccessSequence) -> int:
    trace = sequence.trace
    changes = np.isin(trace.access_mode, (Mode.WRITE, Mode.STATS)) & (
        trace.tensor_kind[trace.access_tensor] <= Kind.CONSTANT
    )
    changing = np.zeros(trace.operator_count, np.bool_)
    changing[trace.access_operator[changes]] = True
    steps = np.flatnonzero(changing[sequence.steps] & (sequence.step_event < 0))
    return int(steps[0]) if steps.size else len(sequence.steps)


def delayed_steps(sequence: AccessSequence, actions: Sequence[Action]) -> dict[int, int]:
    """Return the step in whose gap each delayed copy is requested, by event; events without delay are left out.

    A copy is requested in the last gap before its deadline at the latest. Each lane stays first in, first out: a copy
    is not requested before an earlier one of its lane, unless its deadline requires it. Without latencies nothing is
    delayed."""
    rows = sequence.plan.rows
    latency = sequence.trace.latency_us[sequence.steps]
    if not rows["delay_us"].any() or not latency.any():
        return {}
    end = np.cumsum(latency)
    begin = end - latency
    delayed = {}
    latest_of = dict.fromkeys(EventKind, 0)  # the step of each lane's latest copy
    for action in actions:
        if action.kind not in _COPIES:
            continue
        row = rows[action.event]
        due = end[action.step] + row["delay_us"]
        timely = int(np.searchsorted(begin, due, "left")) - 1
        latest = int(sequence.operator_step[row["deadline"]]) - 1
        kind = EventKind(row["kind"])
        step = max(action.step, min(max(timely, latest_of[kind]), latest))
        latest_of[kind] = max(latest_of[kind], step)
        if step > action.step:
            delayed[action.event] = step
    return delayed
