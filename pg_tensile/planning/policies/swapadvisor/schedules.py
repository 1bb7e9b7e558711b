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


class Graph(NamedTuple):
    """Dependencies of n operators, as lists, which loops read faster."""

    waits_for: list[int]  # [n]: number of operators that each one depends on
    successors: list[list[int]]  # [n]: operators that depend on each one

    @classmethod
    def of(cls, trace: Trace) -> Graph:
        found = dependencies(trace)
        start, successor = found.successor_start.tolist(), found.successors.tolist()
        waits_for = np.diff(found.predecessor_start).tolist()
        return cls(waits_for, [successor[begin:end] for begin, end in pairwise(start)])


def crossover(one: Int32s, other: Int32s, point: int) -> tuple[Int32s, Int32s]:
    """Return two children: each begins with the first `point` operators of one parent.

    The rest is in the other's order. An operator's predecessors precede it in both parents, so they do in the children.
    """
    return _spliced(other, one, point), _spliced(one, other, point)


def _spliced(head: Int32s, tail: Int32s, point: int) -> Int32s:
    left = np.ones(len(head), np.bool_)
    left[head[:point]] = False
    return np.concatenate((head[:point], tail[left[tail]]))


def mutate(graph: Graph, order: Int32s, rate: float, random: np.random.Generator) -> Int32s:
    """Return a mutated schedule: a scheduler's run that mostly takes the ready operator that comes first in `order`.

    With probability `rate` it takes any of those that are ready.
    """
    operators: list[int] = order.tolist()
    rank = np.empty(len(operators), np.int64)
    rank[order] = np.arange(len(operators))
    ranks: list[int] = rank.tolist()
    waits = graph.waits_for.copy()
    ready = [ranks[operator] for operator, count in enumerate(waits) if not count]
    heapify(ready)
    surprises, picks = (random.random(len(operators)) < rate).tolist(), random.random(len(operators)).tolist()
    executed: list[int] = []
    for surprise, pick in zip(surprises, picks, strict=True):
        if surprise:
            place = int(pick * len(ready))
            taken = ready[place]
            ready[place] = ready[-1]
            ready.pop()
            heapify(ready)
        else:
            taken = heappop(ready)
        operator = operators[taken]
        executed.append(operator)
        for later in graph.successors[operator]:
            waits[later] -= 1
            if not waits[later]:
                heappush(ready, ranks[later])
    return np.array(executed, np.int32)


def greedy(trace: Trace, graph: Graph, capacity_bytes: int | None, thrift: float, waiting: float = WAITING) -> Int32s:
    """Return a schedule in which the ready operator that costs the fewest bytes always comes next.

    Its cost is the bytes that it reads and that are no longer on the device, and `thrift` (0 … 1) times the bytes that
    it creates, less those that die. Missing bytes count `waiting` times where all operators that depend on it wait for
    others, too: among layers whose states are known from the beginning, those without inputs yet need no weights yet.
    Ties go to the operator captured first. Operators of the optimizer come as soon as they may: they end the life of a
    gradient.

    `capacity_bytes`: what the device holds, the most recently used tensors, so operators that share weights come
    together; None means that it holds everything, so memory alone counts.
    """
    return _Greedy(trace, graph, capacity_bytes, thrift, waiting).run()


class _Greedy:
    def __init__(self, trace: Trace, graph: Graph, capacity_bytes: int | None, thrift: float, waiting: float) -> None:
        self.successors = graph.successors
        self.waits = graph.waits_for.copy()  # [n]: operators still to be executed before each one
        self.thrift = thrift
        self.waiting = waiting
        self.size: list[int] = trace.tensor_bytes.tolist()
        start, tensor = trace.access_start.tolist(), trace.access_tensor.tolist()
        create = (trace.access_mode == Mode.CREATE).tolist()
        spans = list(pairwise(start))
        self.reads = [[tensor[at] for at in range(*span) if not create[at]] for span in spans]
        self.made = [[tensor[at] for at in range(*span) if create[at]] for span in spans]
        self.created = [sum(self.size[each] for each in made) for made in self.made]
        self.uses: list[int] = np.bincount(trace.access_tensor, minlength=trace.tensor_count).tolist()  # [m]: left
        self.persistent: list[bool] = trace.persistent.tolist()
        self.updates = [
            phase == Phase.OPTIMIZER and not made for phase, made in zip(trace.phase.tolist(), self.made, strict=True)
        ]
        self.capacity = capacity_bytes
        self.there: dict[int, None] = {}  # resident tensors, least recently used first
        self.level = 0
        if capacity_bytes is None:
            self.there = dict.fromkeys(np.flatnonzero(trace.persistent).tolist())

    def run(self) -> Int32s:
        waits = self.waits
        ready = [operator for operator, count in enumerate(waits) if not count]
        executed: list[int] = []
        while ready:
            place = min(range(min(len(ready), WINDOW)), key=lambda place: self._cost(ready[place]))
            operator = ready.pop(place)
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
        size, there, uses = self.size, self.there, self.uses
        missing, made = 0.0, self.created[operator]
        for tensor in self.reads[operator]:
            if tensor not in there:
                missing += size[tensor]
            elif uses[tensor] == 1 and not self.persistent[tensor]:
                made -= size[tensor]
        if missing and all(self.waits[later] > 1 for later in self.successors[operator]):
            missing *= self.waiting
        return missing + self.thrift * made

    def _execute(self, operator: int) -> None:
        for tensor in (*self.reads[operator], *self.made[operator]):
            self.uses[tensor] -= 1
            was_there = self.there.pop(tensor, self) is None
            if self.uses[tensor] or self.persistent[tensor]:
                self.there[tensor] = None
                self.level += 0 if was_there else self.size[tensor]
            elif was_there:
                self.level -= self.size[tensor]
        while self.capacity is not None and self.level > self.capacity and self.there:
            oldest = next(iter(self.there))
            del self.there[oldest]
            self.level -= self.size[oldest]
