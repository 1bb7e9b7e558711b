"""Graph pass `early_update`: update every parameter as soon as its gradient is final.

In the captured order all updates come last, so every gradient lives until then. This pass moves a parameter's update,
with the increment of its step counter, to right after the last operator that it depends on or that still needs what it
changes: a gradient is freed soon after it is computed, and parameter and optimizer state may leave the device early
(TENSILE, section III, schedules across the optimizer phase). With clipping, every update depends on all gradients, so
no update moves far. Operators are only reordered, random operators keep their order, and no operator moves past another
with which it shares a tensor that either changes: the results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.capture.schema import FUSED_UPDATES
from pg_tensile.planning.trace.trace import Kind, Mode, Operator, Trace

UPDATES = frozenset(str(update) for update in FUSED_UPDATES)


def early_update(captured: Captured) -> Captured:
    """Return the same step with its updates moved up. Tensors, slots and persistent values keep their indices."""
    trace = captured.trace
    operators = list(trace.operators)
    order = _order(operators, _updates(operators, trace))
    return replace(
        captured,
        trace=Trace.build([operators[index] for index in order], trace.tensors, trace.device),
        operators=tuple(captured.operators[index] for index in order),
    )


def _updates(operators: Sequence[Operator], trace: Trace) -> list[list[int]]:
    """Return the operators of each update, in execution order.

    An update consists of the operators that only change optimizer state which the fused kernel then reads (the step
    counter), and of the kernel."""
    updates = []
    counters: dict[int, list[int]] = {}  # tensor → operators that changed it and wait for their kernel
    for index, operator in enumerate(operators):
        if operator.target in UPDATES:
            waiting = [counter for tensor, _ in operator.accesses for counter in counters.pop(tensor, ())]
            updates.append([*sorted(waiting), index])
        elif len(operator.accesses) == 1 and not operator.random:
            ((tensor, mode),) = operator.accesses
            if mode == Mode.WRITE and trace.tensor_kind[tensor] == Kind.OPTIMIZER_STATE:
                counters.setdefault(tensor, []).append(index)
    return updates


def _order(operators: Sequence[Operator], updates: Sequence[Sequence[int]]) -> list[int]:
    """Return the order of all operators with each update right after the last operator that it must not pass."""
    moved = {index: number for number, update in enumerate(updates) for index in update}
    accessed: dict[int, int] = {}  # tensor → operator after which it may be changed next
    changed: dict[int, int] = {}  # tensor → operator after which it may be used next
    following: dict[int, list[int]] = {}  # operator → operators moved to right after it
    for index, operator in enumerate(operators):
        if index not in moved:
            _note(operator, index, accessed, changed)
        elif index == updates[moved[index]][-1]:
            update = updates[moved[index]]
            after = max(_barrier(operators[member], accessed, changed) for member in update)
            following.setdefault(after, []).extend(update)
            for member in update:
                _note(operators[member], after, accessed, changed)
    order = []
    for index in range(len(operators)):
        order += [] if index in moved else [index]
        order += following.get(index, [])
    return order


def _barrier(operator: Operator, accessed: dict[int, int], changed: dict[int, int]) -> int:
    """Return the last operator that this one must come after; operator 0, the placeholder, if there is no other."""
    last = (accessed if mode != Mode.READ else changed for _, mode in operator.accesses)
    return max((where.get(tensor, 0) for where, (tensor, _) in zip(last, operator.accesses, strict=True)), default=0)


def _note(operator: Operator, index: int, accessed: dict[int, int], changed: dict[int, int]) -> None:
    for tensor, mode in operator.accesses:
        accessed[tensor] = max(index, accessed.get(tensor, 0))
        if mode != Mode.READ:
            changed[tensor] = max(index, changed.get(tensor, 0))
