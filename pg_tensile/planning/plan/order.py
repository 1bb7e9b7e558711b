"""Orders in which the operators of a trace may be executed (SwapAdvisor, section 4: the schedule).

An order is a permutation of the captured operators: order[k] is the k-th one to be executed. It is valid if every
operator sees each tensor in the state in which it saw it during the capture; then all results are identical to the last
bit. `in_order` returns an ordinary trace, so that all code that takes a trace and a plan also takes a reordered one;
`Trace.captured_operator` keeps the captured index of each operator, for messages and for the runtime.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.plan.steps import ranges
from pg_tensile.planning.trace.trace import Int32s, Int64s, Mode, Trace, per_trace


class Dependencies(NamedTuple):
    """Dependencies among n operators: e distinct pairs, including those that others imply."""

    predecessor_start: Int64s  # [n + 1]: operator i has predecessors[predecessor_start[i] : … [i + 1]]
    predecessors: Int32s  # [e], ascending for each operator
    successor_start: Int64s  # [n + 1]
    successors: Int32s  # [e], ascending for each operator


@per_trace
def dependencies(trace: Trace) -> Dependencies:
    """Return the dependencies among a trace's operators.

    A reader of a tensor follows the preceding writer and precedes the next writer; writers (also of statistics) keep
    their order; the placeholder is first, the output last, and random operators keep their order, so that each sees the
    generator in the captured state.
    """
    count = trace.operator_count
    operators, random = np.arange(count), np.flatnonzero(trace.random)
    pairs = [
        *_through_tensors(trace),
        (np.zeros(count - 1, np.int64), operators[1:]),
        (operators[:-1], np.full(count - 1, count - 1)),
        (random[:-1], random[1:]),
    ]
    before, after = (np.concatenate(column).astype(np.int64) for column in zip(*pairs, strict=True))
    return Dependencies(*_rows(after * count + before, count), *_rows(before * count + after, count))


def _rows(keys: Int64s, count: int) -> tuple[Int64s, Int32s]:
    """Return the starts and the members of `count` rows, from keys row × count + member."""
    keys = np.unique(keys)
    return np.searchsorted(keys, np.arange(count + 1) * count), (keys % count).astype(np.int32)


def _through_tensors(trace: Trace) -> list[tuple[Int32s, Int32s]]:
    """Return pairs (before, after): a write and each access up to the next write, a read and the next write."""
    access = trace.access_by_tensor
    operator, writes = trace.access_operator[access], trace.access_mode[access] != Mode.READ
    count, index = len(access), np.arange(len(access))
    of_tensor = np.repeat(np.arange(trace.tensor_count), np.diff(trace.tensor_start))
    begin, end = trace.tensor_start[of_tensor], trace.tensor_start[of_tensor + 1]
    latest = np.append(-1, np.maximum.accumulate(np.where(writes, index, -1)))[:-1]
    following = np.append(np.minimum.accumulate(np.where(writes, index, count)[::-1])[::-1], count)[1:]
    written, replaced = latest >= begin, ~writes & (following < end)
    return [
        (operator[latest[written]], operator[written]),
        (operator[replaced], operator[following[replaced]]),
    ]


def check_order(trace: Trace, order: ArrayLike) -> None:
    """Raise InvalidPlanError unless `order` (int[n]) is valid on the trace.

    It must contain every operator once, after all operators that it depends on; the error names the first that fails.
    """
    executed, count = np.asarray(order), trace.operator_count
    hint = "The order does not fit the trace: make the plan again."
    if executed.shape != (count,):
        raise InvalidPlanError(f"the order has {executed.size} operators, but the trace has {count}", hint)
    unknown = np.flatnonzero((executed < 0) | (executed >= count))
    if unknown.size:
        number = int(executed[unknown[0]])
        raise InvalidPlanError(f"the order names operator {number}, but the trace has {count} operators", hint)
    times = np.bincount(executed, minlength=count)
    if times.max() > 1:
        twice, missing = int(np.argmax(times > 1)), int(np.argmin(times))
        message = f"the order has {trace.operator_label(twice)} twice, and {trace.operator_label(missing)} not at all"
        raise InvalidPlanError(message, hint, operator=int(trace.captured_operator[twice]))
    position = np.empty(count, np.int64)
    position[executed] = np.arange(count)
    needs = dependencies(trace)
    owner = np.repeat(np.arange(count), np.diff(needs.predecessor_start))
    early = np.flatnonzero(position[needs.predecessors] > position[owner])
    if early.size:
        pair = early[np.argmin(position[owner[early]])]
        _raise_early(trace, int(owner[pair]), int(needs.predecessors[pair]), hint)


def _raise_early(trace: Trace, operator: int, needed: int, hint: str) -> None:
    of = [{access.tensor: access.mode for access in trace.operator(index).accesses} for index in (operator, needed)]
    shared = [tensor for tensor in of[0] if tensor in of[1] and (of[0][tensor] or of[1][tensor])]
    if needed == 0 or operator == trace.operator_count - 1:
        why = "the placeholder comes first" if needed == 0 else "the output comes last"
    elif shared:
        why = f"both access {trace.tensor_label(shared[0])}"
    else:
        why = "random operators keep their order"
    message = f"the order has {trace.operator_label(operator)} before {trace.operator_label(needed)}: {why}"
    number = int(trace.captured_operator[operator])
    raise InvalidPlanError(message, hint, operator=number, tensor=shared[0] if shared else -1)


def in_order(trace: Trace, order: ArrayLike) -> Trace:
    """Return the trace with its operators in `order` (int[n]) and its tensors unchanged.

    Raises InvalidPlanError if the order is not valid on the trace.
    """
    check_order(trace, order)
    executed = np.asarray(order, np.int64)
    count = np.diff(trace.access_start)[executed]
    access = ranges(trace.access_start[executed], count)
    return replace(
        trace,
        access_start=np.append(0, np.cumsum(count)),
        access_tensor=trace.access_tensor[access],
        access_mode=trace.access_mode[access],
        target=trace.target.take(executed),
        signature=trace.signature.take(executed),
        module=trace.module.take(executed),
        source=trace.source.take(executed),
        phase=trace.phase[executed],
        random=trace.random[executed],
        flops=trace.flops[executed],
        operator_bytes=trace.operator_bytes[executed],
        latency_us=trace.latency_us[executed],
        workspace_bytes=trace.workspace_bytes[executed],
        captured_operator=trace.captured_operator[executed],
    )


def as_executed(trace: Trace, plan: Plan) -> Trace:
    """Return the captured trace in the order of `plan`. Raises InvalidPlanError if that is not valid on the trace."""
    return trace if plan.order is None else in_order(trace, plan.order)
