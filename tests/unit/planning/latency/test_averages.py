"""Averages of latencies while a job runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.latency.averages import AverageState, LatencyAverages

anything = st.floats(allow_nan=True, allow_infinity=True)


def test_a_prediction_counts_as_one_measurement():
    averages = LatencyAverages([10.0])
    averages.add([20.0])
    assert averages.latency_us[0] == 15.0
    averages.add([20.0])
    assert averages.latency_us[0] == pytest.approx(15.0 + 5.0 / 3)


def test_a_lasting_change_is_followed():
    averages = LatencyAverages([10.0, 100.0])
    for _ in range(40):
        averages.add([30.0, 50.0])
    assert averages.latency_us == pytest.approx([30.0, 50.0], rel=1e-2)


@settings(deadline=None)
@given(st.integers(2, 30), st.sampled_from([1e9, 1e-2, -5.0, float("nan"), float("inf"), 1e300, 0.0]))
def test_one_measurement_that_is_wrong_changes_nothing(place, wrong):
    averages = LatencyAverages([10.0])
    for number in range(40):
        averages.add([wrong if number == place else 10.0])
        assert averages.latency_us[0] == pytest.approx(10.0)


@settings(deadline=None)
@given(st.lists(st.lists(anything, min_size=3, max_size=3), max_size=20))
def test_averages_stay_finite_and_positive_whatever_the_clock_says(measured):
    averages = LatencyAverages([1.0, 2.0, 3.0])
    for each in measured:
        averages.add(each)
    assert np.isfinite(averages.latency_us).all()
    assert (averages.latency_us > 0).all()
    again = LatencyAverages.from_state(averages.state())
    assert again.latency_us == pytest.approx(averages.latency_us, rel=1e-6)


def test_an_operator_that_is_not_measured_keeps_its_prediction():
    averages = LatencyAverages([10.0, 7.0])
    for _ in range(5):
        averages.add([20.0, 0.0])
    assert averages.latency_us[1] == 7.0
    assert averages.measurements == 0


def test_the_change_is_that_of_the_sum_since_the_plan():
    averages = LatencyAverages([10.0, 30.0], weight=1.0)
    assert averages.changed(0.5)  # there is no plan yet
    averages.plan_made()
    assert averages.change() == 0.0
    for _ in range(3):
        averages.add([20.0, 30.0])
    assert averages.total_us == 50.0
    assert averages.change() == pytest.approx(0.25)
    assert averages.changed(0.2)
    assert not averages.changed(0.25)
    for _ in range(3):
        averages.add([5.0, 5.0])
    assert averages.change() == pytest.approx(0.75)


def test_latencies_that_move_from_one_operator_to_another_are_no_change():
    averages = LatencyAverages([10.0, 30.0], weight=1.0)
    averages.plan_made()
    for _ in range(3):
        averages.add([30.0, 10.0])
    assert averages.change() == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=8), st.integers(0, 6))
def test_a_state_goes_on_where_it_was(measured, cut):
    whole, half = LatencyAverages([5.0, 5.0]), LatencyAverages([5.0, 5.0])
    whole.plan_made()
    half.plan_made()
    for number, each in enumerate(measured):
        if number == cut:
            half = LatencyAverages.from_state(half.state())
        whole.add(each)
        half.add(each)
    assert half.latency_us == pytest.approx(whole.latency_us, rel=1e-5)
    assert half.change() == pytest.approx(whole.change(), rel=1e-4, abs=1e-5)
    assert half.measurements == whole.measurements


def test_a_state_takes_eighteen_bytes_an_operator():
    state = LatencyAverages(np.ones(100)).state()
    assert sum(array.nbytes for array in state[:3]) == 1800


@pytest.mark.parametrize(
    "change",
    [
        {"latency_us": np.array([np.nan, 1.0], np.float32)},
        {"latency_us": np.array([1.0], np.float32)},
        {"recent_us": np.full((2, 2), np.nan, np.float32)},
        {"recent_us": np.full((3, 2), -1.0, np.float32)},
        {"recent_us": np.full((3, 2), np.inf, np.float32)},
        {"measurements": np.zeros(3, np.uint16)},
        {"planned_us": float("nan")},
    ],
)
def test_a_damaged_state_is_refused(change):
    state: AverageState = LatencyAverages([1.0, 2.0]).state()
    with pytest.raises(MeasurementError, match="latenc"):
        LatencyAverages.from_state(state._replace(**change))


def test_what_is_not_a_beginning_is_refused():
    for predicted in ([float("nan")], [-1.0], [[1.0]], [float("inf")]):
        with pytest.raises(MeasurementError, match="begin with one finite latency"):
            LatencyAverages(predicted)
    with pytest.raises(MeasurementError, match="weight"):
        LatencyAverages([1.0], weight=0.0)
    with pytest.raises(MeasurementError, match="3 operators were measured"):
        LatencyAverages([1.0]).add([1.0, 2.0, 3.0])
