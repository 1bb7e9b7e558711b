"""Latencies from readings of the clock, although other processes keep the machine busy now and then.

*Twins* are operators of equal target, signature, work and sizes of the tensors that they access. They do the same, so
every reading of one is a reading of all of them: a training step of hundreds of operators has some dozens of calls, and
an operator that was measured three times has dozens of readings. The latency of twins is the median of all of them.

A busy neighbour does not stretch readings evenly: it lets some pass as they are and makes others several times as long.
Once the latter are more than half of them, a median is wrong however many there are. Such *bursts* have a shape of
their own: among twins in one round the shortest readings lie close together, and the median lies far above them.
Rounds are not compared with one another for this, because a lasting change would look the same. The shape is that of
the whole iteration, for few twins are enough to see it alone. With bursts, the median is that of the readings that are
hardly longer than the shortest ones.

The constants come from simulation: iterations of 60 to 450 operators in 20 to 58 groups, one and three rounds each,
drawn by tests/unit/planning/latency/noise.py (test_twins.py checks them):

- `STEEP`, `CERTAIN`: the mean of `steepness` was 0.53 to 0.56 on average in log-normal noise of any deviation, and 0.31
  to 0.42 where bursts lengthened 40 % to 70 % of the readings. At most 1 in 100 draws of the former count as bursts. Of
  the latter, with half of the readings lengthened, nearly all of 450 operators do, half of those of 120 and few of 60.
- `SHORT`, `CLEAN`: the error was least with a `CLEAN` of 1.2 to 1.3, little more with 1.5, and grows from there, as
  readings that were lengthened a little are taken for clean ones. 1.5 leaves room for twins that differ, which the
  simulation has not: of those whose operands are in a cache, and those whose are not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.planning.trace.trace import Bools, Floats, Int32s, Trace

LEAST = 3  # readings of twins, with which they replace a prediction
RANGE_US = (1e-3, 1e12)  # a nanosecond, eleven days; values outside are not readings
STEEP = 0.5  # mean of `steepness` that bursts stay below
CERTAIN = 2.0  # … by this number of its standard errors
SHORT = 0.1  # share of readings that are shorter than what `CLEAN` refers to
CLEAN = 1.5  # largest ratio to it of a reading that was not lengthened
_FEWEST = 8  # groups and rounds whose steepness has a mean
_MEMBERS = 5  # least number of twins in which bursts can be seen
_NEAR = 0.2  # share of the readings that are the shortest ones


def twins_of(trace: Trace) -> Int32s:
    """Return the number of each operator's group of twins, int32[operators], from 0 in the order of appearance."""
    sizes = np.split(trace.tensor_bytes[trace.access_tensor], trace.access_start[1:-1])
    columns = (trace.target.codes, trace.signature.codes, trace.flops, trace.operator_bytes)
    numbers: dict[tuple[object, ...], int] = {}
    calls = zip(*(column.tolist() for column in columns), map(np.ndarray.tobytes, sizes), strict=True)
    return np.array([numbers.setdefault(call, len(numbers)) for call in calls], np.int32)


def usable(readings: ArrayLike) -> Bools:
    """Return which readings an operator can have taken; 0 stands for one that was not measured."""
    readings = np.asarray(readings, np.float64)
    return (readings >= RANGE_US[0]) & (readings <= RANGE_US[1])


def typical_us(readings: ArrayLike, twins: Int32s, follow: bool = False) -> Floats:
    """Return the latency of each operator, float64[operators], µs; NaN if neither it nor a twin was measured.

    `readings` are float64[rounds, operators], µs, of at least one round; those that are not `usable` are ignored.
    `twins` are the operators' groups. With `follow`, the latencies of each round are compared, because operators may
    have become slower or faster for good between two of them: the round in the middle counts, and of an even number
    the smaller one of the two in the middle, because disturbances only ever lengthen a reading.
    """
    readings = np.asarray(readings, np.float64)
    sorts = _Sorted(readings, twins, rounds_apart=follow)
    latency = sorts.clean_medians() if bursts(readings, twins) else sorts.medians()
    ordered = np.sort(latency, axis=0)  # NaN come last
    middle = (np.maximum(1, np.isfinite(ordered).sum(0)) - 1) // 2
    return ordered[middle, np.arange(ordered.shape[1])][twins]


def bursts(readings: ArrayLike, twins: Int32s) -> bool:
    """Return whether readings [rounds, operators] are lengthened in bursts; False if there are too few to tell."""
    steep = steepness(np.asarray(readings, np.float64), twins)
    if len(steep) < _FEWEST:
        return False
    return bool(steep.mean() + CERTAIN * steep.std(ddof=1) / np.sqrt(len(steep)) < STEEP)


def steepness(readings: Floats, twins: Int32s) -> Floats:
    """Return how close the shortest readings of twins are, from 0 to 1, for each round and group of at least five.

    It is the distance from the shortest reading to the last one of the shortest fifth, by the distance to the median,
    in logarithms. Groups whose readings do not differ are left out.
    """
    sorts = _Sorted(readings, twins, rounds_apart=True)
    enough = sorts.count >= _MEMBERS
    columns = sorts.at(np.zeros_like(sorts.count)), sorts.at(np.round(_NEAR * sorts.count)), sorts.medians()
    first, near, middle = (np.log(column[enough]) for column in columns)
    differ = middle > first
    return np.minimum(1.0, (near - first)[differ] / (middle - first)[differ])


class _Sorted:
    """Usable readings in ascending order, by group and, with `rounds_apart`, by round.

    `count` is int64[rounds, groups], the number of readings; a single row if rounds are not kept apart.
    """

    def __init__(self, readings: Floats, twins: Int32s, rounds_apart: bool) -> None:
        groups = int(twins.max(initial=-1)) + 1
        rounds, operators = np.nonzero(usable(readings))
        values = readings[rounds, operators]
        keys = twins[operators] + (groups * rounds if rounds_apart else 0)
        order = np.lexsort((values, keys))
        shape = (len(readings) if rounds_apart else 1, groups)
        self._keys = keys[order]
        self._values = np.append(values[order], np.nan)
        self.count: NDArray[np.int64] = np.bincount(keys, minlength=shape[0] * groups).reshape(shape)
        self._start = (np.cumsum(self.count) - self.count.ravel()).reshape(shape)

    def at(self, rank: ArrayLike) -> Floats:
        """Return the readings of these ranks, from 0, of each row and group; NaN where there are no readings."""
        place = self._start + np.asarray(rank, np.int64)
        return self._values[np.where(self.count > 0, place, len(self._values) - 1)]

    def medians(self) -> Floats:
        """Return the median of each row and group; NaN where there are no readings."""
        return self._medians_of(self.count)

    def clean_medians(self) -> Floats:
        """Return the median of the readings that were not lengthened, of each row and group."""
        limit = CLEAN * self.at(np.floor(SHORT * (self.count - 1)))
        clean = self._values[:-1] <= limit.ravel()[self._keys]
        return self._medians_of(np.bincount(self._keys, clean, self.count.size).astype(np.int64).reshape(limit.shape))

    def _medians_of(self, shortest: NDArray[np.int64]) -> Floats:
        """Return the medians of a number of shortest readings."""
        return (self.at((shortest - 1) // 2) + self.at(shortest // 2)) / 2
