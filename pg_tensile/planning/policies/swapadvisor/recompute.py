"""Recomputing tensors that the swap planner would swap (not in the paper, which only swaps).

In the backward pass of a deep network within a small budget the lane in is busy all the time, while many tensors that
it brings could be computed in almost no time from others that it brings anyway: tanh of an LSTM's cell from the cell.
Such a tensor is recomputed right before its inputs leave, at the latest right before it is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.recomputations import Recomputation

CHEAP = 0.5  # most time of a recomputation, as a fraction of the time of the copy in

OUT, IN = EventKind.SWAP_OUT.value, EventKind.SWAP_IN.value


def with_recomputations(sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int) -> Plan:
    """Return the plan of `sequence` with recomputations in place of those swaps that cost more.

    The plan has swaps alone: tensors leave right after their last use and come back right before their next
    (planner.decide). The memory that recomputed operators take is estimated, so the caller has to check whether the
    plan keeps to the budget.
    """
    swaps = _Swaps(sequence, profile, budget_bytes)
    for pair in swaps.candidates():
        swaps.try_recomputing(pair)
    return swaps.plan()


class _Pair(NamedTuple):
    """A swap-out and the swap-in of the same tensor before the operator that needs it."""

    tensor: int
    out: int  # indices of the events in the plan
    back: int
    recomputation: Recomputation
    us: float  # with its launch


class _Residency(NamedTuple):
    """Residency of a tensor, from operator `first` to the gap after `last`.

    `event` is the swap-in that began it, or -1.
    """

    first: int
    last: int
    event: int


class _Swaps:
    """The swaps of a plan, some of which are replaced by recomputations."""

    def __init__(self, sequence: AccessSequence, profile: DeviceProfile, budget_bytes: int) -> None:
        trace = sequence.trace
        self.columns = Columns(trace)
        self.budget = budget_bytes
        self.launch_us = profile.launch_us
        self.in_us: list[float] = np.asarray(swap_us(trace, Direction.IN, profile)).tolist()
        self.memory = sequence.footprint + trace.workspace_bytes
        self.rows = sequence.plan.rows
        self.keeps = np.ones(len(self.rows), np.bool_)
        self.kind: list[int] = self.rows["kind"].tolist()
        self.tensor: list[int] = self.rows["tensor"].tolist()
        self.trigger: list[int] = self.rows["trigger"].tolist()
        self.deadline: list[int] = self.rows["deadline"].tolist()
        self.recomputes: list[Event] = []
        due = [*zip(self.kind, self.tensor, self.deadline, strict=True)]
        brought = {(tensor, deadline): event for event, (kind, tensor, deadline) in enumerate(due) if kind == IN}
        # a tensor that leaves is freed before the recomputations of the same gap
        leaves = {(tensor, deadline) for kind, tensor, deadline in due if kind == OUT}
        self.residencies: defaultdict[int, list[_Residency]] = defaultdict(list)  # of each tensor, ascending
        columns = (sequence.interval_tensor, sequence.interval_first, sequence.interval_last)
        for tensor, first, last in sorted(zip(*(column.tolist() for column in columns), strict=True)):
            last -= (tensor, last) in leaves
            self.residencies[tensor].append(_Residency(first, last, brought.get((tensor, first), -1)))

    def candidates(self) -> list[_Pair]:
        """Return the swaps whose tensors are cheaper recomputed, judged by operators and link alone, cheapest first."""
        pairs = []
        out: dict[int, int] = {}
        for event, (kind, tensor) in enumerate(zip(self.kind, self.tensor, strict=True)):
            if kind == OUT:
                out[tensor] = event
            elif tensor in out:
                version = self.columns.version_before(tensor, self.deadline[event])
                recomputation = self.columns.recomputations.of(tensor, version)
                if recomputation and (us := recomputation.us + self.launch_us) <= CHEAP * self.in_us[tensor]:
                    pairs.append(_Pair(tensor, out[tensor], event, recomputation, us))
        return sorted(pairs, key=lambda pair: pair.us / self.in_us[pair.tensor])

    def try_recomputing(self, pair: _Pair) -> None:
        """Recompute the tensor in the last gap in which all its inputs can be resident.

        Nothing changes if that gap comes before the tensor has left, or if there is no room from then until it is
        needed.
        """
        needed = self.deadline[pair.back]
        recomputation = pair.recomputation
        inputs = dict.fromkeys(source.tensor for source in recomputation.inputs)
        residencies = [self._residency(tensor, needed) for tensor in inputs]
        gap = min([needed - 1, *(r.last for r in residencies)])
        if gap <= self.deadline[pair.out] or any(r.first > gap + (r.event >= 0) for r in residencies):
            return
        earlier = [r for r in residencies if r.first == gap + 1]  # have to be swapped in one operator earlier
        unchanged = recomputation.inputs_unchanged(lambda tensor: self.columns.version_before(tensor, gap + 1))
        if unchanged and self._take_room(pair, gap, earlier):
            for residency in earlier:
                self._come_earlier(residency)
            self.keeps[[pair.out, pair.back]] = False
            self.recomputes.append(Event(EventKind.RECOMPUTE, pair.tensor, gap, needed, recomputation.version))
            self._replace(pair.tensor, self._residency(pair.tensor, needed), gap + 1, -1)

    def _take_room(self, pair: _Pair, gap: int, earlier: Iterable[_Residency]) -> bool:
        """Take room for tensors that come earlier, for recomputed operators, and for the tensor until it is needed.

        Returns False if there is not enough.
        """
        size, workspace, memory = self.columns.bytes, self.columns.workspace, self.memory
        moved = sum(size[self.tensor[residency.event]] for residency in earlier)
        here, kept = memory[gap] + moved, memory[gap + 1 : self.deadline[pair.back]]
        most = max(here, here - workspace[gap] + size[pair.tensor] + pair.recomputation.scratch_bytes)
        if max(most, kept.max(initial=0) + size[pair.tensor]) > self.budget:
            return False
        memory[gap] += moved
        kept += size[pair.tensor]
        return True

    def plan(self) -> Plan:
        """Return the resulting plan."""
        rows = self.rows.copy()
        rows["trigger"], rows["deadline"] = self.trigger, self.deadline
        return Plan(np.concatenate((rows[self.keeps], Plan.build(self.recomputes).rows)))

    def _residency(self, tensor: int, operator: int) -> _Residency:
        """Return the last residency that has begun at `operator`, or an empty one."""
        begun = [residency for residency in self.residencies[tensor] if residency.first <= operator]
        return begun[-1] if begun else _Residency(operator + 1, -1, -1)

    def _come_earlier(self, residency: _Residency) -> None:
        self.deadline[residency.event] = residency.first - 1
        self.trigger[residency.event] = residency.first - 2
        self._replace(self.tensor[residency.event], residency, residency.first - 1, residency.event)

    def _replace(self, tensor: int, residency: _Residency, first: int, event: int) -> None:
        residencies = self.residencies[tensor]
        residencies[residencies.index(residency)] = _Residency(first, residency.last, event)
