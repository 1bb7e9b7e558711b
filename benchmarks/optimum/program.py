"""The mixed-integer program: keep, swap or recompute each tensor at each operator, in the least time within a budget.

It is a relaxation: every valid plan within the budget is one of its solutions, in at most the time that the simulator
gives it, so its optimum is a lower bound for all plans; except plans that stop everything between two recomputations of
one gap to copy a tensor out (`is_ordered`), which no policy makes.

The time from operator j to the next one has three parts: the operator (latency), B (stalls: swap-outs that are due are
waited for, then freed) and C (swap-ins start, tensors are recomputed, swap-ins are waited for). Columns:

    resident[v, i]  1: in the sample of operator i (integer); usable[v, i]: and no swap-in of it is in flight
    made[v, g]      1: recomputed in gap g (integer)
    comes[v, g]     a swap-in starts in gap g; backlog[v, g] is what is left of it after C, µs
    out[v, j]       µs of its copy out in C before operator j, in the operator or in B after it, while it is resident
    in_c[v, g], in_b[v, j]   µs of its copy in, in C of gap g; in operator j and B after it
    stall_b[j], stall_c[g]   µs; held[v, g]: on the device from operator g to g + 1 without a break

It allows more than the link and the executor do: a transfer may be interrupted for another one, between the
recomputations of a gap only the tensors that stay resident throughout count besides the repeated operator, and the
compute learns of a transfer's end without delay (`handover_us`). Without such conflicts its time is the simulator's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.optimum.choices import Choices
from benchmarks.optimum.rows import INFINITE, Rows, Solved
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.trace.trace import Trace

Place = tuple[int, int]  # a tensor, and an operator or gap
SOME = 1e-7  # share of all latencies above which a column means that a transfer runs


class Decisions(NamedTuple):
    """Decisions of a solution: where tensors are resident, and in which gaps they are recomputed.

    Those of a solution of the program also say when tensors are copied: `out` (operators) and `into` (gaps).
    """

    resident: frozenset[Place]
    made: frozenset[Place]
    out: frozenset[Place] = frozenset()
    into: frozenset[Place] = frozenset()

    @classmethod
    def of(cls, trace: Trace, plan: Plan) -> Decisions:
        """Return those of a valid plan in the trace's own order."""
        sequence = AccessSequence(trace, plan)
        intervals = zip(sequence.interval_tensor, sequence.interval_first, sequence.interval_last, strict=True)
        step = sequence.operator_step
        resident = {
            (int(tensor), operator)
            for tensor, first, last in intervals
            for operator in range(int(np.searchsorted(step, first)), int(np.searchsorted(step, last, "right")))
        }
        made = {(event.tensor, event.trigger) for event in plan.events if event.kind is EventKind.RECOMPUTE}
        return cls(frozenset(resident), frozenset(made))


def is_ordered(plan: Plan) -> bool:
    """Return whether no swap-out that ends in its own gap follows a recompute event there."""
    repeated: set[int] = set()
    for event in plan.events:
        if event.kind is EventKind.RECOMPUTE:
            repeated.add(event.trigger)
        elif event.kind is EventKind.SWAP_OUT and event.deadline == event.trigger and event.trigger in repeated:
            return False
    return True


class Program:
    """The program of a trace with latencies.

    Its unit of time is the sum of the latencies, its unit of memory the budget.
    """

    def __init__(self, trace: Trace, profile: DeviceProfile, budget_bytes: int) -> None:
        self.choices = Choices(trace, profile)
        self.trace = trace
        self.profile = profile
        self.budget = budget_bytes
        self.latency: list[float] = trace.latency_us.tolist()
        self.unit_us = sum(self.latency) or 1.0
        self.rows = Rows()
        self._columns()
        for tensor in self.choices.tensors:
            self._residency(tensor)
            self._copies_out(tensor)
            self._copies_in(tensor)
        self._inputs()
        self._memory()
        self._link()

    def solve(self, limit_s: float, seed: int = 0, start: Decisions | None = None) -> Solved:
        """Solve the program; `bound` is in µs.

        `start`: the decisions of a plan within the budget; None means that none is known. `seed` selects one of equal
        solutions.
        """
        start_values = {} if start is None else self._values(start)
        solved = self.rows.solve(limit_s, seed, start_values)
        return solved._replace(bound=solved.bound * self.unit_us + sum(self.latency))

    def fix(self, decisions: Decisions) -> None:
        """Fix the decisions, so that only the times of transfers remain free."""
        for column, value in self._values(decisions).items():
            self.rows.row({column: 1.0}, value, value)

    def decisions(self, values: list[float]) -> Decisions:
        def chosen(columns: Mapping[Place, int], above: float = 0.5) -> frozenset[Place]:
            return frozenset(place for place, column in columns.items() if values[column] > above)

        into = chosen(self.in_c, SOME) | {(v, j - 1) for v, j in chosen(self.in_b, SOME)}
        return Decisions(chosen(self.resident), chosen(self.made), chosen(self.out, SOME), into)

    def _values(self, decisions: Decisions) -> dict[int, float]:
        resident = {column: float(place in decisions.resident) for place, column in self.resident.items()}
        return resident | {column: float(place in decisions.made) for place, column in self.made.items()}

    # ---- columns ----

    def _columns(self) -> None:
        choices, column = self.choices, self.rows.column
        self.resident: dict[Place, int] = {}
        self.comes: dict[Place, int] = {}
        self.backlog: dict[Place, int] = {}
        self.out: dict[Place, int] = {}
        self.in_b: dict[Place, int] = {}
        self.in_c: dict[Place, int] = {}
        self.usable: dict[Place, int] = {}
        self.made = {
            place: column(1, making.us / self.unit_us, integer=True) for place, making in choices.making.items()
        }
        inputs = {(input_tensor, gap) for (_, gap), making in choices.making.items() for input_tensor in making.inputs}
        self.making_gaps = {gap for _, gap in choices.making}
        for v in choices.tensors:
            accessed = set(choices.accesses[v])
            for i in range(choices.first[v], choices.last[v] + 1):
                self.resident[v, i] = column(1, integer=True, lower=float(i in accessed))
                if i < choices.last[v]:
                    self.comes[v, i], self.in_c[v, i] = column(1), column()
                    self.backlog[v, i] = column(0 if i + 1 in accessed else INFINITE)
                if i > choices.first[v]:
                    self.in_b[v, i] = column()
                if not choices.frozen(v):
                    self.out[v, i] = column()
                if (v, i) in inputs:
                    self.usable[v, i] = column(1)
        operators = range(choices.last_operator + 1)
        self.stall_b = [column(cost=1.0) for _ in operators]
        self.stall_c = [column(cost=1.0) for _ in operators]

    def _us(self, tensor: int, direction: Direction) -> float:
        return self.choices.transfer_us(tensor, direction) / self.unit_us

    # ---- a tensor ----

    def _residency(self, v: int) -> None:
        row, first, last = self.rows.row, self.choices.first[v], self.choices.last[v]
        for g in range(first, last):
            before, after, comes = self.resident[v, g], self.resident[v, g + 1], self.comes[v, g]
            row({after: 1, before: -1, comes: -1} | self._made(v, g, -1), 0)
            row({comes: 1, after: -1}, 0)
        for i in range(first, last + 1):
            if (v, i) in self.usable:
                row({self.usable[v, i]: 1, self.resident[v, i]: -1}, 0)
        if self.choices.persistent[v]:  # at the end as at the start; swapped in if it is not resident then
            row({self.resident[v, 0]: 1, self.resident[v, last]: -1}, 0)
            row({self.resident[v, 0]: 1} | {self.comes[v, g]: 1 for g in range(last)}, lower=1)

    def _made(self, v: int, gap: int, factor: float) -> dict[int, float]:
        return {self.made[v, gap]: factor} if (v, gap) in self.made else {}

    def _copies_out(self, v: int) -> None:
        """Require a current host copy for every swap-in: of this version, or from before the iteration."""
        choices, row = self.choices, self.rows.row
        if choices.frozen(v):
            return
        us = self._us(v, Direction.OUT)
        kept: dict[int, float] = {}
        if choices.persistent[v]:
            copied = self.rows.column(1)  # part of the last version, before the iteration ends
            row({copied: 1} | self._copied(v, choices.starts[v][-1], choices.last[v], us), 0)
            row({copied: 1, self.resident[v, 0]: 1}, lower=1)
            kept = {copied: -1}
        for i in range(choices.first[v], choices.last[v] + 1):
            row({self.out[v, i]: 1, self.resident[v, i]: -us}, 0)
            if i < choices.last[v]:
                start = max(place for place in choices.starts[v] if place <= i)
                row({self.comes[v, i]: 1} | self._copied(v, start, i, us) | (kept if start < 0 else {}), 0)

    def _copied(self, v: int, start: int, gap: int, us: float) -> dict[int, float]:
        """Return terms for minus the part of the version written by operator `start` that is on the host in a gap."""
        return {self.out[v, j]: -1 / us for j in range(max(start, 0), gap + 1)}

    def _copies_in(self, v: int) -> None:
        row, us = self.rows.row, self._us(v, Direction.IN)
        for g in range(self.choices.first[v], self.choices.last[v]):
            terms = {self.backlog[v, g]: 1.0, self.in_c[v, g]: 1.0, self.comes[v, g]: -us}
            if g > self.choices.first[v]:
                row({self.in_b[v, g]: 1, self.backlog[v, g - 1]: -1}, 0)
                terms |= {self.in_b[v, g]: 1.0, self.backlog[v, g - 1]: -1.0}
            row(terms, 0, 0)
            row({self.backlog[v, g]: 1, self.resident[v, g + 1]: -us} | self._usable(v, g + 1, us), 0)
            if g + 2 <= self.choices.last[v]:  # what is in flight during an operator is resident in the next
                row({self.backlog[v, g]: 1, self.resident[v, g + 2]: -us}, 0)
        if self.choices.persistent[v] and self.choices.last[v] > 0:
            row({self.backlog[v, self.choices.last[v] - 1]: 1}, 0)

    def _usable(self, v: int, i: int, factor: float) -> dict[int, float]:
        return {self.usable[v, i]: factor} if (v, i) in self.usable else {}

    # ---- all of them ----

    def _inputs(self) -> None:
        """Require that the inputs of a recomputation are usable, or recomputed in the same gap."""
        for (v, gap), making in self.choices.making.items():
            for input_tensor in making.inputs:
                terms = {self.made[v, gap]: 1, self.usable[input_tensor, gap]: -1} | self._made(input_tensor, gap, -1)
                self.rows.row(terms, 0)

    def _memory(self) -> None:
        size = {v: self.choices.bytes[v] / self.budget for v in self.choices.tensors} if self.budget else {}
        by_operator: dict[int, list[int]] = defaultdict(list)
        for v, i in self.resident:
            by_operator[i].append(v)
        for i in range(self.choices.last_operator + 1):
            room = 1 - self.trace.workspace_bytes[i] / max(self.budget, 1)
            self.rows.row({self.resident[v, i]: size[v] for v in by_operator[i]}, room)
        for gap in self.making_gaps:
            self._memory_between(gap, [v for v in by_operator[gap] if (v, gap + 1) in self.resident], size)

    def _memory_between(self, gap: int, tensors: list[int], size: Mapping[int, float]) -> None:
        """Require room for every operator repeated in a gap, besides the tensors that stay resident throughout."""
        held = {}
        for v in tensors:
            held[v] = self.rows.column(1)
            terms = {self.resident[v, gap]: 1, self.resident[v, gap + 1]: 1, self.comes[v, gap]: -1, held[v]: -1}
            self.rows.row(terms | self._made(v, gap, -1), 1)
        total = self.rows.column()
        self.rows.row({total: -1} | {held[v]: size[v] for v in tensors}, 0)
        for (v, other), making in self.choices.making.items():
            for step in making.steps if other == gap else ():
                own = {held[u]: -size[u] for u in step.held if u in held}
                self.rows.row({total: 1, self.made[v, gap]: step.bytes / self.budget} | own, 1)

    def _link(self) -> None:
        """Let each lane serve one transfer at a time, and both together as much as the duplex factor allows."""
        outs, ins_b, ins_c = (self._by_place(columns) for columns in (self.out, self.in_b, self.in_c))
        longer: dict[int, dict[int, float]] = {-1: {}}  # minus the length of C
        for g in range(self.choices.last_operator + 1):
            longer[g] = {self.stall_c[g]: -1.0}
        for (v, g), making in self.choices.making.items():
            longer[g][self.made[v, g]] = -making.us / self.unit_us
        for j in range(self.choices.last_operator + 1):
            latency, stall = self.latency[j] / self.unit_us, {self.stall_b[j]: -1.0}
            out = {c: 1.0 for _, c in outs[j]}
            fresh = {c: 1.0 for v, c in outs[j] if j == 0 or j in self.choices.starts[v]}
            into = {c: 1.0 for _, c in ins_b[j]}
            self.rows.row(fresh | stall, 0)  # copies of a new version start after its operator
            self.rows.row(into | stall, latency)
            self.rows.row({c: 1.0 for _, c in ins_c[j]} | longer[j], 0)
            into |= {c: 1.0 for _, c in ins_c[j - 1]}
            share = self.profile.duplex_factor
            for one, other in ((out, into), (into, out)):
                terms = dict.fromkeys(one, share) | {c: 1 - share for c in other if share < 1}
                length = {c: share * factor for c, factor in (stall | longer[j - 1]).items()}
                self.rows.row(terms | length, share * latency)

    def _by_place(self, columns: Mapping[Place, int]) -> dict[int, list[tuple[int, int]]]:
        by_place: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (v, place), column in columns.items():
            by_place[place].append((v, column))
        return by_place
