"""A bound on time without a solver: an iteration cut at one operator, for which a fractional knapsack is solved.

Every operator is executed once, so the sum of all latencies is a bound. There is another one for each operator t at
which vanilla's tensors exceed the peak by D bytes: of those that t does not access, at least D bytes are off the device
then. Let x + y be the part of a tensor that is off the device and comes back by a swap-in (x) or a recomputation (y). A
tensor of this iteration is copied out before t and comes back after t, so the iteration, cut at t, takes at least

    max(latencies before t, Σ out·x) + latency of t + max(latencies after t + Σ recompute·y, Σ in·x)   (1)

and each lane alone has to be served within the iteration, persistent tensors included: Σ in·x, Σ out·x (2); a
persistent tensor is copied out only if an operator writes it, and never recomputed. A recompute event executes at least
the operator that created its tensor, and produces one tensor. Any weighted mean of (1) and (2), with any weighted mean
in place of each maximum, is a bound as well; it is linear in x and y, so the least cost of D bytes is a fractional
knapsack: the cheapest bytes first. (This is the dual of a linear program, with weights on a grid.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.bounds.absences import least_swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.trace.recomputations import recomputable_versions
from pg_tensile.planning.trace.trace import Bools, Floats, Int64s, Trace

STRETCHES = 16  # of an iteration; in each, the operator that exceeds the peak by the most bytes gives a bound
WEIGHTS = tuple(  # grid of weights: of the cut, and in it of the copies out and in; and the lane of (2)
    (cut, out, back, lane)
    for cut in (0.0, 0.5, 0.75, 1.0) for out in (0.0, 0.5, 1.0) for back in (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
    for lane in Direction
)  # fmt: skip


def cut_us(trace: Trace, profile: DeviceProfile, excess: Int64s) -> float:
    """Return a lower bound, in µs, on an iteration of any plan.

    `excess` is int64[n]: the bytes by which the tensors without a plan exceed the budget at each operator.
    """
    vanilla = AccessSequence(trace, NO_EVENTS)
    bound_us = float(trace.latency_us.sum())
    for stretch in np.array_split(np.arange(trace.operator_count), STRETCHES):
        if stretch.size:
            worst = int(stretch[np.argmax(excess[stretch])])
            if excess[worst] > 0:
                bound_us = max(bound_us, _cut(trace, profile, vanilla, worst).least_us(int(excess[worst])))
    return bound_us


class _Cut(NamedTuple):
    """An iteration cut at an operator: durations, and the k tensors that may be off the device there."""

    before_us: float
    at_us: float
    after_us: float
    bytes: Int64s  # [k]
    out_us: Floats  # [k]
    in_us: Floats  # [k]
    recompute_us: Floats  # [k]: of a recomputation; infinite for tensors that cannot be recomputed
    persistent: Bools  # [k]

    def least_us(self, excess_bytes: int) -> float:
        """Return the largest bound, in µs, if `excess_bytes` have to be off the device at the operator."""
        return max(self._weighted(excess_bytes, *weights) for weights in WEIGHTS)

    def _weighted(self, excess_bytes: int, cut: float, out: float, back: float, direction: Direction) -> float:
        """Return the bound in which (1) has the weight `cut`, and (2) of one lane the rest.

        Within (1), the copies have the weight `out` in the first maximum and `back` in the second.
        """
        lane = (1 - cut) * (self.out_us if direction is Direction.OUT else self.in_us)
        weight, possible = cut * (1 - back), self.recompute_us < np.inf
        recomputed = weight * self.recompute_us if weight > 0 else np.where(possible, 0, np.inf)
        swapped = lane + np.where(self.persistent, 0.0, cut * (out * self.out_us + back * self.in_us))
        cost = np.minimum(recomputed, swapped)
        order = np.argsort(cost / self.bytes)
        before = np.cumsum(self.bytes[order]) - self.bytes[order]
        part = np.clip((excess_bytes - before) / self.bytes[order], 0.0, 1.0)
        fixed = cut * ((1 - out) * self.before_us + self.at_us + (1 - back) * self.after_us)
        return float(fixed + part @ cost[order])


def _cut(trace: Trace, profile: DeviceProfile, vanilla: AccessSequence, operator: int) -> _Cut:
    present = (vanilla.interval_first <= operator) & (operator <= vanilla.interval_last)
    away = np.zeros(trace.tensor_count, np.bool_)
    away[vanilla.interval_tensor[present]] = True
    away[trace.access_tensor[trace.access_start[operator] : trace.access_start[operator + 1]]] = False
    tensors = np.flatnonzero(away & (trace.tensor_bytes > 0))
    persistent = trace.persistent[tensors]
    out, back = (least_swap_us(trace, direction, profile)[tensors] for direction in Direction)
    out[persistent & (trace.tensor_writes[tensors] == 0)] = 0.0
    ends = np.cumsum(trace.latency_us)
    return _Cut(
        float(ends[operator] - trace.latency_us[operator]), float(trace.latency_us[operator]),
        float(ends[-1] - ends[operator]), trace.tensor_bytes[tensors], out, back, _recompute_us(trace)[tensors],
        persistent,
    )  # fmt: skip


def _recompute_us(trace: Trace) -> Floats:
    """Return float64[m]: the latency of each tensor's creator; infinite if that must not be executed again."""
    recomputable = np.flatnonzero(recomputable_versions(trace))
    made_us = np.full(trace.tensor_count, np.inf)
    made_us[recomputable] = trace.latency_us[trace.writer_operator[trace.writer_start[recomputable]]]
    return made_us
