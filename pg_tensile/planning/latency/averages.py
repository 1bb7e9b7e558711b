"""Latency of operators while a job runs: predicted first, then corrected by measurements (TENSILE, section IV-E).

Each operator has an exponential moving average of what is typical of its and its twins' last three measurements
(twins.py), so that a single outlier of any size has no effect, and a lasting change shows with its second measurement.

The averages stand for a load of the device (load.py): that of the measurements, each weighted as it is in the averages'
sum.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.latency.twins import LEAST, RANGE_US, typical_us, usable
from pg_tensile.planning.trace.trace import Floats, Int32s

WEIGHT = 0.2  # of a new measurement
_RECENT = 3
_MOST = 65535  # largest count


class LatencyAverages:
    """Moving averages of the latencies of n operators.

    They start from a prediction, which counts as one measurement until an operator and its twins have `LEAST` readings
    and replace it. The weight of a measurement decreases to `weight` afterwards.

    >>> averages = LatencyAverages(np.array([10.0, 20.0]))
    >>> averages.add([20.0, 40.0])
    >>> averages.total_us
    45.0
    """

    def __init__(
        self, predicted_us: ArrayLike, weight: float = WEIGHT, twins: Int32s | None = None, load: float = 0.0
    ) -> None:
        """Start from `predicted_us` [operators], each from 0 to 10¹², predicted for `load` (0 … 1).

        `twins` are the operators' groups, as of `twins_of`; by default no operator has a twin. Raises MeasurementError.
        """
        self._latency = np.array(predicted_us, np.float64)
        if not 0 < weight <= 1:
            raise MeasurementError(f"the weight of a measurement cannot be {weight}", hint="Use 0.2, or up to 1.")
        if self._latency.ndim != 1 or not ((self._latency >= 0) & (self._latency <= RANGE_US[1])).all():
            raise MeasurementError("averages begin with one finite latency for each operator")
        operators = len(self._latency)
        self._twins = np.arange(operators, dtype=np.int32) if twins is None else twins
        if self._twins.shape != self._latency.shape:
            raise MeasurementError(f"{self._twins.size} operators are in groups in a trace of {operators}")
        self._weight = weight
        self._recent = np.full((_RECENT, operators), np.nan)
        self._count = np.zeros(operators, np.int64)  # of measurements of the operator or a twin
        self._load = load
        self._recent_loads: deque[float] = deque(maxlen=_RECENT)

    @property
    def latency_us(self) -> NDArray[np.float64]:
        """Current averages, float64[operators]; a copy."""
        return self._latency.copy()

    @property
    def total_us(self) -> float:
        """Sum of the averages: µs of the whole iteration."""
        return float(self._latency.sum())

    @property
    def load(self) -> float:
        """Load of the device by others that the averages stand for, 0 … 1."""
        return self._load

    @property
    def measurements(self) -> int:
        """Number of measurements of the operator that was measured least often; those of twins count."""
        return int(self._count.min(initial=_MOST)) if len(self._count) else 0

    def add(self, measured_us: ArrayLike, load: float | None = None) -> None:
        """Add one measurement of each operator, [operators], made under `load` (0 … 1; None: not known).

        Values that no operator can take (negative, NaN, days) are ignored, and so is 0, which stands for an operator
        that was not measured. Raises MeasurementError if the number of values is not that of the operators.
        """
        measured = np.asarray(measured_us, np.float64)
        if measured.shape != self._latency.shape:
            raise MeasurementError(f"{measured.size} operators were measured in a trace of {len(self._latency)}")
        valid = usable(measured)
        self._recent[:, valid] = np.concatenate((self._recent[1:, valid], measured[None, valid]))
        changed = self._of_twins(valid) > 0
        self._count[changed] = np.minimum(self._count[changed] + 1, _MOST)
        replaces = (self._of_twins(usable(self._recent).sum(0)) >= LEAST) & (self._count <= _RECENT)
        weight = np.where(replaces, 1.0, np.maximum(self._weight, 1 / (self._count + 1)))[changed]
        typical = typical_us(self._recent, self._twins, follow=True)[changed]
        self._latency[changed] += weight * (typical - self._latency[changed])
        if load is not None:
            self._recent_loads.append(load)
            part = float((weight * typical).sum()) / (self.total_us or 1.0)  # of the sum that the measurement makes up
            recent = sorted(self._recent_loads)
            self._load += part * (recent[(len(recent) - 1) // 2] - self._load)

    def _of_twins(self, numbers: NDArray[np.generic]) -> Floats:
        """Return for each operator the sum of `numbers`, one for each operator, over it and its twins."""
        sums = np.bincount(self._twins, numbers, self._twins.max(initial=-1) + 1)
        return sums.astype(np.float64)[self._twins]
