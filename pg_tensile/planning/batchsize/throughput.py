"""Latency of operators at other batch sizes: throughput as a function of work (AccUDNN, section 3.3.1).

The work of an operator is its floating point operations, or its bytes if it has none. Operators of one kind (target)
share a curve: more work uses more of the device until it is saturated, after which time is proportional to work. The
curves are fitted to traces of a few batch sizes, first with predicted latencies (roofline or latency models) and then
with measured ones, which come from training iterations; measurements replace predictions.

One curve for all convolutions is coarse. So an operator that was timed at some batch sizes keeps its own times there,
and the curve extrapolates them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.plan.following import has_structure
from pg_tensile.planning.trace.trace import Floats, Trace

BINS_PER_OCTAVE = 4  # of work; each bin of samples is reduced to its median
SMALLEST_US = 0.01


class Curve(NamedTuple):
    """Time as a function of work for one kind of operator: non-decreasing, never below the launch.

    `work` (flops or bytes) and `us` are the fitted points, ascending; float64[p], p ≥ 1.
    """

    work: Floats
    us: Floats
    launch_us: float

    def time_us(self, work: Floats) -> Floats:
        """Return µs for each amount of work, in the shape of `work`.

        Interpolates linearly on logarithmic scales; beyond the fitted points it assumes the launch and a constant
        throughput.
        """
        work = np.maximum(work, 1.0)
        inside = np.exp(np.interp(np.log(work), np.log(self.work), np.log(self.us)))
        edge = np.where(work < self.work[0], 0, -1)
        beyond = self.launch_us + (self.us[edge] - self.launch_us) * work / self.work[edge]
        return np.where((work < self.work[0]) | (work > self.work[-1]), beyond, inside)


def fit_curve(work: Floats, us: Floats, launch_us: float) -> Curve:
    """Fit a non-decreasing curve to the samples (float64[s] each, s ≥ 1) on logarithmic scales.

    Samples are grouped into bins of work; each bin contributes its median, so that outliers have no effect.
    """
    work, us = np.maximum(np.asarray(work, np.float64), 1.0), np.maximum(us, max(launch_us, SMALLEST_US))
    bins = np.round(np.log2(work) * BINS_PER_OCTAVE).astype(np.int64)
    _, indices = np.unique(bins, return_inverse=True)
    members = [np.flatnonzero(indices == index) for index in range(indices.max() + 1)]
    points = np.array([np.median(np.log(work[samples])) for samples in members])
    times = np.array([np.median(np.log(us[samples])) for samples in members])
    counts = np.array([len(samples) for samples in members], np.float64)
    fitted = np.exp(never_falling(times, counts))
    return Curve(np.exp(points), np.maximum(fitted, launch_us), launch_us)  # logarithms round


def never_falling(values: Floats, weights: Floats) -> Floats:
    """Return the nearest non-decreasing sequence by weighted least squares.

    Pool adjacent violators: neighbours that decrease are averaged.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, values
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, left_weight, left_count), (right, right_weight, right_count) = blocks[-2:]
            weight = left_weight + right_weight
            mean = (left * left_weight + right * right_weight) / weight
            blocks[-2:] = [(mean, weight, left_count + right_count)]
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


class Curves:
    """Times of all operators of one model at every batch size.

    `predicted` are traces of some batch sizes with expected latencies; `add` contributes measured ones. `predict`
    requires at least one trace.
    """

    def __init__(self, launch_us: float, predicted: Iterable[Trace] = ()) -> None:
        self.launch_us = max(launch_us, SMALLEST_US)
        self._predicted = [(trace, trace.latency_us) for trace in predicted]
        self._measured: list[tuple[Trace, Floats]] = []
        self._curves: dict[str, Curve] = {}

    def add(self, trace: Trace, latency_us: Floats | None = None) -> None:
        """Add a measured iteration with latencies float64[n] µs; None means those of the trace.

        The operators' own times come from the latest iteration of the same structure and size, the curves from all of
        them.
        """
        self._measured.append((trace, trace.latency_us if latency_us is None else np.asarray(latency_us, np.float64)))
        self._curves = {}

    def predict(self, trace: Trace) -> Floats:
        """Return the predicted latencies, float64[n] µs. Raises ValueError if no trace is known."""
        curves, work = self._fitted(), work_of(trace)
        if not curves:
            raise ValueError("no operator has been timed yet")
        by_curve = np.full(trace.operator_count, self.launch_us)
        for target, operators in _operators(trace).items():
            if target in curves:
                by_curve[operators] = curves[target].time_us(work[operators])
        own = self._own(trace)
        return by_curve if own is None else _continued(work, by_curve, *own, trace, curves)

    def _fitted(self) -> dict[str, Curve]:
        if not self._curves:
            measured = {target for trace, _ in self._measured for target in trace.target.values}
            samples: defaultdict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
            for iterations, skipped in ((self._measured, set()), (self._predicted, measured)):
                for trace, latency_us in iterations:
                    for target, operators in _operators(trace).items():
                        if target not in skipped:
                            samples[target].append((work_of(trace)[operators], latency_us[operators]))
            for target, parts in samples.items():
                work, us = (np.concatenate(column) for column in zip(*parts, strict=True))
                self._curves[target] = fit_curve(work, us, self.launch_us)
        return self._curves

    def _own(self, trace: Trace) -> tuple[Floats, Floats] | None:
        """Return work and times (float64[s, n]) of the operators themselves, by ascending total work.

        None means that no known trace has that structure.
        """
        own: dict[tuple[int, ...], tuple[Floats, Floats]] = {}
        for timed, latency_us in self._measured or self._predicted:
            if has_structure(trace, timed):
                own[tuple(timed.tensor_bytes.tolist())] = work_of(timed), latency_us
        if not own:
            return None
        work, us = (np.stack(column) for column in zip(*own.values(), strict=True))
        order = np.argsort(work.sum(axis=1), kind="stable")
        return work[order], us[order]


def work_of(trace: Trace) -> Floats:
    """Return the work of each operator, float64[n]: floating point operations, or bytes if it has none; at least 1."""
    nbytes = np.where(trace.operator_bytes > 0, trace.operator_bytes, trace.accessed_bytes)
    return np.maximum(np.where(trace.flops > 0, trace.flops, nbytes), 1).astype(np.float64)


def _operators(trace: Trace) -> dict[str, np.ndarray]:
    """Return the operators of each target."""
    order = np.argsort(trace.target.codes, kind="stable")
    parts = np.split(order, np.searchsorted(trace.target.codes[order], np.arange(1, len(trace.target.values))))
    return {target: operators for target, operators in zip(trace.target.values, parts, strict=True) if operators.size}


def _continued(
    work: Floats, by_curve: Floats, timed_work: Floats, timed_us: Floats, trace: Trace, curves: dict[str, Curve]
) -> Floats:
    """Return µs of each operator from its own times, interpolated on logarithmic scales.

    Beyond the sizes at which it was timed, its times follow the curve of its kind.
    """
    times_us = np.empty_like(work)
    curve_of = {target: curve.time_us for target, curve in curves.items()}
    for operator in range(len(work)):
        points, counts = np.unique(timed_work[:, operator], return_counts=True)
        us = np.array([np.median(timed_us[timed_work[:, operator] == point, operator]) for point in points])
        us = np.exp(never_falling(np.log(np.maximum(us, SMALLEST_US)), counts.astype(np.float64)))
        times_us[operator] = np.exp(np.interp(np.log(work[operator]), np.log(points), np.log(us)))
        if not points[0] <= work[operator] <= points[-1]:
            edge = points[:1] if work[operator] < points[0] else points[-1:]
            times_us[operator] *= by_curve[operator] / curve_of[trace.target[operator]](edge)[0]
    return times_us
