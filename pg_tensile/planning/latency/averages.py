"""Operators' latency while a job runs: predicted first, then corrected by what is measured (TENSILE, section IV-E).

Each operator has an exponential moving average. What goes into it is the median of its last three measurements, so that
one that is wrong by whatever factor changes nothing, and a lasting change shows with the second. `changed` is the
paper's test of whether it is time for a new plan: |s′ − s| / s, where s is the sum of all latencies that the plan was
made with and s′ the sum now.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.errors import MeasurementError

WEIGHT = 0.2  # of a new measurement
_RECENT = 3
_MOST = 65535  # of a count
_RANGE_US = (1e-3, 1e12)  # a nanosecond, eleven days: what lies outside was not measured


class AverageState(NamedTuple):
    """`LatencyAverages` as arrays, for a table or for shared memory: 18 bytes an operator."""

    latency_us: NDArray[np.float32]  # [operators]
    recent_us: NDArray[np.float32]  # [3, operators]: the last measurements, the newest last; NaN: not so many yet
    measurements: NDArray[np.uint16]  # [operators]: how many there were, at most 65535
    planned_us: float  # sum of the latencies that the plan in force was made with; 0: there is none


class LatencyAverages:
    """The averages of n operators. Begins with a prediction, which counts as one measurement: the first weights are
    1/2, 1/3, … down to `weight`.

    >>> averages = LatencyAverages(np.array([10.0, 20.0]))
    >>> averages.plan_made()
    >>> for _ in range(20):
    ...     averages.add([20.0, 40.0])
    >>> averages.changed(0.5)
    True
    """

    def __init__(self, predicted_us: ArrayLike, weight: float = WEIGHT) -> None:
        """`predicted_us`: [operators], not negative and at most 10¹². Raises MeasurementError."""
        self._latency = np.array(predicted_us, np.float64)
        if not 0 < weight <= 1:
            raise MeasurementError(f"the weight of a measurement cannot be {weight}", hint="Use 0.2, or up to 1.")
        if self._latency.ndim != 1 or not ((self._latency >= 0) & (self._latency <= _RANGE_US[1])).all():
            raise MeasurementError("averages begin with one finite latency for each operator")
        self._weight = weight
        self._recent = np.full((_RECENT, len(self._latency)), np.nan)
        self._count = np.zeros(len(self._latency), np.int64)
        self._planned_us = 0.0

    @property
    def latency_us(self) -> NDArray[np.float64]:
        """float64[operators]: the averages now, a copy."""
        return self._latency.copy()

    @property
    def total_us(self) -> float:
        """Of the whole iteration."""
        return float(self._latency.sum())

    @property
    def measurements(self) -> int:
        """Of the operator that was measured least."""
        return int(self._count.min(initial=_MOST)) if len(self._count) else 0

    def add(self, measured_us: ArrayLike) -> None:
        """One measurement of each operator, [operators]. What no operator takes (negative, NaN, days) is left out, and
        so is 0: it stands for an operator that was not measured. Raises MeasurementError if they are not as many as
        there are operators."""
        measured = np.asarray(measured_us, np.float64)
        if measured.shape != self._latency.shape:
            raise MeasurementError(f"{measured.size} operators were measured in a trace of {len(self._latency)}")
        valid = (measured >= _RANGE_US[0]) & (measured <= _RANGE_US[1])
        self._recent[:, valid] = np.concatenate((self._recent[1:, valid], measured[None, valid]))
        self._count[valid] = np.minimum(self._count[valid] + 1, _MOST)
        weight = np.maximum(self._weight, 1 / (self._count[valid] + 1))
        self._latency[valid] += weight * (self._typical()[valid] - self._latency[valid])

    def _typical(self) -> NDArray[np.float64]:
        """The median of the last three; of two the smaller, because what disturbs a measurement slows it down."""
        ordered = np.sort(self._recent, axis=0)  # NaN come last
        middle = (np.maximum(1, np.isfinite(self._recent).sum(0)) - 1) // 2
        return ordered[middle, np.arange(ordered.shape[1])]

    # ---- the plan ----

    def plan_made(self) -> None:
        """The plan in force from now on was made with the averages as they are."""
        self._planned_us = self.total_us

    def change(self) -> float:
        """|s′ − s| / s; infinite before there is a plan."""
        return abs(self.total_us - self._planned_us) / self._planned_us if self._planned_us > 0 else float("inf")

    def changed(self, threshold: float) -> bool:
        """Whether a new plan is due."""
        return self.change() > threshold

    # ---- to keep them ----

    def state(self) -> AverageState:
        count = self._count.astype(np.uint16)
        return AverageState(self._latency.astype(np.float32), self._recent.astype(np.float32), count, self._planned_us)

    @classmethod
    def from_state(cls, state: AverageState, weight: float = WEIGHT) -> LatencyAverages:
        """Raises MeasurementError if the arrays are not a state."""
        averages = cls(state.latency_us, weight)
        recent, count = np.array(state.recent_us, np.float64), np.array(state.measurements, np.int64)
        operators = len(averages._latency)
        measured = np.isfinite(recent) & (recent > 0)
        fits = recent.shape == (_RECENT, operators) and count.shape == (operators,)
        if not (
            fits and (measured | np.isnan(recent)).all() and np.isfinite(state.planned_us) and state.planned_us >= 0
        ):
            raise MeasurementError("averages of latencies are damaged: their arrays do not fit together")
        averages._recent, averages._count, averages._planned_us = recent, count, float(state.planned_us)
        return averages
