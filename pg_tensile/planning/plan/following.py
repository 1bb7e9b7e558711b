"""Plans for the further graphs of a job: the last, smaller batch of an epoch, and validation.

They share the persistent tensors of the training step and alternate with it. Their plans therefore start and end in the
boundary state of its plan: changing from one graph to another then moves no tensor that the new one does not use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import transient_arena
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Trace

HOME_ALIGNMENT = 512  # bytes


def following_plan(sequence: AccessSequence, other: Trace, counterparts: Mapping[int, int]) -> Plan:
    """Return the plan of a graph, with the trace `other`, that follows the job's first graph.

    `sequence` is the first graph under its plan, and `counterparts` has, by persistent tensor of `other`, the number of
    the same tensor in the first graph; one that only `other` has is absent, or has a number that is not the first
    graph's. The plan is the first graph's if both graphs have the same structure, else one that swaps in each tensor
    that is off the device when it is needed. What is granted to a job and what is executed both follow from this.
    """
    plan, first = sequence.plan, sequence.captured_trace
    persistent = np.flatnonzero(other.persistent).tolist()
    if all(counterparts.get(tensor) == tensor for tensor in persistent):
        same = reuse_plan(plan, first, other)
        if same is not None:
            return same
    away = set(np.flatnonzero(first.persistent).tolist()) - sequence.boundary.device
    return plan_around(other, [tensor for tensor in persistent if counterparts.get(tensor) in away], plan.generation)


def reuse_plan(plan: Plan, trace: Trace, other: Trace) -> Plan | None:
    """Return `plan` of `trace` if it is also a plan of `other`, else None.

    It is one if `other` has the same structure (targets, phases, accesses, kinds and sizes of persistent tensors) and
    the plan is valid on it.
    """
    if not has_structure(trace, other):
        return None
    try:
        validate(other, plan)
    except InvalidPlanError:
        return None
    return plan


def swapped_persistents(trace: Trace, plan: Plan) -> list[int]:
    """Return the persistent tensors that the plan swaps, in ascending order."""
    rows = plan.rows
    tensors = np.unique(
        rows["tensor"][(rows["kind"] == EventKind.SWAP_OUT.value) | (rows["kind"] == EventKind.SWAP_IN.value)]
    )
    return [int(tensor) for tensor in tensors[trace.persistent[tensors]]]


def host_bytes(graphs: Iterable[tuple[Trace, Plan]]) -> int:
    """Return the host memory that a job's executor needs for its graphs under these plans, in bytes.

    That is a block for each persistent tensor that a plan swaps (tensors of the same kind and name are one), and one
    arena for all other copies, which the graphs use in turn. Raises InvalidPlanError if a plan is not valid.
    """
    homes: dict[tuple[int, str], int] = {}
    arena = 0
    for trace, plan in graphs:
        for tensor in swapped_persistents(trace, plan):
            homes[int(trace.tensor_kind[tensor]), trace.tensor_name[tensor]] = home_bytes(
                int(trace.tensor_bytes[tensor])
            )
        arena = max(arena, transient_arena(AccessSequence(trace, plan)).bytes)
    return sum(homes.values()) + arena


def home_bytes(size: int) -> int:
    """Return the size of the aligned block for a persistent tensor of `size` bytes."""
    return -(-size // HOME_ALIGNMENT) * HOME_ALIGNMENT


def has_structure(trace: Trace, other: Trace) -> bool:
    """Return whether two traces differ at most in the sizes of tensors that are not persistent."""
    if (trace.operator_count, trace.tensor_count) != (other.operator_count, other.tensor_count):
        return False
    columns = ("access_start", "access_tensor", "access_mode", "phase", "random", "tensor_kind")
    if not all(np.array_equal(getattr(trace, column), getattr(other, column)) for column in columns):
        return False
    persistent = trace.persistent
    sizes = np.array_equal(trace.tensor_bytes[persistent], other.tensor_bytes[persistent])
    return sizes and all(trace.target[index] == other.target[index] for index in range(trace.operator_count))


def plan_around(trace: Trace, away: Collection[int], generation: int = 0) -> Plan:
    """Return a plan whose boundary state has the persistent tensors `away` on the host and all others on the device.

    Each tensor of `away` is swapped in right before its first access and swapped out after its last; only those written
    in between are copied out.
    """
    events = []
    for tensor in sorted(away):
        first, last = int(trace.tensor_first[tensor]), int(trace.tensor_last[tensor])
        if first < trace.operator_count:
            events.append(Event(EventKind.SWAP_IN, tensor, first - 1, first))
            events.append(Event(EventKind.SWAP_OUT, tensor, last, last))
    return Plan.build(events, generation)
