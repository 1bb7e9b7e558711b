"""The swap planner: swaps and their times for one schedule and one allocation (SwapAdvisor, section 4.2).

A walk over the operators keeps the device within the budget. Where the next operator does not fit, the tensor that is
needed again farthest in the future is swapped out (Belady), if it was last used long enough ago for its copy to end in
time. A first walk starts without persistent tensors. Those resident at its end are the initial residents of a second
walk, except those that the second walk has to evict before their first use: so the iteration ends as it began.
individuals.py has every transfer scheduled then: out as soon as it may, in as soon as the memory that it takes is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import EVENT_ROW, EventKind, Plan
from pg_tensile.planning.policies.swapadvisor.allocation import Allocation, distinct_sizes
from pg_tensile.planning.trace.trace import Trace

SMALLEST = 1 / 20_000  # fraction of the budget; smaller tensors leave only where no other can
LOOKS = 16  # candidates that are examined for one that was last used long enough ago
NEVER = -1


def decide(
    trace: Trace, profile: DeviceProfile, budget_bytes: int, allocation: Allocation | None, distance: float
) -> Plan | None:
    """Return a plan of `trace`, whose operators are in the order of the schedule, without times for its transfers.

    Tensors leave right after their last use and come back right before their next. The budget limits the device peak,
    workspaces included; None if an operator does not fit. `allocation`: None means that any tensor may replace any
    other. `distance`: how long ago a tensor that leaves should have been used, in times of its own copy out.
    """
    walk = _Walk(trace, profile, budget_bytes, allocation, distance)
    first = walk.run(())
    second = first and walk.run(first.resident)
    if first is None or second is None:
        return None
    initial = (first.resident - second.dropped) & second.resident
    outs = second.outs + [(tensor, walk.final_use[tensor]) for tensor in sorted(second.resident - initial)]
    ins = second.ins + [
        (tensor, walk.first_use[tensor]) for tensor in sorted(first.resident - second.dropped - second.resident)
    ]
    rows = np.zeros(len(outs) + len(ins), EVENT_ROW)
    rows["kind"][: len(outs)], rows["kind"][len(outs) :] = EventKind.SWAP_OUT, EventKind.SWAP_IN
    if len(rows):
        rows["tensor"], rows["deadline"] = np.array(outs + ins, np.int32).T
    rows["trigger"] = rows["deadline"] - (rows["kind"] == EventKind.SWAP_IN)
    return Plan(rows)


class _Decisions(NamedTuple):
    """Decisions of one walk, with indices of operators in the schedule."""

    outs: list[tuple[int, int]]  # tensor, index of its last use
    ins: list[tuple[int, int]]  # tensor, index of the operator that needs it
    dropped: set[int]  # tensors resident at the start that had to leave before their first use
    resident: set[int]  # persistent tensors resident at the end


class _Walk:
    def __init__(
        self, trace: Trace, profile: DeviceProfile, budget: int, allocation: Allocation | None, distance: float
    ) -> None:
        unused = np.diff(trace.tensor_start) == 0
        self.budget = budget - int(trace.tensor_bytes[unused].sum())
        self.size: list[int] = trace.tensor_bytes.tolist()
        self.persistent: list[bool] = trace.persistent.tolist()
        self.workspace: list[int] = trace.workspace_bytes.tolist()
        self.first_use: list[int] = trace.tensor_first.tolist()
        self.final_use: list[int] = trace.tensor_last.tolist()
        self.operators = list(_operators(trace))
        self.starts: list[float] = np.concatenate(([0.0], np.cumsum(trace.latency_us))).tolist()
        us = distance * (profile.transfer_latency_us + trace.tensor_bytes / profile.out_bytes_per_s * 1e6)
        self.away_us: list[float] = us.tolist()
        self.counts = list(allocation.counts) if allocation else []
        self.groups = max(allocation.classes) + 1 if allocation else 1
        self.heap_of = self._classes(trace, budget, allocation)

    def _classes(self, trace: Trace, budget: int, allocation: Allocation | None) -> list[int]:
        """Return the class of each tensor; those too small to be worth a transfer have one more, the last."""
        groups = np.zeros(trace.tensor_count, np.int64)
        if allocation is not None:
            groups = np.array((*allocation.classes, 0))[np.searchsorted(distinct_sizes(trace), trace.tensor_bytes)]
        groups[trace.tensor_bytes < budget * SMALLEST] = self.groups
        heap_of_tensor: list[int] = groups.tolist()
        return heap_of_tensor

    def run(self, residents: Iterable[int]) -> _Decisions | None:
        """Walk through all operators, from these persistent tensors on the device; None if an operator does not fit."""
        size, persistent = self.size, self.persistent
        self.resident = [False] * len(size)
        self.next_use = self.first_use.copy()
        self.last_use = [NEVER] * len(size)
        self.heaps: list[list[tuple[int, int]]] = [[] for _ in range(self.groups + 1)]
        self.held = [0] * len(self.heaps)
        self.level = 0
        self.decisions = _Decisions([], [], set(), set())
        for tensor in residents:
            self._bring(tensor)
            heappush(self.heaps[self.heap_of[tensor]], (-self.next_use[tensor], tensor))
        resident, last_use, next_use = self.resident, self.last_use, self.next_use
        for operator, accesses in enumerate(self.operators):
            for tensor, _, _ in accesses:
                if not resident[tensor] and size[tensor]:
                    if self.counts:
                        self._make_slot(tensor, operator)
                    if persistent[tensor] or last_use[tensor] != NEVER:
                        self.decisions.ins.append((tensor, operator))
                    self._bring(tensor)
            while self.level + self.workspace[operator] > self.budget:
                if not self._drop_farthest(operator):
                    return None
            for tensor, following, ends in accesses:
                last_use[tensor] = operator
                next_use[tensor] = following
                if ends:
                    self._remove(tensor)
                elif size[tensor]:
                    heappush(self.heaps[self.heap_of[tensor]], (-following, tensor))
        self.decisions.resident.update(t for t in range(len(size)) if resident[t] and persistent[t])
        return self.decisions

    def _bring(self, tensor: int) -> None:
        self.resident[tensor] = True
        self.level += self.size[tensor]
        self.held[self.heap_of[tensor]] += 1

    def _remove(self, tensor: int) -> None:
        if self.resident[tensor]:
            self.resident[tensor] = False
            self.level -= self.size[tensor]
            self.held[self.heap_of[tensor]] -= 1

    # ---- leaving ----

    def _make_slot(self, tensor: int, operator: int) -> None:
        """Evict one tensor of the same class if the class has no slot left; if none can leave, bytes decide."""
        group = self.heap_of[tensor]
        if group < len(self.counts) and self.held[group] >= self.counts[group]:
            farthest = self._farthest(self.heaps[group], operator)
            if farthest is not None:
                self._drop(farthest)

    def _drop_farthest(self, operator: int) -> bool:
        """Evict the tensor, of any class, that is needed again last; return False if none can leave.

        Small tensors, which are in the last heap, leave only if there is no other.
        """
        *classes, small = self.heaps
        for heaps in (classes, [small]):
            heads = [(entry, heap) for heap in heaps if (entry := self._head(heap, operator)) is not None]
            if heads:
                _, heap = min(heads, key=lambda head: head[0])
                tensor = self._farthest(heap, operator)
                assert tensor is not None
                self._drop(tensor)
                return True
        return False

    def _drop(self, tensor: int) -> None:
        self._remove(tensor)
        if self.last_use[tensor] == NEVER:
            self.decisions.dropped.add(tensor)
        else:
            self.decisions.outs.append((tensor, self.last_use[tensor]))

    def _head(self, heap: list[tuple[int, int]], operator: int) -> tuple[int, int] | None:
        """Return the heap's entry of the resident tensor that is needed last.

        None if none can leave before the operator at `operator`.
        """
        while heap:
            following, tensor = heap[0]
            if self.resident[tensor] and self.next_use[tensor] == -following:
                return heap[0] if -following > operator else None
            heappop(heap)
        return None

    def _farthest(self, heap: list[tuple[int, int]], operator: int) -> int | None:
        """Remove and return the tensor that is needed last among those used long enough ago, or of all if none was."""
        passed: list[tuple[int, int]] = []
        chosen: tuple[int, int] | None = None
        while len(passed) < LOOKS and (entry := self._head(heap, operator)) is not None:
            heappop(heap)
            idle_us = self.starts[operator] - self.starts[self.last_use[entry[1]] + 1]
            if idle_us >= self.away_us[entry[1]]:
                chosen = entry
                break
            passed.append(entry)
        if chosen is None and passed:
            chosen = passed.pop(0)
        for entry in passed:
            heappush(heap, entry)
        return None if chosen is None else chosen[1]


def _operators(trace: Trace) -> Iterator[list[tuple[int, int, bool]]]:
    """Return the accesses of each operator: tensor, index of its next use, and whether it dies here.

    The next use of a persistent tensor may be in the following iteration.
    """
    order, start = trace.access_by_tensor, trace.tensor_start
    operator = trace.access_operator[order].astype(np.int64)
    following = np.append(operator[1:], 0)
    used = np.flatnonzero(np.diff(start))
    last = start[used + 1] - 1
    following[last] = trace.tensor_first[used] + trace.operator_count
    ends = np.zeros(len(operator), np.bool_)
    ends[last] = ~trace.persistent[used]
    column, dies = np.empty_like(following), np.empty_like(ends)
    column[order], dies[order] = following, ends
    rows = list(zip(trace.access_tensor.tolist(), column.tolist(), dies.tolist(), strict=True))
    return (rows[begin:end] for begin, end in pairwise(trace.access_start.tolist()))
