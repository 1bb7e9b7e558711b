"""Keeping tensors on the device where there is room: a plan without some of its swaps and recomputations.

Those that cost the most for the memory that they save are removed first. So a plan that swaps everything becomes one
for any budget, and a plan that was made operator by operator loses what later decisions have made superfluous.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import device_bytes
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Floats, Trace

OUT, IN, RECOMPUTE = EventKind.SWAP_OUT.value, EventKind.SWAP_IN.value, EventKind.RECOMPUTE.value


def least_bytes(trace: Trace) -> int:
    """Return the device memory in bytes of swapping everything; no known plan takes less."""
    return device_bytes(AccessSequence(trace, swaps(trace, idle_intervals(trace))))


def relaxed_swap_all(trace: Trace, budget_bytes: int) -> Plan | None:
    """Return a plan of swaps alone within the budget, workspaces included, or None if that is impossible.

    Tensors with the shortest idle intervals stay first: that takes the least memory for the transfers that it saves.
    """
    sequence = AccessSequence(trace, swaps(trace, idle_intervals(trace)))
    if (sequence.footprint + trace.workspace_bytes).max() > budget_bytes:
        return None
    return relaxed(sequence, budget_bytes, trace.tensor_bytes[sequence.plan.rows["tensor"]].astype(np.float64))


def relaxed(sequence: AccessSequence, budget_bytes: int, cost_us: Floats) -> Plan:
    """Return the plan without those swaps and recomputations for which the budget, workspaces included, has room.

    `cost_us`: float[events], the cost of each event, which removing it saves.
    """
    memory = sequence.footprint + sequence.trace.workspace_bytes[sequence.steps]
    size, plan = sequence.trace.tensor_bytes, sequence.plan
    candidates = []
    for off in _off_device(sequence):
        nbytes, length = int(size[off.tensor]), sum(last - first for first, last in off.spans)
        cost = sum(cost_us[event] for event in off.events)
        candidates.append((cost / max(1, nbytes * length), nbytes, off))
    keeps = np.ones(len(plan), np.bool_)
    for _, nbytes, off in sorted(candidates, key=lambda candidate: candidate[:2], reverse=True):
        parts = [memory[first:last] for first, last in off.spans]
        if all(part.size == 0 or part.max() + nbytes <= budget_bytes for part in parts):
            keeps[list(off.events)] = False
            for part in parts:
                part += nbytes
    return Plan(plan.rows[keeps], plan.generation)


def without_superfluous(plan: Plan, columns: Columns) -> Plan:
    """Return the plan without superfluous recomputations.

    These are recomputations of tensors that nothing reads before they are swapped in or recomputed again.
    """
    rows = plan.rows
    keeps = np.ones(len(rows), np.bool_)
    back: dict[int, int] = {}  # tensor → the gap of its next swap-in or recomputation
    read: set[int] = set()  # tensors that an event needs before that
    columns_of_rows = (rows[name].tolist() for name in ("kind", "tensor", "trigger", "version"))
    for event, (kind, tensor, trigger, version) in reversed(list(enumerate(zip(*columns_of_rows, strict=True)))):
        if kind == OUT:
            read.add(tensor)
            continue
        if kind == RECOMPUTE and tensor not in read:
            accesses = columns.accesses[tensor]
            following = bisect_right(accesses, trigger)
            if following == len(accesses) or accesses[following] > back.get(tensor, columns.operators):
                keeps[event] = False
                continue
        read.discard(tensor)
        back[tensor] = trigger
        if kind == RECOMPUTE:
            recomputation = columns.recomputations.of(tensor, version)
            assert recomputation is not None  # the plan is valid
            read.update(source.tensor for source in recomputation.inputs if not source.is_statistic)
    return Plan(rows[keeps], plan.generation)


class _OffDevice(NamedTuple):
    """A tensor off the device during the steps first … last - 1 of each of `spans`, caused by `events`."""

    tensor: int
    spans: tuple[tuple[int, int], ...]
    events: tuple[int, ...]


def _off_device(sequence: AccessSequence) -> Iterator[_OffDevice]:
    """Yield the intervals off the device of a plan in which each swap-out has a swap-in, and all else is recomputed."""
    kinds: list[int] = sequence.plan.rows["kind"].tolist()
    back: defaultdict[int, list[int]] = defaultdict(list)  # tensor → its swap-ins and recomputations
    gone: defaultdict[int, list[int]] = defaultdict(list)  # tensor → its swap-outs
    for event, (kind, tensor) in enumerate(zip(kinds, sequence.plan.rows["tensor"].tolist(), strict=True)):
        (gone if kind == OUT else back)[tensor].append(event)
    resident: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    of_plan = np.isin(sequence.interval_tensor, list(back))
    columns = (sequence.interval_tensor, sequence.interval_first, sequence.interval_last)
    for tensor, first, last in zip(*(column[of_plan].tolist() for column in columns), strict=True):
        resident[tensor].append((first, last))
    for tensor, intervals in resident.items():
        intervals.sort()
        spans: list[tuple[tuple[int, int], ...]]
        spans = [((before[1] + 1, after[0]),) for before, after in pairwise(intervals)]
        outs = gone[tensor]
        if sequence.trace.persistent[tensor] and intervals[0][0] > 0:  # off the device across the end of the iteration
            spans.insert(0, ((intervals[-1][1] + 1, len(sequence.steps)), (0, intervals[0][0])))
            outs = [*outs[-1:], *outs[:-1]]
        swap_outs = iter(outs)
        for span, event in zip(spans, back[tensor], strict=True):
            yield _OffDevice(tensor, span, (event, next(swap_outs)) if kinds[event] == IN else (event,))
