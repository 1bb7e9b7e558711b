"""Plans for the further graphs of a job: the last, smaller batch of an epoch, and validation.

They work on the persistent tensors of the training step, in turns with it. So their plans start and end in the boundary
state of its plan: a turn then moves nothing that it does not use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.memory import host_arena
from pg_tensile.planning.plan.plan import Event, EventKind, Plan, validate
from pg_tensile.planning.trace.trace import Trace

HOME_ALIGNMENT = 512  # bytes


def reuse_plan(plan: Plan, trace: Trace, other: Trace) -> Plan | None:
    """`plan` of `trace` as a plan of `other`, if that has the same structure: the same targets, phases, accesses, kinds
    and sizes of persistent tensors. None: it has another one, or the plan is not valid there."""
    if not has_structure(trace, other):
        return None
    try:
        validate(other, plan)
    except InvalidPlanError:
        return None
    return plan


def transient_events(trace: Trace, plan: Plan) -> Plan:
    """The plan without the swaps of persistent tensors: as valid as before, with the same steps. All that the arena of
    an executor holds, where each persistent tensor that is swapped has a place of its own."""
    rows = plan.rows
    chosen = (rows["kind"] == EventKind.RECOMPUTE) | ~trace.persistent[rows["tensor"]]
    return Plan(rows[chosen], plan.generation, plan.order)


def swapped_persistents(trace: Trace, plan: Plan) -> list[int]:
    """The persistent tensors that the plan swaps, ascending."""
    rows = plan.rows
    tensors = np.unique(rows["tensor"][(rows["kind"] == EventKind.SWAP_OUT) | (rows["kind"] == EventKind.SWAP_IN)])
    return [int(tensor) for tensor in tensors[trace.persistent[tensors]]]


def host_bytes(graphs: Iterable[tuple[Trace, Plan]]) -> int:
    """The host memory that the executor of a job takes for its graphs under these plans: a place for each persistent
    tensor that one of them swaps (the same name is the same tensor), and one arena for all other copies, which the
    graphs use in turns. Raises InvalidPlanError."""
    homes: dict[tuple[int, str], int] = {}
    arena = 0
    for trace, plan in graphs:
        for tensor in swapped_persistents(trace, plan):
            homes[int(trace.tensor_kind[tensor]), trace.tensor_name[tensor]] = home_bytes(
                int(trace.tensor_bytes[tensor])
            )
        arena = max(arena, host_arena(trace, transient_events(trace, plan)).bytes)
    return sum(homes.values()) + arena


def home_bytes(size: int) -> int:
    """What a place for `size` bytes takes."""
    return -(-size // HOME_ALIGNMENT) * HOME_ALIGNMENT


def has_structure(trace: Trace, other: Trace) -> bool:
    """Whether two traces differ in the sizes of tensors that are not persistent at most."""
    if (trace.operator_count, trace.tensor_count) != (other.operator_count, other.tensor_count):
        return False
    columns = ("access_start", "access_tensor", "access_mode", "phase", "random", "tensor_kind")
    if not all(np.array_equal(getattr(trace, column), getattr(other, column)) for column in columns):
        return False
    persistent = trace.persistent
    sizes = np.array_equal(trace.tensor_bytes[persistent], other.tensor_bytes[persistent])
    return sizes and all(trace.target[each] == other.target[each] for each in range(trace.operator_count))


def plan_around(trace: Trace, away: Collection[int], generation: int = 0) -> Plan:
    """A plan that begins and ends with the persistent tensors `away` on the host and all others on the device: each of
    them comes in right before its first access and goes after its last; nothing is copied out that was not written."""
    events = []
    for tensor in sorted(away):
        first, last = int(trace.tensor_first[tensor]), int(trace.tensor_last[tensor])
        if first < trace.operator_count:
            events.append(Event(EventKind.SWAP_IN, tensor, first - 1, first))
            events.append(Event(EventKind.SWAP_OUT, tensor, last, last))
    return Plan.build(events, generation)
