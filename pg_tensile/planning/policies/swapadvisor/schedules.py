"""Schedules: orders of an iteration's operators, and how new ones are bred from others (SwapAdvisor, section 5.2).

A schedule is int32[n], the captured operators in the order of their execution, each after all that it depends on
(order.py). Crossover and mutation preserve that. The first schedules of a search are greedy: operators that read
resident tensors come first, so that unrolled layers use each of their weights once.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.plan.order import dependencies
from pg_tensile.planning.trace.check import MAX_BYTES
from pg_tensile.planning.trace.trace import Int32s, Mode, Phase, Trace

WAITING = 1.5  # factor on the missing bytes of an operator whose successors all wait for others, too
WINDOW = 48  # ready operators that the greedy scheduler considers, the earliest captured ones


class DependencyLists(NamedTuple):
    """Dependencies of n operators, as lists, which loops read faster."""

    waits_for: list[int]  # [n]: number of operators that each one depends on
    successors: list[list[int]]  # [n]: operators that depend on each one

    @classmethod
    def of(cls, trace: Trace) -> DependencyLists:
        needs = dependencies(trace)
        start, successor = needs.successor_start.tolist(), needs.successors.tolist()
        waits_for = np.diff(needs.predecessor_start).tolist()
        return cls(waits_for, [successor[begin:end] for begin, end in pairwise(start)])


def crossover(first: Int32s, second: Int32s, point: int) -> tuple[Int32s, Int32s]:
    """Return two children: each begins with the first `point` operators of one parent.

    The rest is in the other's order. An operator's predecessors precede it in both parents, so they do in the children.
    """
    return _spliced(second, first, point), _spliced(first, second, point)


def _spliced(head: Int32s, tail: Int32s, point: int) -> Int32s:
    missing = np.ones(len(head), np.bool_)
    missing[head[:point]] = False
    return np.concatenate((head[:point], tail[missing[tail]]))


def mutate(lists: DependencyLists, order: Int32s, rate: float, random: np.random.Generator) -> Int32s:
    """Return a mutated schedule: a scheduler's run that mostly takes the ready operator that comes first in `order`.

    With probability `rate` it takes any of those that are ready.
    """
    operators: list[int] = order.tolist()
    rank = np.empty(len(operators), np.int64)
    rank[order] = np.arange(len(operators))
    ranks: list[int] = rank.tolist()
    waits = lists.waits_for.copy()
    ready = [ranks[operator] for operator, count in enumerate(waits) if not count]
    heapify(ready)
    surprises, picks = (random.random(len(operators)) < rate).tolist(), random.random(len(operators)).tolist()
    executed: list[int] = []
    for surprise, pick in zip(surprises, picks, strict=True):
        if surprise:
            index = int(pick * len(ready))
            rank_taken = ready[index]
            ready[index] = ready[-1]
            ready.pop()
            heapify(ready)
        else:
            rank_taken = heappop(ready)
        operator = operators[rank_taken]
        executed.append(operator)
        for later in lists.successors[operator]:
            waits[later] -= 1
            if not waits[later]:
                heappush(ready, ranks[later])
    return np.array(executed, np.int32)


def greedy(
    trace: Trace, lists: DependencyLists, capacity_bytes: int | None, thrift: float, waiting: float = WAITING
) -> Int32s:
    """Return a schedule in which the ready operator that costs the fewest bytes always comes next.

    Its cost is the bytes that it reads and that are no longer on the device, and `thrift` (0 … 1) times the bytes that
    it creates, less those that die. Missing bytes count `waiting` times where all operators that depend on it wait for
    others, too: among layers whose states are known from the beginning, those without inputs yet need no weights yet.
    Ties go to the operator captured first. Operators of the optimizer come as soon as they may: they end the life of a
    gradient.

    `capacity_bytes`: what the device holds, the most recently used tensors, so operators that share weights come
    together; None means that it holds everything, so memory alone counts.
    """
    return _Greedy(trace, lists, capacity_bytes, thrift, waiting).run()


class _Greedy:
    def __init__(
        self, trace: Trace, lists: DependencyLists, capacity_bytes: int | None, thrift: float, waiting: float
    ) -> None:
        self.successors = lists.successors
        self.waits = lists.waits_for.copy()  # [n]: operators still to be executed before each one
        self.thrift = thrift
        self.waiting = waiting
        self.size: list[int] = trace.tensor_bytes.tolist()
        start, tensor = trace.access_start.tolist(), trace.access_tensor.tolist()
        create = (trace.access_mode == Mode.CREATE).tolist()
        spans = list(pairwise(start))
        self.reads = [[tensor[access] for access in range(*span) if not create[access]] for span in spans]
        self.outputs = [[tensor[access] for access in range(*span) if create[access]] for span in spans]
        self.created_bytes = [sum(self.size[output] for output in outputs) for outputs in self.outputs]
        self.uses: list[int] = np.bincount(trace.access_tensor, minlength=trace.tensor_count).tolist()  # [m]: left
        self.persistent: list[bool] = trace.persistent.tolist()
        self.updates = [
            phase == Phase.OPTIMIZER and not outputs
            for phase, outputs in zip(trace.phase.tolist(), self.outputs, strict=True)
        ]
        self.capacity = capacity_bytes
        self.resident: dict[int, None] = {}  # resident tensors, least recently used first
        self.level = 0
        if capacity_bytes is None:
            self.resident = dict.fromkeys(np.flatnonzero(trace.persistent).tolist())

    def run(self) -> Int32s:
        waits = self.waits
        ready = [operator for operator, count in enumerate(waits) if not count]
        executed: list[int] = []
        while ready:
            cheapest = min(range(min(len(ready), WINDOW)), key=lambda index: self._cost(ready[index]))
            operator = ready.pop(cheapest)
            executed.append(operator)
            self._execute(operator)
            for later in self.successors[operator]:
                waits[later] -= 1
                if not waits[later]:
                    insort(ready, later)
        return np.array(executed, np.int32)

    def _cost(self, operator: int) -> float:
        if self.updates[operator]:
            return -MAX_BYTES
        size, resident, uses = self.size, self.resident, self.uses
        missing, added = 0.0, self.created_bytes[operator]
        for tensor in self.reads[operator]:
            if tensor not in resident:
                missing += size[tensor]
            elif uses[tensor] == 1 and not self.persistent[tensor]:
                added -= size[tensor]
        if missing and all(self.waits[later] > 1 for later in self.successors[operator]):
            missing *= self.waiting
        return missing + self.thrift * added

    def _execute(self, operator: int) -> None:
        for tensor in (*self.reads[operator], *self.outputs[operator]):
            self.uses[tensor] -= 1
            was_resident = self.resident.pop(tensor, self) is None
            if self.uses[tensor] or self.persistent[tensor]:
                self.resident[tensor] = None
                self.level += 0 if was_resident else self.size[tensor]
            elif was_resident:
                self.level -= self.size[tensor]
        while self.capacity is not None and self.level > self.capacity and self.resident:
            oldest = next(iter(self.resident))
            del self.resident[oldest]
            self.level -= self.size[oldest]
