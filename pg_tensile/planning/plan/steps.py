"""Steps of (trace, plan): the operators that are executed, in order (docs/library.md, "Steps").

Each operator is one step, and each recompute event adds, after its trigger, one step for each writer of its tensor.
First the plan's numbers are checked against the trace, because plans come from shared memory and may hold anything.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.planning.plan.plan import CODECS, EventKind, Plan
from pg_tensile.planning.trace.columns import starts
from pg_tensile.planning.trace.recomputations import recomputable_versions
from pg_tensile.planning.trace.trace import Int8s, Int32s, Int64s, Kind, Trace, per_trace

MAX_RECOMPUTED = 1 << 22  # accesses of all recompute steps together: bounds the memory that a plan can make us allocate


class Fault(Enum):
    """Reason why an event is wrong, independent of other events (except TOO_MUCH)."""

    TENSOR = "an unknown tensor"
    TRIGGER = "an unknown trigger operator"
    DEADLINE = "a wrong deadline"
    DELAY = "a negative delay"
    CODEC = "an unknown codec"
    CODED = "a codec where nothing is coded"
    TOO_MUCH = "too much recomputation"
    PERSISTENT = "recomputes a persistent tensor"
    INPUT = "recomputes an input"
    NOT_YET = "recomputes what does not exist yet"
    VERSION = "recomputes another version"
    WRITER = "repeats an operator that writes something else"


class FaultyEvent(NamedTuple):
    event: int
    fault: Fault


class RecomputeSteps(NamedTuple):
    """The r recompute steps, and their q accesses to tensors other than the recomputed one."""

    step: Int64s  # [r]
    writer: Int64s  # [r]: index into `trace.writer_operator`
    event: Int64s  # [r]
    first: NDArray[np.bool_]  # [r]: the first step of its event
    last: NDArray[np.bool_]  # [r]: the last step of its event
    access_row: Int64s  # [q]: index into the arrays above
    access_tensor: Int32s  # [q]
    access_mode: Int8s  # [q]
    access_version: Int32s  # [q]: the version that the writer expects


class Layout(NamedTuple):
    """Positions of operators, events and recomputed operators among S steps; a faulty recompute event has no steps."""

    operator: Int32s  # [S]: the operator executed in each step
    event: Int32s  # [S]: the recompute event of each step; -1 for an operator's own step
    operator_step: Int64s  # [n]: the step of each operator's own execution
    event_step: Int64s  # [events]: the step after which each event takes place
    recompute_steps: RecomputeSteps
    faults: tuple[FaultyEvent, ...]  # the first recompute event that cannot be executed, if any


def find_fault(trace: Trace, plan: Plan) -> FaultyEvent | None:
    """Return the first event whose numbers are impossible on this trace, or None."""
    rows, operators = plan.rows, trace.operator_count
    kind, trigger, deadline = rows["kind"], rows["trigger"], rows["deadline"]
    later = (kind == EventKind.SWAP_IN.value) | (kind == EventKind.RECOMPUTE.value)
    in_order = np.where(later, deadline > trigger, deadline >= trigger) & (deadline < operators)
    in_order &= (kind != EventKind.RELEASE.value) | (deadline == trigger)
    faults = (
        (Fault.TENSOR, (rows["tensor"] < 0) | (rows["tensor"] >= trace.tensor_count)),
        (Fault.TRIGGER, (trigger < 0) | (trigger >= operators)),
        (Fault.DEADLINE, ~in_order),
        (Fault.DELAY, rows["delay_us"] < 0),
        (Fault.CODEC, rows["codec"] >= len(CODECS)),
        (Fault.CODED, (rows["codec"] > 0) & (kind != EventKind.SWAP_OUT.value)),
    )
    firsts = [(int(np.argmax(wrong)), fault) for fault, wrong in faults if wrong.any()]
    return FaultyEvent(*min(firsts, key=lambda first: first[0])) if firsts else None


def version_after(trace: Trace, tensor: Int64s, operator: Int64s) -> Int64s:
    """Return the version of each `tensor` after the `operator` at the same index; -1 before it is created."""
    wanted = tensor * (trace.operator_count + 1) + operator
    written = np.searchsorted(_writer_keys(trace), wanted, "right") - trace.writer_start[tensor]
    return written - ~trace.persistent[tensor]


@per_trace
def _writer_keys(trace: Trace) -> Int64s:
    """Return int64[W]: numbers that ascend by tensor, then by the operator that writes it."""
    owner = np.repeat(np.arange(trace.tensor_count, dtype=np.int64), np.diff(trace.writer_start))
    return owner * (trace.operator_count + 1) + trace.writer_operator


@per_trace
def _writer_accesses(trace: Trace) -> Int64s:
    """Return int64[W + 1]: the number of accesses of all operators that write before each write."""
    return starts(np.diff(trace.access_start)[trace.writer_operator])


def lay_out(trace: Trace, plan: Plan) -> Layout | FaultyEvent:
    """Return the steps of a plan that has passed `find_fault`, or a fault if it recomputes too much."""
    rows, operators = plan.rows, trace.operator_count
    events = np.flatnonzero(rows["kind"] == EventKind.RECOMPUTE.value)
    events, faults = _executable(trace, plan, events)
    writers = rows["version"][events].astype(np.int64) + 1
    start = trace.writer_start[rows["tensor"][events]]
    work = _writer_accesses(trace)
    recomputed = np.cumsum(work[start + writers] - work[start])
    if recomputed.size and recomputed[-1] > MAX_RECOMPUTED:
        return FaultyEvent(int(events[np.argmax(recomputed > MAX_RECOMPUTED)]), Fault.TOO_MUCH)

    added = np.zeros(len(rows) + 1, np.int64)  # steps that the events before each event add
    added[events + 1] = writers
    np.cumsum(added, out=added)
    trigger = rows["trigger"].astype(np.int64)
    event_step = trigger + added[:-1]
    operator_step = np.arange(operators) + added[np.searchsorted(trigger, np.arange(operators), "left")]
    writer = ranges(start, writers)
    step = ranges(event_step[events] + 1, writers)
    event = np.repeat(events, writers)

    operator = np.empty(operators + len(step), np.int32)
    owner = np.full(len(operator), -1, np.int32)
    operator[operator_step] = np.arange(operators)
    operator[step] = trace.writer_operator[writer]
    owner[step] = event
    recompute_steps = _recompute_steps(trace, plan, step, writer, event)
    return Layout(operator, owner, operator_step, event_step, recompute_steps, faults)


def _executable(trace: Trace, plan: Plan, events: Int64s) -> tuple[Int64s, tuple[FaultyEvent, ...]]:
    """Return the recompute events that can be executed, and the first that cannot."""
    tensor = plan.rows["tensor"][events].astype(np.int64)
    version = plan.rows["version"][events].astype(np.int64)
    current = version_after(trace, tensor, plan.rows["trigger"][events].astype(np.int64))
    possible = version < recomputable_versions(trace)[tensor]
    faults = (
        (Fault.PERSISTENT, trace.persistent[tensor]),
        (Fault.INPUT, trace.tensor_kind[tensor] == Kind.INPUT.value),
        (Fault.NOT_YET, current < 0),
        (Fault.VERSION, version != current),
        (Fault.WRITER, ~possible),
    )
    good = possible & (current >= 0) & (version == current)
    if good.all():
        return events, ()
    first = int(np.argmin(good))
    fault = next(fault for fault, wrong in faults if wrong[first])
    return events[good], (FaultyEvent(int(events[first]), fault),)


def _recompute_steps(trace: Trace, plan: Plan, step: Int64s, writer: Int64s, event: Int64s) -> RecomputeSteps:
    operator = trace.writer_operator[writer]
    first = np.diff(event, prepend=-1) != 0
    last = np.diff(event, append=-1) != 0
    start = trace.access_start[operator]
    count = trace.access_start[operator + 1] - start
    access = ranges(start, count)
    row = np.repeat(np.arange(len(step)), count)
    others = trace.access_tensor[access] != plan.rows["tensor"][event[row]]
    access, row = access[others], row[others]
    return RecomputeSteps(
        step, writer, event, first, last,
        row, trace.access_tensor[access], trace.access_mode[access], trace.access_version[access],
    )  # fmt: skip


def ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """Return, for each pair (start, count), the `count` numbers from `start` on, concatenated."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
