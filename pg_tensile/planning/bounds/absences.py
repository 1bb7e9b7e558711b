"""Absences: where between two accesses each tensor may be off the device, and what its return costs at least.

A persistent tensor has one more gap, around the end of the iteration. Operators are counted on past the end, so that
operator n + i is operator i of the next iteration, which is the same in the steady state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.trace.recomputations import Recomputation, Recomputations
from pg_tensile.planning.trace.trace import Floats, Int64s, Mode, Trace


class Absences(NamedTuple):
    """The g gaps between two accesses of a tensor with at least one operator between them.

    `written` is the operator that wrote the version, possibly in the previous iteration: a swap-in needs a copy out
    after that. A recomputation may be triggered by operators before `until`, because the inputs are changed then.
    """

    tensor: Int64s  # [g]
    first: Int64s  # [g]: operator of the access before
    last: Int64s  # [g]: operator of the access after
    written: Int64s  # [g]
    bytes: Int64s  # [g]
    out_us: Floats  # [g]: of a copy out; 0 if the copy on the host stays current
    in_us: Floats  # [g]
    recompute_us: Floats  # [g]: infinite if that is impossible
    until: Int64s  # [g]

    def take(self, chosen: np.ndarray) -> Absences:
        return Absences(*(column[chosen] for column in self))


class _Gap(NamedTuple):
    tensor: int
    first: int
    last: int
    written: int
    copied: bool  # whether the host copy is always current
    recompute_us: float
    until: int


def absences(trace: Trace, profile: DeviceProfile) -> Absences:
    """Return the gaps of all tensors that have bytes and are accessed."""
    gaps = list(_gaps(trace))
    columns = np.array([gap[:5] for gap in gaps], np.int64).reshape(-1, 5).T
    tensor, first, last, written, copied = columns
    out_us, in_us = (least_swap_us(trace, direction, profile)[tensor] for direction in Direction)
    out_us[copied > 0] = 0.0
    recompute_us, until = np.array([gap.recompute_us for gap in gaps]), np.array([gap.until for gap in gaps], np.int64)
    nbytes = trace.tensor_bytes[tensor]
    return Absences(tensor, first, last, written, nbytes, out_us, in_us, recompute_us, until)


def least_swap_us(trace: Trace, direction: Direction, profile: DeviceProfile) -> Floats:
    """Return float64[m]: the time of each tensor's copy, compressed or not."""
    whole = np.array(swap_us(trace.with_coding(None), direction, profile))
    return np.minimum(whole, np.array(swap_us(trace, direction, profile)))


def _gaps(trace: Trace) -> Iterator[_Gap]:
    recomputations, persistent, count = Recomputations(trace), trace.persistent.tolist(), trace.operator_count
    writers: list[list[int]] = [part.tolist() for part in np.split(trace.writer_operator, trace.writer_start[1:-1])]
    operators = trace.access_operator[trace.access_by_tensor].tolist()
    changing = np.isin(trace.access_mode[trace.access_by_tensor], (Mode.WRITE, Mode.STATS))
    for tensor in np.flatnonzero((trace.tensor_bytes > 0) & (np.diff(trace.tensor_start) > 0)).tolist():
        span, written = slice(*trace.tensor_start[tensor : tensor + 2].tolist()), writers[tensor]
        places, version_after = operators[span], np.cumsum(changing[span]).tolist()
        pairs = list(pairwise(places)) + [(places[-1], places[0] + count)] * persistent[tensor]
        for (first, last), version in zip(pairs, version_after, strict=False):
            if last - first < 2:
                continue
            if not persistent[tensor]:
                us, until = _recomputation(recomputations.of(tensor, version), writers, persistent, count)
                yield _Gap(tensor, first, last, written[version], False, us, until)
            elif not written:
                yield _Gap(tensor, first, last, first, True, math.inf, 0)
            else:  # version 0 is what the previous iteration has written last
                yield _Gap(tensor, first, last, written[version - 1], False, math.inf, 0)


def _recomputation(
    recomputation: Recomputation | None, writers: Sequence[Sequence[int]], persistent: Sequence[bool], count: int
) -> tuple[float, int]:
    """Return the µs of a recomputation, and the first operator that changes one of its inputs, else `count`.

    `writers` are the operators that create or change each tensor.
    """
    if recomputation is None:
        return math.inf, 0
    inputs = (source for source in recomputation.inputs if not source.is_statistic)
    changes = (writers[source.tensor][source.version + (not persistent[source.tensor]) :][:1] for source in inputs)
    return recomputation.us, min((operator for change in changes for operator in change), default=count)
