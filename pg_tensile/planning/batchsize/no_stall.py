"""The largest batch with which nothing stalls (AccUDNN, Algorithm 2), by the paper's own scheme.

Memory grows with the batch: the bytes of every tensor do (traces.py demands it), and what is on the device at an
operator is a sum of them. So the largest batch that is trainable is found by bisection. That nothing stalls is not
monotone for certain: which feature maps are pinned is decided greedily, and a transfer has a latency that small batches
feel more. So the search goes down as the paper's does, by an eighth instead of by one, to the first batch that
satisfies constraint (6), and then halves the interval to the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.policies.building_blocks.ready import Layerwise, Pinning
from pg_tensile.planning.trace.trace import Trace

STEP = 8  # the next batch tried is smaller by one in so many


class Unstalled(NamedTuple):
    """`largest`: the largest trainable batch, M_peak within the budget. `batch_size`: the largest found with which
    nothing stalls (0: none), with the feature maps pinned for it."""

    largest: int
    batch_size: int
    pinned: frozenset[int]


def largest_without_stall(
    timed_trace: Callable[[int], Trace], profile: DeviceProfile, budget_bytes: int, least: int, most: int
) -> Unstalled | None:
    """Of the sizes from `least` to `most`. `timed_trace(size)`: the trace with latencies. None: not even `least` rows
    are trainable."""

    def layerwise(size: int) -> Layerwise:
        return Layerwise(timed_trace(size), profile)

    largest = _last(least, most, lambda size: layerwise(size).least_bytes <= budget_bytes)
    if largest is None:
        return None

    def pinning(size: int) -> Pinning | None:
        found = layerwise(size).pinning(budget_bytes)
        return found if found is not None and not found.ready.stalled else None

    size, above = largest, largest + 1
    while (found := pinning(size)) is None and size > least:
        size, above = max(least, size - max(1, size // STEP)), size
    if found is None:
        return Unstalled(largest, 0, frozenset())
    best = _last(size, above - 1, lambda each: pinning(each) is not None) or size
    found = pinning(best)
    assert found is not None
    return Unstalled(largest, best, found.pinned)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """By bisection the last of `low` … `high` for which it holds, if it does up to somewhere; None: nowhere."""
    if low > high or not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
