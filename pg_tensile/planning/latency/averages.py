"""Latency of operators while a job runs: predicted first, then corrected by measurements (TENSILE, section IV-E).

Each operator has an exponential moving average of the median of its last three measurements, so that a single outlier
of any size has no effect, and a lasting change shows with its second measurement.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.errors import MeasurementError

WEIGHT = 0.2  # of a new measurement
_RECENT = 3
_MOST = 65535  # largest count
_RANGE_US = (1e-3, 1e12)  # a nanosecond, eleven days; values outside are not measurements


class LatencyAverages:
    """Moving averages of the latencies of n operators.

    They start from a prediction, which counts as one measurement: the first weights are 1/2, 1/3, … down to `weight`.

    >>> averages = LatencyAverages(np.array([10.0, 20.0]))
    >>> averages.add([20.0, 40.0])
    >>> averages.total_us
    45.0
    """

    def __init__(self, predicted_us: ArrayLike, weight: float = WEIGHT) -> None:
        """Start from `predicted_us` [operators], each from 0 to 10¹². Raises MeasurementError."""
        self._latency = np.array(predicted_us, np.float64)
        if not 0 < weight <= 1:
            raise MeasurementError(f"the weight of a measurement cannot be {weight}", hint="Use 0.2, or up to 1.")
        if self._latency.ndim != 1 or not ((self._latency >= 0) & (self._latency <= _RANGE_US[1])).all():
            raise MeasurementError("averages begin with one finite latency for each operator")
        self._weight = weight
        self._recent = np.full((_RECENT, len(self._latency)), np.nan)
        self._count = np.zeros(len(self._latency), np.int64)

    @property
    def latency_us(self) -> NDArray[np.float64]:
        """Current averages, float64[operators]; a copy."""
        return self._latency.copy()

    @property
    def total_us(self) -> float:
        """Sum of the averages: µs of the whole iteration."""
        return float(self._latency.sum())

    @property
    def measurements(self) -> int:
        """Number of measurements of the operator that was measured least often."""
        return int(self._count.min(initial=_MOST)) if len(self._count) else 0

    def add(self, measured_us: ArrayLike) -> None:
        """Add one measurement of each operator, [operators].

        Values that no operator can take (negative, NaN, days) are ignored, and so is 0, which stands for an operator
        that was not measured. Raises MeasurementError if the number of values is not that of the operators.
        """
        measured = np.asarray(measured_us, np.float64)
        if measured.shape != self._latency.shape:
            raise MeasurementError(f"{measured.size} operators were measured in a trace of {len(self._latency)}")
        valid = (measured >= _RANGE_US[0]) & (measured <= _RANGE_US[1])
        self._recent[:, valid] = np.concatenate((self._recent[1:, valid], measured[None, valid]))
        self._count[valid] = np.minimum(self._count[valid] + 1, _MOST)
        weight = np.maximum(self._weight, 1 / (self._count[valid] + 1))
        self._latency[valid] += weight * (self._typical()[valid] - self._latency[valid])

    def _typical(self) -> NDArray[np.float64]:
        """Return the median of the last three measurements; of two, the smaller one.

        Disturbances only ever lengthen a measurement.
        """
        ordered = np.sort(self._recent, axis=0)  # NaN come last
        middle = (np.maximum(1, np.isfinite(self._recent).sum(0)) - 1) // 2
        return ordered[middle, np.arange(ordered.shape[1])]
