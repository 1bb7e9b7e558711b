"""Search for the largest batch with which nothing stalls (AccUDNN, Algorithm 2), by the paper's own scheme.

Memory grows with the batch: the bytes of every tensor do (traces.py requires it), and the memory in use at an operator
is a sum of them. So the largest trainable batch is found by bisection. The absence of stalls is not guaranteed to be
monotone: the feature maps to pin are chosen greedily, and the latency of transfers weighs more in small batches. So the
search descends as the paper's does, but by an eighth instead of by one, to the first batch that satisfies constraint
(6), and then bisects the interval between it and the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.policies.accudnn import Layerwise, Pinning
from pg_tensile.planning.trace.trace import Trace

STEP = 8  # the next batch tried is smaller by 1 / STEP


class Unstalled(NamedTuple):
    """Result of Algorithm 2.

    `largest` is the largest trainable batch, with M_peak within the budget. `batch_size` is the largest batch found
    with which nothing stalls (0 if none was found), and `pinned` the feature maps (tensors) pinned for it.
    """

    largest: int
    batch_size: int
    pinned: frozenset[int]


def largest_without_stall(
    timed_trace: Callable[[int], Trace], profile: DeviceProfile, budget_bytes: int, least: int, most: int
) -> Unstalled | None:
    """Search the sizes from `least` to `most`; return None if not even `least` rows are trainable.

    `timed_trace(size)` returns the trace of that size with latencies.
    """

    def layerwise(size: int) -> Layerwise:
        return Layerwise(timed_trace(size), profile)

    largest = _last(least, most, lambda size: layerwise(size).least_bytes <= budget_bytes)
    if largest is None:
        return None

    def pinning(size: int) -> Pinning | None:
        pinned = layerwise(size).pinning(budget_bytes)
        return pinned if pinned is not None and not pinned.ready.stalled else None

    size, above = largest, largest + 1
    while (unstalled := pinning(size)) is None and size > least:
        size, above = max(least, size - max(1, size // STEP)), size
    if unstalled is None:
        return Unstalled(largest, 0, frozenset())
    best = _last(size, above - 1, lambda rows: pinning(rows) is not None) or size
    unstalled = pinning(best)
    assert unstalled is not None
    return Unstalled(largest, best, unstalled.pinned)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the last of `low` … `high` for which `holds` is true, by bisection, or None if it is false for `low`.

    `holds` must be true up to some size and false above it.
    """
    if low > high or not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
