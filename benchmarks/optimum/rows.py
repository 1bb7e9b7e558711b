"""A linear program with integers, written down row by row, and HiGHS to solve it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import highspy
import numpy as np

INFINITE = math.inf


class Solved(NamedTuple):
    values: list[float] | None  # of the columns; None if no solution was found in time
    bound: float  # lower bound of all solutions
    proved: bool  # whether the solution is optimal


class Rows:
    """Columns and rows of a program that minimises the sum of its columns' costs."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, float, float, bool]] = []  # lower, upper, cost, integer
        self._limits: list[tuple[float, float]] = []
        self._starts = [0]
        self._index: list[int] = []
        self._value: list[float] = []

    def column(self, upper: float = INFINITE, cost: float = 0.0, integer: bool = False, lower: float = 0.0) -> int:
        self._columns.append((lower, upper, cost, integer))
        return len(self._columns) - 1

    def row(self, terms: Mapping[int, float], upper: float = INFINITE, lower: float = -INFINITE) -> None:
        """Add the row lower ≤ Σ terms ≤ upper."""
        self._index += terms.keys()
        self._value += terms.values()
        self._starts.append(len(self._index))
        self._limits.append((lower, upper))

    def solve(self, limit_s: float, seed: int, start: Mapping[int, float]) -> Solved:
        """Solve the program. `start`: values of the integer columns of a known solution."""
        solver = highspy.Highs()
        options = {"output_flag": False, "time_limit": limit_s, "threads": 1, "mip_rel_gap": 1e-6, "random_seed": seed}
        for option, value in options.items():
            solver.setOptionValue(option, value)
        solver.passModel(self._model())
        if start:
            solver.setSolution(len(start), np.array(list(start), np.int32), np.array(list(start.values())))
        solver.run()
        info = solver.getInfo()
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = list(solver.getSolution().col_value) if feasible else None
        proved = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return Solved(values, info.mip_dual_bound, proved)

    def _model(self) -> highspy.HighsLp:
        lower, upper, cost, integer = zip(*self._columns, strict=True)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(self._limits)
        model.col_lower_, model.col_upper_, model.col_cost_ = np.array(lower), np.array(upper), np.array(cost)
        model.row_lower_, model.row_upper_ = (np.array(limit) for limit in zip(*self._limits, strict=True))
        model.integrality_ = [
            highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous for whole in integer
        ]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, np.int32)
        model.a_matrix_.index_ = np.array(self._index, np.int32)
        model.a_matrix_.value_ = np.array(self._value)
        return model
