"""Absences: where between two accesses each tensor may be off the device, and what its return costs at least.

A persistent tensor has one more gap, around the end of the iteration. Operators are counted on past the end, so that
operator n + i is operator i of the next iteration, which is the same in the steady state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.trace.recomputations import Recomputations
from pg_tensile.planning.trace.trace import Floats, Int64s, Mode, Trace


class Absences(NamedTuple):
    """The g gaps between two accesses of a tensor with at least one operator between them.

    `written` is the operator that wrote the version; a swap-in needs a copy out between that and `last`, but one copy
    serves all gaps of a version. Gaps of a version that spans the end of the iteration are those after its writer. A
    recomputation may be triggered by operators before `until`, because the inputs are changed then.
    """

    tensor: Int64s  # [g]
    first: Int64s  # [g]: operator of the access before
    last: Int64s  # [g]: operator of the access after
    written: Int64s  # [g]
    version: Int64s  # [g]: number of the version; its gaps stand together, in order
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
    version: int
    copied: bool  # whether the host copy is always current
    recompute_us: float
    until: int


def absences(trace: Trace, profile: DeviceProfile) -> Absences:
    """Return the gaps of all tensors that have bytes and are accessed."""
    gaps = list(_gaps(trace))
    columns = np.array([gap[:6] for gap in gaps], np.int64).reshape(-1, 6).T
    tensor, first, last, written, version, copied = columns
    out_us, in_us = (least_swap_us(trace, direction, profile)[tensor] for direction in Direction)
    out_us[copied > 0] = 0.0
    recompute_us, until = np.array([gap.recompute_us for gap in gaps]), np.array([gap.until for gap in gaps], np.int64)
    nbytes = trace.tensor_bytes[tensor]
    return Absences(tensor, first, last, written, version, nbytes, out_us, in_us, recompute_us, until)


def least_swap_us(trace: Trace, direction: Direction, profile: DeviceProfile) -> Floats:
    """Return float64[m]: the time of each tensor's copy, compressed or not."""
    whole = np.array(swap_us(trace.with_coding(None), direction, profile))
    return np.minimum(whole, np.array(swap_us(trace, direction, profile)))


def _gaps(trace: Trace) -> Iterator[_Gap]:
    recomputations, writers = Recomputations(trace), trace.writer_operator.tolist()
    start, operators = trace.writer_start.tolist(), trace.access_operator[trace.access_by_tensor].tolist()
    modes = trace.access_mode[trace.access_by_tensor].tolist()
    persistent: list[bool] = trace.persistent.tolist()
    count, versions = trace.operator_count, 0
    for tensor in np.flatnonzero(trace.tensor_bytes).tolist():
        span = slice(*trace.tensor_start[tensor : tensor + 2].tolist())
        places = operators[span]
        if not places:
            continue
        changes = np.cumsum([mode in (Mode.WRITE, Mode.STATS) for mode in modes[span]]).tolist()
        written = writers[start[tensor] : start[tensor + 1]]
        pairs = list(zip(pairwise(places), changes, strict=False))
        if persistent[tensor]:
            pairs.append(((places[-1], places[0] + count), changes[-1]))
        kept = []
        for (first, last), version in pairs:
            if last - first < 2:
                continue
            if not persistent[tensor]:
                us, until = _recomputation(recomputations, tensor, version, writers, start, persistent, count)
                kept.append(_Gap(tensor, first, last, written[version], versions + version, False, us, until))
            elif version or not written:
                latest = written[version - 1] if written else first
                kept.append(_Gap(tensor, first, last, latest, versions + version, not written, math.inf, 0))
            else:  # the version of the previous iteration's end
                kept.append(
                    _Gap(tensor, first + count, last + count, written[-1], versions + changes[-1], False, math.inf, 0)
                )
        yield from sorted(kept, key=lambda gap: (gap.version, gap.first))
        versions += changes[-1] + 1


def _recomputation(
    recomputations: Recomputations, tensor: int, version: int, writers: list[int], start: list[int],
    persistent: list[bool], count: int,
) -> tuple[float, int]:  # fmt: skip
    """Return the µs of a recomputation, and the first operator that changes one of its inputs."""
    recomputation = recomputations.of(tensor, version)
    if recomputation is None:
        return math.inf, 0
    until = count
    for source in recomputation.inputs:
        following = start[source.tensor] + source.version + (not persistent[source.tensor])
        if not source.is_statistic and following < start[source.tensor + 1]:
            until = min(until, writers[following])
    return recomputation.us, until
