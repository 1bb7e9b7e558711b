"""When the transfers of a plan start: swap-outs as soon as the lane can take them, swap-ins as early as there is room.

Each lane serves the transfer with the nearest deadline first. A plan's events say which tensors are away; their
triggers are moved here, in the gaps between the steps, and memory stays within the budget: a swap-out's tensor is on
the device until its deadline anyway, a swap-in's only where it fits.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush

import numpy as np

from pg_tensile.plan import EventKind, Plan
from pg_tensile.profile import DeviceProfile, Direction
from pg_tensile.sequence import AccessSequence
from pg_tensile.trace import Floats, Int64s

AHEAD = 0.25  # of a transfer's time that its swap-in is requested earlier than needed, where there is room


def schedule(sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int, share: float = 1.0) -> Plan:
    """The plan of `sequence` with the triggers of its transfers chosen, for `share` of the link."""
    rows = sequence.plan.rows.copy()
    trace = sequence.trace
    ends = np.cumsum(trace.latency_us[sequence.steps])
    copies = sequence.copies
    us = np.zeros(len(rows))
    for direction, kind in ((Direction.OUT, EventKind.SWAP_OUT), (Direction.IN, EventKind.SWAP_IN)):
        of_kind = rows["kind"][copies.event] == kind
        rate = (profile.out_bytes_per_s, profile.in_bytes_per_s)[direction] * share
        us[copies.event[of_kind]] = profile.transfer_latency_us + copies.bytes[of_kind] * (1e6 / rate)
    _start_outs(rows, us, sequence.operator_step, ends)
    _start_ins(rows, us, sequence, ends, budget_bytes)
    rank = np.where(rows["kind"] == EventKind.RECOMPUTE, 2, np.where(rows["kind"] == EventKind.SWAP_IN, 1, 0))
    order = np.lexsort((np.where(rank == 2, np.arange(len(rows)), rows["deadline"]), rank, rows["trigger"]))
    return Plan(rows[order], sequence.plan.generation)


def _start_outs(rows: np.ndarray, us: Floats, operator_step: Int64s, ends: Floats) -> None:
    """A swap-out starts when the lane is free and no other one that could start has a nearer deadline; it is requested
    when the one before it starts."""
    outs = np.flatnonzero((rows["kind"] == EventKind.SWAP_OUT) & (us > 0))
    ready = ends[operator_step[rows["trigger"][outs]]]
    order = outs[np.argsort(ready, kind="stable")].tolist()
    operator_ends = ends[operator_step].tolist()
    waiting: list[tuple[int, int]] = []
    at = before = 0.0
    place = 0
    while place < len(order) or waiting:
        if not waiting:
            at = max(at, operator_ends[rows["trigger"][order[place]]])
        while place < len(order) and operator_ends[rows["trigger"][order[place]]] <= at:
            heappush(waiting, (int(rows["deadline"][order[place]]), order[place]))
            place += 1
        deadline, event = heappop(waiting)
        trigger = max(int(rows["trigger"][event]), bisect_right(operator_ends, before) - 1)
        rows["trigger"][event] = min(trigger, deadline)
        before, at = at, at + us[event]


def _start_ins(rows: np.ndarray, us: Floats, sequence: AccessSequence, ends: Floats, budget_bytes: int) -> None:
    trace, operator_step = sequence.trace, sequence.operator_step
    starts = np.concatenate(([0.0], ends[:-1]))
    operator_ends = ends[operator_step].tolist()
    memory = sequence.footprint + trace.workspace_bytes[sequence.steps]
    ins = np.flatnonzero((rows["kind"] == EventKind.SWAP_IN) & (us > 0))
    ins = ins[np.argsort(rows["deadline"][ins], kind="stable")]
    earliest = _earliest(rows, ins)
    target = np.zeros(len(ins), np.int64)
    following = np.inf
    for place in range(len(ins) - 1, -1, -1):
        event = ins[place]
        end = min(following, starts[operator_step[rows["deadline"][event]]])
        following = end - us[event]
        target[place] = bisect_right(operator_ends, following - AHEAD * us[event]) - 1
    target = np.minimum(np.maximum(target, earliest), rows["deadline"][ins] - 1)
    for later in (True, False):
        for place, event in enumerate(ins.tolist()):
            tensor_bytes, trigger, wanted = (
                int(trace.tensor_bytes[rows["tensor"][event]]),
                int(rows["trigger"][event]),
                int(target[place]),
            )
            if later and wanted > trigger:
                memory[operator_step[trigger] + 1 : operator_step[wanted] + 1] -= tensor_bytes
                rows["trigger"][event] = wanted
            elif not later and wanted < trigger:
                first, last = operator_step[wanted] + 1, operator_step[trigger] + 1
                full = np.flatnonzero(memory[first:last] + tensor_bytes > budget_bytes)
                if full.size:
                    step = int(first + full[-1])  # the swap-in starts in a gap at or after it
                    wanted = int(np.searchsorted(operator_step, step))
                    if wanted >= trigger:
                        continue
                memory[operator_step[wanted] + 1 : last] += tensor_bytes
                rows["trigger"][event] = wanted


def _earliest(rows: np.ndarray, ins: Int64s) -> Int64s:
    """For each swap-in the gap in which its tensor was freed; 0 if that was in the iteration before."""
    freed: dict[int, list[int]] = {}
    for event in np.flatnonzero(rows["kind"] == EventKind.SWAP_OUT).tolist():
        freed.setdefault(int(rows["tensor"][event]), []).append(int(rows["deadline"][event]))
    earliest = []
    for event in ins.tolist():
        deadline = int(rows["deadline"][event])
        earliest.append(max((each for each in freed.get(int(rows["tensor"][event]), ()) if each < deadline), default=0))
    return np.array(earliest, np.int64)
