"""Operators' times by work: known curves are found again, time never falls, what was measured counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pg_tensile.planning.batchsize.throughput import Curves, fit_curve, never_falling, work_of
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

LAUNCH_US = 2.0
SATURATED_AT, RATE = 1e7, 1e3  # flops, flops per µs


def true_us(work: float, factor: float = 1.0) -> float:
    """A device on which throughput grows with the square root of the work until it is saturated."""
    throughput = RATE * min(1.0, (work / SATURATED_AT) ** 0.5)
    return max(LAUNCH_US, factor * work / throughput)


def layers(batch: int, widths: tuple[int, ...] = (1000, 30_000, 200_000), factor: float = 1.0) -> Trace:
    """Multiplications of so many flops a row each, and an operator that moves bytes alone."""
    tensors = [Tensor(4 * batch, Kind.INPUT), *(Tensor(4 * batch, Kind.ACTIVATION) for _ in range(len(widths) + 1))]
    rows = [Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),), latency_us=5.0)]
    for index, width in enumerate(widths):
        accesses = (Access(index, Mode.READ), Access(index + 1, Mode.CREATE))
        flops = batch * width
        rows.append(
            Operator("mm", Phase.FORWARD, accesses, flops=flops, bytes=8 * batch, latency_us=true_us(flops, factor))
        )
    last = len(widths)
    accesses = (Access(last, Mode.READ), Access(last + 1, Mode.CREATE))
    rows.append(Operator("relu", Phase.FORWARD, accesses, bytes=800 * batch, latency_us=LAUNCH_US + batch))
    rows.append(Operator("output", Phase.OPTIMIZER, (Access(last + 1, Mode.READ),), latency_us=3.0))
    return Trace.build(rows, tensors)


def test_a_known_curve_is_found_again() -> None:
    work = np.geomspace(1e3, 1e9, 200)
    curve = fit_curve(work, np.array([true_us(flops) for flops in work]), LAUNCH_US)
    for each in np.geomspace(1e4, 1e11, 50):
        assert float(curve.time_us(np.array(each))) == pytest.approx(true_us(each), rel=0.1)


def test_an_outlier_changes_little() -> None:
    work = np.repeat(np.geomspace(1e5, 1e8, 11), 5)
    us = np.array([true_us(flops) for flops in work])
    us[7] *= 50
    curve = fit_curve(work, us, LAUNCH_US)
    assert np.allclose(curve.time_us(work), [true_us(flops) for flops in work], rtol=0.05)


samples = st.lists(st.tuples(st.floats(0, 1e15), st.floats(0, 1e9)), min_size=1, max_size=30)


@given(samples, st.floats(0, 100))
@example([(0.0, 0.0)], 35.0)
def test_time_never_falls_and_is_never_below_the_launch(points: list[tuple[float, float]], launch_us: float) -> None:
    work, us = np.array(points).T
    curve = fit_curve(work, us, launch_us)
    times = curve.time_us(np.geomspace(1, 1e17, 300))
    assert np.all(np.diff(times) >= -1e-6 * times[1:])
    assert np.all(times >= launch_us * (1 - 1e-9))


def test_neighbours_that_fall_are_averaged() -> None:
    assert never_falling(np.array([1.0, 3.0, 1.0, 5.0]), np.array([1.0, 1.0, 3.0, 1.0])).tolist() == [1, 1.5, 1.5, 5]


def test_operators_keep_their_own_times_and_go_on_as_their_kind_does() -> None:
    curves = Curves(LAUNCH_US)
    for batch in (8, 32, 64):
        curves.add(layers(batch))
    for batch in (8, 32, 64):
        assert np.allclose(curves.predict(layers(batch)), layers(batch).latency_us)
    for batch in (5, 20, 48, 128, 1024):
        trace = layers(batch)
        assert np.allclose(curves.predict(trace)[1:5], trace.latency_us[1:5], rtol=0.25), batch
    found = np.array([curves.predict(layers(batch)) for batch in range(1, 300)])
    assert np.all(np.diff(found, axis=0) >= -1e-9)


def test_another_model_is_predicted_by_its_kinds() -> None:
    curves = Curves(LAUNCH_US, [layers(8), layers(32), layers(64)])
    other = layers(16, (5000, 100_000))
    assert np.allclose(curves.predict(other)[1:3], other.latency_us[1:3], rtol=0.3)


def test_what_was_measured_replaces_what_was_predicted() -> None:
    curves = Curves(LAUNCH_US, [layers(8), layers(64)])
    before = curves.predict(layers(64))
    slow = layers(64, factor=3.0)
    curves.add(layers(64), slow.latency_us)
    assert np.allclose(curves.predict(layers(64)), slow.latency_us)
    assert curves.predict(layers(16))[3] > 2 * before[3] / 8


def test_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="no operator"):
        Curves(LAUNCH_US).predict(layers(8))


def test_work_of_what_has_no_operations_is_its_bytes() -> None:
    assert work_of(layers(10)).tolist() == [40, 10_000, 300_000, 2_000_000, 8000, 40]
