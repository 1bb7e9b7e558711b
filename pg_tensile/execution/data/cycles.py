"""Cycles of timestamps: the day in the week, the day in the year and the time of day as sines and cosines.

Needs numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DAY_US = 86_400e6
EPOCH_DAYS = 10_957  # 2000-01-01 in days since 1970-01-01
UNIX_US = EPOCH_DAYS * DAY_US  # and in microseconds
_RADIANS = 2.0 * np.pi / np.array([[7.0], [365.25], [1.0]])  # per day, for the cycles of the week, year and day


def cycle_width(hour: bool) -> int:
    """Return the number of columns that a timestamp's cycles take."""
    return 6 if hour else 4


def cycles(microseconds: NDArray[np.float64], valid: NDArray[np.bool_], hour: bool) -> NDArray[np.float64]:
    """Return the sines, then the cosines, of the day in the week and in the year and, if `hour`, of the time of day.

    The result is [rows, 4], or [rows, 6] if `hour`; all are 0 for nulls."""
    angles = np.empty((3 if hour else 2, len(microseconds)))
    days_exact = np.where(valid, microseconds, 0.0)
    np.maximum(np.minimum(days_exact, 9.2e18, out=days_exact), -9.2e18, out=days_exact)
    days_exact /= DAY_US
    days = np.floor(days_exact)
    dates = (days.astype(np.int64) + EPOCH_DAYS).view("datetime64[D]")
    np.mod(days, 7.0, out=angles[0])
    angles[1] = (dates - dates.astype("datetime64[Y]")).view(np.int64)
    if hour:
        np.subtract(days_exact, days, out=angles[2])
    angles *= _RADIANS[: len(angles)]
    waves = np.concatenate((np.sin(angles), np.cos(angles)))
    waves *= valid
    return waves.T
