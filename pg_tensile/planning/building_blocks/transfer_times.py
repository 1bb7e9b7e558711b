"""Start and end times of a plan's transfers: as early, and as long, as there is time and room.

A plan says which tensors are off the device and when they are needed; here every transfer gets its trigger, and
swap-outs more time where nothing else needs the memory yet. Each lane serves the nearest deadline first. Memory stays
within the budget: a tensor swapped out is on the device until its deadline anyway, a swap-in starts earlier only where
its tensor fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from heapq import heappop, heappush

import numpy as np

from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import EventKind, Plan

AHEAD = 0.25  # fraction of its own time by which a swap-in is requested earlier than needed, where there is room

# By kind of event: within a gap, swap-outs come first, which free memory.
RANK = np.zeros(len(EventKind) + 1, np.int64)
RANK[[EventKind.SWAP_IN, EventKind.RECOMPUTE]] = 1, 2


def schedule(sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int, stretch: float = 1.0) -> Plan:
    """Return the plan of `sequence`, which keeps to the budget (workspaces included), with its transfers scheduled.

    `stretch`: factor on the operators' latencies, for an iteration that waits much."""
    timetable = _Timetable(sequence, profile, budget_bytes, stretch)
    timetable.start_outs()
    timetable.start_ins()
    rows = timetable.rows
    rows["trigger"], rows["deadline"] = timetable.trigger, timetable.deadline
    rank = RANK[rows["kind"]]
    order = np.lexsort((np.where(rank == 2, np.arange(len(rows)), rows["deadline"]), rank, rows["trigger"]))
    return Plan(rows[order], sequence.plan.generation, sequence.plan.order)


class _Timetable:
    """Transfers of one plan; times are µs since the start of an iteration in which nothing waits."""

    def __init__(self, sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int, stretch: float) -> None:
        trace = sequence.trace
        self.rows = sequence.plan.rows.copy()
        self.trigger: list[int] = self.rows["trigger"].tolist()  # [events], as the deadline
        self.deadline: list[int] = self.rows["deadline"].tolist()
        self.budget = budget_bytes
        self.step: list[int] = sequence.operator_step.tolist()  # [n]
        self.memory = sequence.footprint + trace.workspace_bytes[sequence.steps]  # [s]
        latency_us = stretch * trace.latency_us[sequence.steps]
        ends = np.cumsum(latency_us)
        starts = ends - latency_us
        self.starts: list[float] = starts[sequence.operator_step].tolist()  # [n]
        self.ends: list[float] = ends[sequence.operator_step].tolist()  # [n]
        self.size: list[int] = trace.tensor_bytes[self.rows["tensor"]].tolist()  # of each event
        self.us = [0.0] * len(self.rows)  # [events]: of its transfer, 0 if it copies nothing
        out_us, in_us = (swap_us(trace, direction, profile) for direction in Direction)
        kinds, out = self.rows["kind"].tolist(), EventKind.SWAP_OUT.value
        for event, tensor, _ in zip(*(column.tolist() for column in sequence.copies), strict=True):
            self.us[event] = (out_us if kinds[event] == out else in_us)[tensor]

    def _transfers(self, kind: EventKind) -> list[int]:
        return [event for event in np.flatnonzero(self.rows["kind"] == kind.value).tolist() if self.us[event] > 0]

    # ---- out ----

    def start_outs(self) -> None:
        """Start each swap-out when the lane is free, the nearest deadline first among those that could start.

        It is requested when the swap-out before it starts.
        """
        trigger, deadline = self.trigger.copy(), self.deadline.copy()
        order = sorted(self._transfers(EventKind.SWAP_OUT), key=lambda event: trigger[event])
        latest = self._latest_frees()
        waiting: list[tuple[int, int]] = []
        now = before = 0.0
        index = 0
        while index < len(order) or waiting:
            if not waiting:
                now = max(now, self.ends[trigger[order[index]]])
            while index < len(order) and self.ends[trigger[order[index]]] <= now:
                heappush(waiting, (deadline[order[index]], order[index]))
                index += 1
            _, event = heappop(waiting)
            requested = max(trigger[event], bisect_right(self.ends, before) - 1)
            self.trigger[event] = min(requested, deadline[event])
            before, now = now, now + self.us[event]
            done = min(bisect_left(self.ends, now), latest[event])
            if done > deadline[event]:
                self._free_later(event, deadline[event], done)

    def _latest_frees(self) -> list[int]:
        """Return for each event the last gap in which its tensor may be freed.

        That is before the tensor comes back, or the iteration ends.
        """
        latest = [len(self.step) - 1] * len(self.rows)
        kinds, tensors, triggers = self.rows["kind"].tolist(), self.rows["tensor"].tolist(), self.trigger
        out = EventKind.SWAP_OUT.value
        back: dict[int, int] = {}
        for event in range(len(kinds) - 1, -1, -1):
            if kinds[event] == out:
                latest[event] = back.get(tensors[event], len(self.step)) - 1
            else:
                back[tensors[event]] = triggers[event]
        return latest

    def _free_later(self, event: int, deadline: int, wanted: int) -> None:
        """Move the deadline of a swap-out from `deadline` towards `wanted`, as far as there is room."""
        first, last = self.step[deadline] + 1, self.step[wanted] + 1
        memory, most = self.memory[first:last], self.budget - self.size[event]
        if memory.max() > most:
            wanted = bisect_left(self.step, first + int((memory > most).argmax())) - 1
        if wanted > deadline:
            self.memory[first : self.step[wanted] + 1] += self.size[event]
            self.deadline[event] = wanted

    # ---- in ----

    def start_ins(self) -> None:
        """Request each swap-in a little before it has to start to be in time, or as soon as there is room."""
        trigger, deadline = self.trigger, self.deadline
        ins = sorted(self._transfers(EventKind.SWAP_IN), key=lambda event: deadline[event])
        freed = self._frees()
        wanted: dict[int, int] = {}
        following = math.inf
        for event in reversed(ins):
            following = min(following, self.starts[deadline[event]]) - self.us[event]
            gap = bisect_right(self.ends, following - AHEAD * self.us[event]) - 1
            wanted[event] = min(max(gap, freed.get(event, 0)), deadline[event] - 1)
        later = [event for event in ins if wanted[event] > trigger[event]]
        for event in later:
            self.memory[self.step[trigger[event]] + 1 : self.step[wanted[event]] + 1] -= self.size[event]
            trigger[event] = wanted[event]
        for event in ins:
            if wanted[event] < trigger[event]:
                self._start_earlier(event, trigger[event], wanted[event])

    def _frees(self) -> dict[int, int]:
        """Return for each swap-in the gap in which its tensor was freed, if that was in this iteration."""
        freed: dict[int, int] = {}
        latest: dict[int, int] = {}
        rows = zip(self.rows["kind"].tolist(), self.rows["tensor"].tolist(), self.deadline, strict=True)
        out, back = EventKind.SWAP_OUT.value, EventKind.SWAP_IN.value
        for event, (kind, tensor, deadline) in enumerate(rows):
            if kind == out:
                latest[tensor] = deadline
            elif kind == back and tensor in latest:
                freed[event] = latest[tensor]
        return freed

    def _start_earlier(self, event: int, trigger: int, wanted: int) -> None:
        """Move the trigger of a swap-in from `trigger` back towards `wanted`, as far as there is room."""
        first, last = self.step[wanted] + 1, self.step[trigger] + 1
        memory, most = self.memory[first:last], self.budget - self.size[event]
        if memory.max() > most:
            wanted = bisect_left(self.step, last - 1 - int((memory[::-1] > most).argmax()))
        if wanted < trigger:
            self.memory[self.step[wanted] + 1 : last] += self.size[event]
            self.trigger[event] = wanted
