"""When the transfers of a plan start and end: as early, and as long, as there is time and room.

A plan says which tensors are away and when they are needed; here every transfer gets its trigger, and swap-outs more
time where nothing else needs the memory yet. Each lane serves the nearest deadline first. Memory stays within the
budget: a swap-out's tensor is on the device until its deadline anyway, a swap-in's only where it fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush

import numpy as np

from pg_tensile.link import swap_us
from pg_tensile.plan import EventKind, Plan
from pg_tensile.profile import DeviceProfile, Direction
from pg_tensile.sequence import AccessSequence

AHEAD = 0.25  # of a transfer's time that its swap-in is requested earlier than needed, where there is room


def schedule(sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int) -> Plan:
    """The plan of `sequence`, which keeps to the budget (workspaces included), with its transfers scheduled."""
    timetable = _Timetable(sequence, profile, budget_bytes)
    timetable.start_outs()
    timetable.start_ins()
    rows = timetable.rows
    rank = np.where(rows["kind"] == EventKind.RECOMPUTE, 2, np.where(rows["kind"] == EventKind.SWAP_IN, 1, 0))
    order = np.lexsort((np.where(rank == 2, np.arange(len(rows)), rows["deadline"]), rank, rows["trigger"]))
    return Plan(rows[order], sequence.plan.generation, sequence.plan.order)


class _Timetable:
    """Times are µs since the iteration began, of an iteration in which nothing waits."""

    def __init__(self, sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int) -> None:
        trace = sequence.trace
        self.rows = sequence.plan.rows.copy()
        self.budget = budget_bytes
        self.step = sequence.operator_step  # [n]
        self.memory = sequence.footprint + trace.workspace_bytes[sequence.steps]  # [s]
        ends = np.cumsum(trace.latency_us[sequence.steps])
        self.starts: list[float] = (ends - trace.latency_us[sequence.steps])[self.step].tolist()  # [n]
        self.ends: list[float] = ends[self.step].tolist()  # [n]
        self.size: list[int] = trace.tensor_bytes[self.rows["tensor"]].tolist()  # of each event
        self.us = [0.0] * len(self.rows)  # of each event's transfer
        out_us, in_us = (swap_us(trace, direction, profile) for direction in Direction)
        for event, tensor, _ in zip(*(column.tolist() for column in sequence.copies), strict=True):
            self.us[event] = (out_us if self.rows["kind"][event] == EventKind.SWAP_OUT else in_us)[tensor]

    def _transfers(self, kind: EventKind) -> list[int]:
        return [event for event in np.flatnonzero(self.rows["kind"] == kind).tolist() if self.us[event] > 0]

    # ---- out ----

    def start_outs(self) -> None:
        """A swap-out starts when the lane is free and no other one that could start has a nearer deadline; it is
        requested when the one before it starts."""
        trigger, deadline = self.rows["trigger"].tolist(), self.rows["deadline"].tolist()
        order = sorted(self._transfers(EventKind.SWAP_OUT), key=lambda event: trigger[event])
        latest = self._latest_frees()
        waiting: list[tuple[int, int]] = []
        now = before = 0.0
        place = 0
        while place < len(order) or waiting:
            if not waiting:
                now = max(now, self.ends[trigger[order[place]]])
            while place < len(order) and self.ends[trigger[order[place]]] <= now:
                heappush(waiting, (deadline[order[place]], order[place]))
                place += 1
            _, event = heappop(waiting)
            requested = max(trigger[event], bisect_right(self.ends, before) - 1)
            self.rows["trigger"][event] = min(requested, deadline[event])
            before, now = now, now + self.us[event]
            done = min(bisect_left(self.ends, now), latest[event])
            if done > deadline[event]:
                self._free_later(event, deadline[event], done)

    def _latest_frees(self) -> list[int]:
        """For each event the last gap in which its tensor may go: before it is brought back, or the iteration ends."""
        latest = [len(self.step) - 1] * len(self.rows)
        kinds, tensors, triggers = (self.rows[name].tolist() for name in ("kind", "tensor", "trigger"))
        back: dict[int, int] = {}
        for event in range(len(kinds) - 1, -1, -1):
            if kinds[event] == EventKind.SWAP_OUT:
                latest[event] = back.get(tensors[event], len(self.step)) - 1
            else:
                back[tensors[event]] = triggers[event]
        return latest

    def _free_later(self, event: int, deadline: int, wanted: int) -> None:
        """Up to `wanted`, as far as there is room."""
        first, last = self.step[deadline] + 1, self.step[wanted] + 1
        full = np.flatnonzero(self.memory[first:last] + self.size[event] > self.budget)
        if full.size:
            wanted = int(np.searchsorted(self.step, first + full[0])) - 1
        if wanted > deadline:
            self.memory[first : self.step[wanted] + 1] += self.size[event]
            self.rows["deadline"][event] = wanted

    # ---- in ----

    def start_ins(self) -> None:
        """A swap-in is requested a little before it has to start to be in time, or as soon as there is room."""
        rows = self.rows
        deadline = rows["deadline"].tolist()
        ins = sorted(self._transfers(EventKind.SWAP_IN), key=lambda event: deadline[event])
        freed = self._frees()
        wanted: dict[int, int] = {}
        following = np.inf
        for event in reversed(ins):
            following = min(following, self.starts[deadline[event]]) - self.us[event]
            gap = bisect_right(self.ends, following - AHEAD * self.us[event]) - 1
            wanted[event] = min(max(gap, freed.get(event, 0)), deadline[event] - 1)
        later = [event for event in ins if wanted[event] > rows["trigger"][event]]
        for event in later:
            trigger = int(rows["trigger"][event])
            self.memory[self.step[trigger] + 1 : self.step[wanted[event]] + 1] -= self.size[event]
            rows["trigger"][event] = wanted[event]
        for event in ins:
            if wanted[event] < rows["trigger"][event]:
                self._start_earlier(event, int(rows["trigger"][event]), wanted[event])

    def _frees(self) -> dict[int, int]:
        """For each swap-in the gap in which its tensor was freed, if that was in this iteration."""
        freed: dict[int, int] = {}
        latest: dict[int, int] = {}
        rows = zip(
            self.rows["kind"].tolist(), self.rows["tensor"].tolist(), self.rows["deadline"].tolist(), strict=True
        )
        for event, (kind, tensor, deadline) in enumerate(rows):
            if kind == EventKind.SWAP_OUT:
                latest[tensor] = deadline
            elif kind == EventKind.SWAP_IN and tensor in latest:
                freed[event] = latest[tensor]
        return freed

    def _start_earlier(self, event: int, trigger: int, wanted: int) -> None:
        """From `trigger` back to `wanted`, as far as there is room."""
        first, last = self.step[wanted] + 1, self.step[trigger] + 1
        full = np.flatnonzero(self.memory[first:last] + self.size[event] > self.budget)
        if full.size:
            wanted = int(np.searchsorted(self.step, first + full[-1]))
        if wanted < trigger:
            self.memory[self.step[wanted] + 1 : last] += self.size[event]
            self.rows["trigger"][event] = wanted
