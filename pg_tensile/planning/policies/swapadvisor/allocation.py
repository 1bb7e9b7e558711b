"""Memory allocations: tensors that may replace each other, and their breeding (SwapAdvisor, sections 4.1 and 5.3).

The paper's framework has a pool of fixed-size objects for each class of sizes. Our runtime has no pools: its allocator
serves every size, and a plan keeps the bytes of all tensors within a budget. What remains of an allocation is its
effect on decisions: a tensor that comes to the device replaces one of its own class, and a class has a limited number
of slots. So classes guide the planner (planner.py), the budget limits it, and plain bytes (no allocation at all) are
one more individual.

TS are the distinct sizes of a trace's tensors, ascending. CLS gives each of them a class, 0, 1, …, without omissions
and never falling: neighbouring sizes share a class. CNT is the number of slots of each class, whose size is its
largest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.trace.trace import Floats, Int64s, Trace

SPREAD = 0.25  # standard deviation of a count's mutation, as a fraction of the count
LEAST_SPREAD = 1.0


class Allocation(NamedTuple):
    """CLS and CNT: size classes with their slots."""

    classes: tuple[int, ...]  # of each size
    counts: tuple[int, ...]  # of each class


def distinct_sizes(trace: Trace) -> Int64s:
    """Return TS: the distinct sizes in bytes, ascending; tensors without bytes need no slot."""
    return np.unique(trace.tensor_bytes[trace.tensor_bytes > 0])


def class_sizes(sizes: Int64s, classes: tuple[int, ...]) -> Int64s:
    """Return the bytes of a slot of each class."""
    return sizes[np.flatnonzero(np.diff(classes, append=classes[-1] + 1))]


def extended(allocation: Allocation) -> Floats:
    """Return CNT_EXT: for each size, the number of slots that its tensors may have."""
    return np.array(allocation.counts, np.float64)[list(allocation.classes)]


def monotone(classes: Int64s) -> tuple[int, ...]:
    """Return a class list made valid.

    Where it falls, this element and all after it rise by as little as needed; then classes are numbered consecutively.
    """
    repaired = classes.astype(np.int64)
    for index in range(1, len(repaired)):
        if repaired[index] < repaired[index - 1]:
            repaired[index:] += repaired[index - 1] - repaired[index]
    return tuple(np.cumsum(np.diff(repaired, prepend=repaired[0]) > 0).tolist())


def fitted(sizes: Int64s, classes: tuple[int, ...], slots: Floats, budget_bytes: int) -> Allocation:
    """Return the allocation of these classes, each with the mean of its sizes' `slots` (CNT_EXT) as its count.

    Where the pool would exceed the budget, counts are reduced in inverse proportion to the size of the class: every
    class gives back the same number of bytes.
    """
    members = np.bincount(classes)
    counts = np.maximum(np.rint(np.bincount(classes, weights=slots) / members), 0.0)
    size = class_sizes(sizes, classes).astype(np.float64)
    while (excess := counts @ size - budget_bytes) > 0:
        held = counts > 0
        given_back = np.ceil(np.maximum(excess / held.sum() / size - 1e-9, 0.0))
        counts[held] = np.maximum(counts - given_back, 0.0)[held]
    return Allocation(classes, tuple(counts.astype(np.int64).tolist()))


def crossover(
    sizes: Int64s, first: Allocation, second: Allocation, point: int, budget_bytes: int
) -> tuple[Allocation, Allocation]:
    """Return two children, which are repaired.

    Each has the classes and slots of the first `point` sizes from one parent and the rest from the other.
    """
    return (
        _spliced(sizes, second, first, point, budget_bytes),
        _spliced(sizes, first, second, point, budget_bytes),
    )


def _spliced(sizes: Int64s, head: Allocation, tail: Allocation, point: int, budget_bytes: int) -> Allocation:
    classes = monotone(np.array(head.classes[:point] + tail.classes[point:], np.int64))
    slots = np.concatenate((extended(head)[:point], extended(tail)[point:]))
    return fitted(sizes, classes, slots, budget_bytes)


def mutate(
    sizes: Int64s, allocation: Allocation, rate: float, budget_bytes: int, random: np.random.Generator
) -> Allocation:
    """Return a mutated allocation.

    With probability `rate`, each size joins the class before it or leaves that one, and each count is drawn again from
    a Gaussian around it.
    """
    steps = np.diff(allocation.classes, prepend=0)
    flips = random.random(len(steps)) < rate
    flips[0] = False
    steps[flips] = 1 - steps[flips]
    counts = np.array(allocation.counts, np.float64)
    drawn = random.normal(counts, np.maximum(LEAST_SPREAD, SPREAD * counts))
    counts = np.where(random.random(len(counts)) < rate, drawn, counts)
    slots = counts[list(allocation.classes)]
    return fitted(sizes, tuple(np.cumsum(steps).tolist()), slots, budget_bytes)


def separate(trace: Trace, sizes: Int64s, budget_bytes: int) -> Allocation:
    """Return an allocation with a class for each size.

    Each class gets the share of the budget that its tensors have of all bytes.
    """
    return _shared_out(trace, sizes, tuple(range(len(sizes))), budget_bytes)


def scattered(trace: Trace, sizes: Int64s, budget_bytes: int, random: np.random.Generator) -> Allocation:
    """Return an allocation with random classes, and with counts as `separate` would assign them."""
    steps = random.random(len(sizes)) < random.random()
    steps[0] = False
    return _shared_out(trace, sizes, tuple(np.cumsum(steps).tolist()), budget_bytes)


def _shared_out(trace: Trace, sizes: Int64s, classes: tuple[int, ...], budget_bytes: int) -> Allocation:
    tensors = trace.tensor_bytes[trace.tensor_bytes > 0]
    of_class = np.array(classes)[np.searchsorted(sizes, tensors)]
    held = np.bincount(of_class, weights=tensors)
    size = class_sizes(sizes, classes)
    counts = np.minimum(np.bincount(of_class), np.maximum(1, held / held.sum() * budget_bytes // size))
    return fitted(sizes, classes, counts[list(classes)].astype(np.float64), budget_bytes)
