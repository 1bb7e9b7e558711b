"""Graph passes `early_update` and `early_collectives`: use every gradient as soon as it is final.

In the captured order all updates come last, so every gradient lives until then. This pass moves a parameter's update,
with the increment of its step counter, and the update of its average to right after the last operator that it depends
on or that still needs what it changes: a gradient is freed soon after it is computed, and parameter and optimizer state
may leave the device early (TENSILE, section III, schedules across the optimizer phase). With clipping, every update
depends on all gradients, so no update moves far. The collectives of a step of several ranks move up in the same way, in
both passes, and their updates follow them. Operators are only reordered, random operators keep their order, and
no operator moves past another with which it shares a tensor that either changes: the results are the same to the last
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.capture.schema import FUSED_UPDATES
from pg_tensile.execution.distributed.all_reduce import COLLECTIVES
from pg_tensile.planning.latency.collectives import BUCKET
from pg_tensile.planning.trace.trace import Kind, Mode, Operator, Trace

UPDATES = frozenset(str(update) for update in FUSED_UPDATES)
AVERAGE_UPDATE = str(torch.ops.aten.lerp_.Tensor)


def early_update(captured: Captured) -> Captured:
    """Return the same step with its updates moved up. Tensors, slots and persistent values keep their indices."""
    operators = list(captured.trace.operators)
    return _moved(captured, [*_collectives(captured.trace), *_updates(operators, captured.trace)])


def early_collectives(captured: Captured) -> Captured:
    """Return the same step of several ranks with its collectives moved up, as `early_update` does."""
    return _moved(captured, _collectives(captured.trace))


def _collectives(trace: Trace) -> list[list[int]]:
    """Return the operators of each collective, in execution order: a bucket's copy with its beginning, or its end."""
    groups = []
    for index, operator in enumerate(trace.operators):
        if operator.target in COLLECTIVES:
            made = int(trace.tensor_first[operator.accesses[0].tensor])
            groups.append([made, index] if trace.target[made] == BUCKET and made == index - 1 else [index])
    return groups


def _moved(captured: Captured, groups: Sequence[Sequence[int]]) -> Captured:
    """Return the same step with these groups of operators moved up."""
    trace = captured.trace
    operators = list(trace.operators)
    order = _order(operators, groups)
    return replace(
        captured,
        trace=Trace.build([operators[index] for index in order], trace.tensors, trace.device),
        operators=tuple(captured.operators[index] for index in order),
    )


def _updates(operators: Sequence[Operator], trace: Trace) -> list[list[int]]:
    """Return the operators of each update, in execution order.

    An update consists of a kernel, and of the operators before it that depend on optimizer state alone, and on whose
    results it depends: those of the step counter, and of the weight of an average."""
    updates = []
    waiting: dict[int, list[int]] = {}  # tensor → operators of its value that wait for their kernel
    for index, operator in enumerate(operators):
        tensors = [tensor for tensor, _ in operator.accesses]
        if _is_kernel(operator, trace):
            before = {member for tensor in tensors for member in waiting.pop(tensor, ())}
            updates.append([*sorted(before), index])
        elif _prepares(operator, trace, waiting):
            members = {member for tensor in tensors for member in waiting.pop(tensor, ())}
            waiting[tensors[-1]] = [*sorted(members), index]
    return updates


def _is_kernel(operator: Operator, trace: Trace) -> bool:
    """Return whether this is a fused update or that of an average."""
    if operator.target != AVERAGE_UPDATE:
        return operator.target in UPDATES
    return any(
        mode == Mode.WRITE and trace.tensor_kind[tensor] == Kind.OPTIMIZER_STATE for tensor, mode in operator.accesses
    )


def _prepares(operator: Operator, trace: Trace, waiting: Mapping[int, object]) -> bool:
    """Return whether this changes one tensor of optimizer state, or computes a new one from such that wait."""
    if operator.random or not operator.accesses:
        return False
    *read, (tensor, mode) = operator.accesses
    if not read:
        return mode == Mode.WRITE and trace.tensor_kind[tensor] == Kind.OPTIMIZER_STATE
    return mode == Mode.CREATE and all(access == Mode.READ and source in waiting for source, access in read)


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
