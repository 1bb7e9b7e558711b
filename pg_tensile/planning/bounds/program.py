"""The linear program: the least time that any plan within a budget adds to an iteration, bounded from below.

The iteration is cut before K operators, at each of which the tensors may exceed the budget by some bytes. For each gap
between two accesses of a tensor (a class of like ones, classes.py) and each cut k in it, columns in [0, 1] say which
share of its bytes is off the device at the cut's operator, and how it comes back next:

    u[g, k] by a swap-in, w[g, k] by a recomputation    u + w ≤ 1
    E[k]: the time that the plan has added before cut k  0 ≤ E[1] ≤ … ≤ E[K], which is minimised

Rows, besides these definitions:

    memory      at each cut, Σ bytes·(u + w) ≥ the bytes in excess
    lanes       from the end of the operator at one cut to another cut, across the end of the iteration as well, a lane
                serves what must pass it in this time: swap-ins of what is off the device at its begin and accessed
                before its end; copies out of what is written in it and off the device at its end
    link        both lanes together, if they slow each other down
    operators   likewise, what is recomputed between two cuts is at most the time added there

Every plan is a solution, in no more than its simulated time. A tensor that is off the device at an operator and is
swapped in next has been copied out completely before the operator; its swap-in, or its recomputation, is triggered at
the operator or later, and has ended before the next access. A lane serves one transfer after the other. What the rows
leave out, such as the inputs of recomputations and the delay of a transfer's end, only makes plans slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pg_tensile.planning.bounds.absences import absences
from pg_tensile.planning.bounds.classes import classified
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.trace.trace import Int64s, Trace

CUTS = 32  # of an iteration: with three times as many, solving takes twenty times as long, for bounds hardly higher
INEXACT = 1e-9  # of the iteration's time: subtracted for rounding


def least_added_us(trace: Trace, profile: DeviceProfile, excess: Int64s, limit_s: float) -> float | None:
    """Return a lower bound, in µs, on the time that plans add to the sum of all latencies.

    `excess` is int64[n]: the bytes by which the tensors without a plan exceed the budget at each operator. Returns None
    if the solver has not ended after `limit_s` seconds.
    """
    return _Program(trace, profile, excess).solve(limit_s)


def _cuts(trace: Trace, excess: Int64s) -> Int64s:
    """Return the operators of the cuts, in order: 0, and the one with the largest excess in each of CUTS stretches.

    The stretches are equally long in the mean of operators and time. Where there are few operators, all are cuts.
    """
    if trace.operator_count <= 2 * CUTS:
        return np.arange(trace.operator_count)
    count, total_us = trace.operator_count, float(trace.latency_us.sum())
    reached = np.arange(count) / count + (np.cumsum(trace.latency_us) - trace.latency_us) / (total_us or 1.0)
    stretch = np.minimum((reached / 2 * CUTS).astype(np.int64), CUTS - 1)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    worst = [start + int(np.argmax(excess[start:end])) for start, end in zip(first, [*first[1:], count], strict=True)]
    return np.unique([0, *worst])


class _Rows:
    """Rows Σ value · column ≤ limit, and columns ≥ 0."""

    def __init__(self) -> None:
        self.columns = 0
        self.limits: list[float] = []
        self._entries: list[tuple[int, int, float]] = []

    def column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def row(self, entries: Sequence[tuple[int, float]], limit: float) -> None:
        number = len(self.limits)
        self.limits.append(limit)
        self._entries += [(number, column, value) for column, value in entries]

    def matrix(self) -> Any:
        from scipy.sparse import csr_array

        rows, columns, values = (np.array(part) for part in zip(*self._entries, strict=True))
        return csr_array((values, (rows, columns)), shape=(len(self.limits), self.columns))


class _Stretch(NamedTuple):
    """The time between two cuts. The end of one across the end of the iteration has K more."""

    begin: int
    end: int


class _Program:
    """The program. Its unit of time is the sum of all latencies; memory at a cut is in units of the excess there."""

    def __init__(self, trace: Trace, profile: DeviceProfile, excess: Int64s) -> None:
        cuts = _cuts(trace, excess)
        self.cuts = len(cuts)
        self.unit_us = float(trace.latency_us.sum()) or 1.0
        reached = np.concatenate(([0.0], np.cumsum(trace.latency_us))) / self.unit_us
        self.whole = float(reached[-1])
        self.starts, self.ends = reached[cuts].tolist(), reached[cuts + 1].tolist()  # of the operators at the cuts
        self.gaps, neglected = classified(absences(trace, profile), cuts, excess[cuts], trace.operator_count)
        self.out, self.back, self.remade = (
            (us / self.unit_us).tolist() for us in (self.gaps.out_us, self.gaps.in_us, self.gaps.recompute_us)
        )
        self.rows = _Rows()
        self._columns(np.flatnonzero(excess[cuts] > 0).tolist())
        self._memory(excess[cuts] - neglected)
        into, out = self._lane_in(), self._lane_out()
        if profile.duplex_factor < 1 and trace.coding is None:  # coding keeps its speed
            self._link(into, out, 2 * profile.duplex_factor)
        self._operators()

    # ---- columns ----

    def _columns(self, short: list[int]) -> None:
        """Add the columns of the gaps, and their definitions. `short`: the cuts at which something is in excess."""
        gaps, rows = self.gaps, self.rows
        self.added = [rows.column() for _ in range(self.cuts)]  # before cut k + 1
        for before, after in pairwise(self.added):
            rows.row([(before, 1.0), (after, -1.0)], 0.0)
        self.u: list[dict[int, int]] = [{} for _ in range(self.cuts)]  # by cut: gap → column
        self.w: list[dict[int, int]] = [{} for _ in range(self.cuts)]
        for cut in short:
            within = (cut - gaps.first) % self.cuts < gaps.last - gaps.first
            for gap in np.flatnonzero(within).tolist():
                self.u[cut][gap] = rows.column()
                if self.remade[gap] < np.inf and cut < gaps.until[gap]:
                    self.w[cut][gap] = rows.column()
                    rows.row([(self.u[cut][gap], 1.0), (self.w[cut][gap], 1.0)], 1.0)
        self.shares = rows.columns  # columns up to here, but for `added`, are at most 1

    # ---- rows ----

    def _memory(self, excess: Int64s) -> None:
        for cut in np.flatnonzero(excess > 0).tolist():
            weights = (self.gaps.bytes / excess[cut]).tolist()
            parts = [*self.u[cut].items(), *self.w[cut].items()]
            self.rows.row([(column, -weights[gap]) for gap, column in parts], -1.0)

    def _time(self, stretch: _Stretch) -> tuple[list[tuple[int, float]], float]:
        """Return the time of a stretch without the operator at its begin, as minus its columns and a constant."""
        begin, (around, end) = stretch.begin, divmod(stretch.end, self.cuts)
        constant = around * self.whole + self.starts[end] - self.ends[begin]
        entries = [(self.added[begin - 1], 1.0)] if begin else []
        entries += [(self.added[end - 1], -1.0)] if end else []
        return entries + [(self.added[-1], -1.0)] * around, constant

    def _served(
        self, before: int | None, terms: Sequence[tuple[int, float]], time: tuple[list[tuple[int, float]], float]
    ) -> int:
        """Return a column for the time of `terms` and of what was served `before`, which is limited to `time`."""
        column = self.rows.column()
        earlier = [(before, 1.0)] if before is not None else []
        self.rows.row([*terms, *earlier, (column, -1.0)], 0.0)
        entries, constant = time
        self.rows.row([(column, 1.0), *entries], constant)
        return column

    def _lane_in(self) -> dict[_Stretch, int]:
        """Limit the swap-ins of each stretch; return the column of their time."""
        served = dict[_Stretch, int]()
        for begin, away in enumerate(self.u):
            gaps = np.array(list(away), np.int64)
            last = begin + 1 + (self.gaps.last[gaps] - begin - 1) % self.cuts  # in the time from the cut on
            column: int | None = None
            for end, members in _groups(last):
                terms = [(away[gap], self.back[gap]) for gap in gaps[members].tolist()]
                column = served[_Stretch(begin, end)] = self._served(column, terms, self._time(_Stretch(begin, end)))
        return served

    def _lane_out(self) -> dict[_Stretch, int]:
        """Limit the copies out of each stretch; return the column of their time."""
        served = dict[_Stretch, int]()
        for end, away in enumerate(self.u):
            gaps = np.array([gap for gap in away if self.out[gap] > 0], np.int64)
            written = end - self.cuts + (self.gaps.written[gaps] - end) % self.cuts  # in the time up to the cut
            column: int | None = None
            for begin, members in reversed(list(_groups(written))):
                terms = [(away[gap], self.out[gap]) for gap in gaps[members].tolist()]
                around = self.cuts if begin < 0 else 0
                stretch = _Stretch(begin + around, end + around)
                column = served[stretch] = self._served(column, terms, self._time(stretch))
        return served

    def _link(self, into: dict[_Stretch, int], out: dict[_Stretch, int], speed: float) -> None:
        """Limit what both lanes serve in a stretch, because together they have `speed` times that of one alone."""
        for stretch in sorted(into.keys() & out.keys()):
            entries, constant = self._time(stretch)
            limited = [(column, value * speed) for column, value in entries]
            self.rows.row([(into[stretch], 1.0), (out[stretch], 1.0), *limited], constant * speed)

    def _operators(self) -> None:
        """Limit what is recomputed between two cuts to the time added there."""
        for begin, away in enumerate(self.w):
            gaps = np.array(list(away), np.int64)
            column: int | None = None
            for end, members in _groups(self.gaps.last[gaps]):
                terms = [(away[gap], self.remade[gap]) for gap in gaps[members].tolist()]
                since = [(self.added[begin - 1], 1.0)] if begin else []
                column = self._served(column, terms, ([(self.added[end - 1], -1.0), *since], 0.0))

    # ---- solving ----

    def solve(self, limit_s: float) -> float | None:
        """Return the bound in µs, or None if the solver has not ended in time.

        It is that of the dual values, which holds whatever their errors: for y ≤ 0, rows A·c ≤ b and columns between 0
        and h, cost·c ≥ b·y + Σ min(0, (cost − Aᵀy) · h) (Neumaier and Shcherbina, Mathematical Programming 99, 2004).
        """
        from scipy.optimize import linprog

        matrix, limits = self.rows.matrix(), np.array(self.rows.limits)
        cost = np.zeros(self.rows.columns)
        cost[self.added[-1]] = 1.0
        most = 2 * (1 + sum(self.out) + sum(self.back) + sum(us for us in self.remade if us < np.inf))
        highest = np.full(self.rows.columns, most)
        highest[len(self.added) : self.shares] = 1.0
        ranges = np.stack((np.zeros_like(highest), highest), axis=1)
        solution = linprog(cost, matrix, limits, bounds=ranges, method="highs-ds", options={"time_limit": limit_s})
        if solution.status != 0:
            return None
        dual = np.minimum(solution.ineqlin.marginals, 0.0)
        bound = float(limits @ dual + np.minimum((cost - matrix.T @ dual) * highest, 0.0).sum())
        return (min(bound, most) - INEXACT) * self.unit_us


def _groups(keys: Int64s) -> Iterator[tuple[int, list[int]]]:
    """Yield each key, in ascending order, with the indices that have it."""
    order = np.argsort(keys, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if members.size:
            yield int(keys[members[0]]), members.tolist()
