"""Readings of operators as a clock takes them on a quiet machine, on a noisy one, and beside a busy neighbour."""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.trace.trace import Floats, Int32s

QUIET = 0.07  # deviation of the logarithm of an operator's readings on a quiet machine


def iteration(random: np.random.Generator, operators: int = 450, groups: int = 58) -> tuple[Floats, Int32s]:
    """Draw an iteration: the true latency of each operator, µs, and its group of twins. Many groups have one member."""
    weight = random.lognormal(0, 1.3, groups)
    sizes = np.maximum(1, np.round(weight / weight.sum() * operators)).astype(int)
    twins = random.permutation(np.repeat(np.arange(groups, dtype=np.int32), sizes))
    return random.lognormal(4, 1.5, groups)[twins], twins


def spread(random: np.random.Generator, true_us: Floats, rounds: int, deviation: float = QUIET) -> Floats:
    """Draw readings [rounds, operators] with log-normal noise."""
    return true_us * random.lognormal(0, deviation, (rounds, len(true_us)))


def bursts(random: np.random.Generator, true_us: Floats, rounds: int, share: float = 0.5) -> Floats:
    """Draw readings [rounds, operators] beside a neighbour that is busy for `share` of the time.

    It is busy and idle for some dozens of operators in turn, and makes each reading 1.2 to 10 times as long.
    """
    readings = spread(random, true_us, rounds)
    for row in readings:
        place, is_busy = 0, random.random() < share
        while place < len(row):
            length = 1 + random.geometric(1 / (40 * (share if is_busy else 1 - share)))
            if is_busy:
                stretch = row[place : place + length]
                stretch *= np.exp(random.uniform(np.log(1.2), np.log(10), len(stretch)))
            place, is_busy = place + length, not is_busy
    return readings
