"""Numbers that models of tables take of an array: its elements, or means of segments, and what a series adds.

An array of more than MOST_ELEMENTS elements is given as the means of equally long segments of neighbours. In a series,
neighbours resemble each other, so that what happens is in their differences; these are given, too, and the last
element, the mean and the deviation. An element that is not finite has no part in a mean, and leaves out (as NaN) what
cannot be computed without it.

Needs numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_ELEMENTS = 4096  # of an array that are taken one by one
LEAST_SERIES = 8  # elements
SAMPLE_ROWS = 1000
DISTANCES = 16  # at which elements are compared with neighbours
ALIKE = 0.8  # mean difference of neighbours in a series, as a part of that of elements farther apart
ADDED = 3  # the last element, the mean and the deviation


def segment_of(length: int) -> int:
    """Return how many neighbours of an array of this length are given as one number."""
    return -(-length // MOST_ELEMENTS)


def width_of(length: int, segment: int, series: bool) -> int:
    """Return how many numbers `numbers_of` makes of an array."""
    count = -(-length // max(segment, 1))
    return count + (count - 1 + ADDED if series else 0)


def is_series(x: NDArray[np.float64]) -> bool:
    """Return whether neighbours in the rows of x [rows, length] resemble each other."""
    length = x.shape[1]
    if length < LEAST_SERIES:
        return False
    distances = np.unique(np.linspace(length // 3, 2 * length // 3, DISTANCES).astype(int))
    return _difference(x, 1) < ALIKE * max(_difference(x, distance) for distance in distances.tolist())


def numbers_of(x: NDArray[np.float64], segment: int = 1, series: bool = False) -> NDArray[np.float64]:
    """Return the numbers [rows, width] of arrays x [rows, length]; those that are not finite stand for nothing."""
    if segment > 1:
        x = _segment_means(x, segment)
    if not series:
        return x
    x = np.where(np.isfinite(x), x, np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = _mean(x)
        deviation = np.sqrt(_mean((x - mean) ** 2))
        return np.concatenate((x, np.diff(x), x[:, -1:], mean, deviation), axis=1)


def _segment_means(x: NDArray[np.float64], segment: int) -> NDArray[np.float64]:
    """Return the means of neighbours [rows, segments], of which the last may be fewer."""
    rows, length = x.shape
    missing = np.full((rows, -length % segment), np.nan)
    parts = np.concatenate((x, missing), axis=1).reshape(-1, segment)
    return _mean(parts).reshape(rows, -(-length // segment))


def _mean(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each row's finite numbers, [rows, 1], NaN if there are none."""
    is_finite = np.isfinite(x)
    counts = is_finite.sum(axis=1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):  # sums of parts may be infinities of both signs
        sums = np.where(is_finite, x, 0.0).sum(axis=1, keepdims=True)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _difference(x: NDArray[np.float64], distance: int) -> float:
    """Return the mean absolute difference of two elements of a row with this distance, 0 without any."""
    with np.errstate(over="ignore", invalid="ignore"):
        differences = np.abs(x[:, distance:] - x[:, :-distance])
    differences = differences[np.isfinite(differences)]
    return float(differences.mean()) if len(differences) else 0.0
