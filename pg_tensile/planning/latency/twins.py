"""Latencies from readings of the clock, although other processes keep the machine busy now and then.

*Twins* are operators of equal target, signature, work and sizes of the tensors that they access. They do the same, so
every reading of one is a reading of all of them: a training step of hundreds of operators has some dozens of calls, and
an operator that was measured three times has dozens of readings. The latency of twins is, in each round, the median of
their readings, and over the rounds the median of these, so that a round that was slow as a whole has no effect.

A busy neighbour does not stretch readings evenly: it lets some pass as they are and makes others several times as long.
Once the latter are more than half of them, a median is wrong however many there are. Such *bursts* have a shape of
their own: among twins in one round the shortest readings lie close together, and the median lies far above them.
Rounds are not compared with one another for this, because a lasting change would look the same. The shape is that of
the whole iteration, for few twins are enough to see it alone. With bursts, a low quantile of all readings takes the
place of the medians.

The constants come from simulation: 60 iterations of 450 operators in 58 groups, three rounds each, drawn by
tests/unit/planning/latency/noise.py (test_twins.py checks them):

- `STEEP`: the mean of `steepness` was 0.46 or more in log-normal noise of deviations from 0.07 (a quiet machine) to 1,
  and less than 0.44 in 98 % of the iterations in which bursts lengthened 50 % to 70 % of the readings.
- `LOW`: among quantiles in steps of 0.05, the one with the smallest error on average where bursts lengthened 50 % to
  60 % of the readings. Where they lengthened fewer, it was too low, by less than the deviation of a quiet machine.
- `STRETCHES`: of iterations with fewer groups to look at (120 operators), some without bursts had less than `STEEP`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.planning.trace.trace import Bools, Floats, Int32s, Trace

LEAST = 3  # readings of twins, with which they replace a prediction
RANGE_US = (1e-3, 1e12)  # a nanosecond, eleven days; values outside are not readings
LOW = 0.2
STEEP = 0.44
STRETCHES = 30
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


def typical_us(readings: ArrayLike, twins: Int32s) -> Floats:
    """Return the latency of each operator, float64[operators], µs; NaN if neither it nor a twin was measured.

    `readings` are float64[rounds, operators], µs; those that are not `usable` are ignored. `twins` are the operators'
    groups. Of an even number of rounds the smaller one of the two in the middle counts, because disturbances only ever
    lengthen a reading.
    """
    readings = np.asarray(readings, np.float64)
    if bursts(readings, twins):
        sorts = _Sorted(readings, twins, rounds_apart=False)
        return sorts.at(np.floor(LOW * (sorts.count - 1)))[0, twins]
    sorts = _Sorted(readings, twins, rounds_apart=True)
    ordered = np.sort(sorts.medians(), axis=0)  # NaN come last
    middle = (np.maximum(1, np.isfinite(ordered).sum(0)) - 1) // 2
    return ordered[middle, np.arange(ordered.shape[1])][twins]


def bursts(readings: ArrayLike, twins: Int32s) -> bool:
    """Return whether readings [rounds, operators] are lengthened in bursts; False if there are too few to tell."""
    found = steepness(np.asarray(readings, np.float64), twins)
    return len(found) >= STRETCHES and bool(found.mean() < STEEP)


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
        shape = (len(readings) if rounds_apart else 1, groups)
        self._values = np.append(values[np.lexsort((values, keys))], np.nan)
        self.count: NDArray[np.int64] = np.bincount(keys, minlength=shape[0] * groups).reshape(shape)
        self._start = (np.cumsum(self.count) - self.count.ravel()).reshape(shape)

    def at(self, rank: ArrayLike) -> Floats:
        """Return the readings of these ranks, from 0, of each row and group; NaN where there are no readings."""
        place = self._start + np.asarray(rank, np.int64)
        return self._values[np.where(self.count > 0, place, len(self._values) - 1)]

    def medians(self) -> Floats:
        """Return the median of each row and group; NaN where there are no readings."""
        return (self.at((self.count - 1) // 2) + self.at(self.count // 2)) / 2
