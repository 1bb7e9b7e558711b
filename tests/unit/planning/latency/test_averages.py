"""Averages of latencies while a job runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.latency.averages import LatencyAverages
from tests.unit.planning.latency import noise

anything = st.floats(allow_nan=True, allow_infinity=True)


def test_a_prediction_counts_as_one_measurement():
    averages = LatencyAverages([10.0])
    averages.add([20.0])
    assert averages.latency_us[0] == 15.0
    averages.add([20.0])
    assert averages.latency_us[0] == pytest.approx(15.0 + 5.0 / 3)


def test_the_load_counts_as_much_as_its_measurement():
    averages = LatencyAverages([10.0], load=0.2)
    averages.add([20.0], 0.8)
    assert averages.load == pytest.approx(0.2 + 0.6 * 10 / 15)  # 10 µs of the 15 are half of the measurement
    averages.add([20.0])  # under a load that is not known
    assert averages.load == pytest.approx(0.6)


def test_one_measurement_under_another_load_does_not_count():
    averages = LatencyAverages([10.0, 10.0])
    for load in (0.0, 0.0, 0.0, 0.9):
        averages.add([10.0, 10.0], load)
    assert averages.load == 0.0
    for _ in range(40):
        averages.add([20.0, 20.0], 0.9)
    assert averages.load == pytest.approx(0.9, rel=1e-2)


def test_a_lasting_change_is_followed():
    averages = LatencyAverages([10.0, 100.0])
    for _ in range(40):
        averages.add([30.0, 50.0])
    assert averages.latency_us == pytest.approx([30.0, 50.0], rel=1e-2)


def test_the_third_reading_replaces_a_prediction():
    averages = LatencyAverages([1000.0])
    for measured in (10.0, 10.0, 10.0):
        averages.add([measured])
    assert averages.latency_us == [10.0]


def test_readings_of_twins_replace_a_prediction_at_once():
    averages = LatencyAverages([1000.0, 1000.0, 1000.0, 500.0], twins=np.array([0, 0, 0, 1], np.int32))
    averages.add([10.0, 12.0, 300.0, 10.0])
    assert averages.latency_us.tolist() == [12.0, 12.0, 12.0, 255.0]


def test_a_lasting_change_of_twins_shows_with_its_second_measurement():
    """Once whole and then lastingly; the other group stays as it is."""
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    slower = twins == np.bincount(twins).argmax()
    averages = LatencyAverages(true_us, twins=twins)
    for _ in range(6):
        averages.add(noise.spread(random, true_us, 1)[0])
    before = averages.latency_us
    changed_us = np.where(slower, 3 * true_us, true_us)
    averages.add(noise.spread(random, changed_us, 1)[0])
    assert averages.latency_us == pytest.approx(before, rel=0.05)
    averages.add(noise.spread(random, changed_us, 1)[0])
    assert (averages.latency_us[slower] > 1.3 * before[slower]).all()
    assert averages.latency_us[~slower] == pytest.approx(before[~slower], rel=0.05)
    for _ in range(20):
        averages.add(noise.spread(random, changed_us, 1)[0])
    assert averages.latency_us == pytest.approx(changed_us, rel=0.2)


def test_bursts_do_not_delay_a_lasting_change():
    random = np.random.default_rng(0)
    true_us, twins = noise.iteration(random)
    averages = LatencyAverages(true_us, twins=twins)
    for factor in (1, 1, 1, 1, 5, 5):
        averages.add(noise.bursts(random, factor * true_us, 1)[0])
    assert np.median(averages.latency_us / true_us) > 1.5


@pytest.mark.parametrize(
    "draw",
    [
        lambda random, true_us: noise.spread(random, true_us, 1, 0.5)[0],
        lambda random, true_us: noise.spread(random, true_us, 1, 1.0)[0],
        lambda random, true_us: noise.bursts(random, true_us, 1, 0.5)[0],
    ],
)
def test_averages_of_twins_are_closer_to_the_truth(draw):
    ratios = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        true_us, twins = noise.iteration(random)
        predicted_us = true_us * random.lognormal(0, 1, len(true_us))
        both = LatencyAverages(predicted_us), LatencyAverages(predicted_us, twins=twins)
        for _ in range(8):
            measured_us = draw(random, true_us)
            for averages in both:
                averages.add(measured_us)
        own, pooled = (np.abs(np.log(averages.latency_us / true_us)).mean() for averages in both)
        ratios.append(pooled / own)
    assert np.mean(ratios) < 0.6


@given(st.integers(2, 30), st.sampled_from([1e9, 1e-2, -5.0, float("nan"), float("inf"), 1e300, 0.0]))
def test_one_measurement_that_is_wrong_changes_nothing(index, wrong):
    averages = LatencyAverages([10.0])
    for number in range(40):
        averages.add([wrong if number == index else 10.0])
        assert averages.latency_us[0] == pytest.approx(10.0)


@given(st.lists(st.lists(anything, min_size=3, max_size=3), max_size=20))
def test_averages_stay_finite_and_positive_whatever_the_clock_says(measured):
    averages = LatencyAverages([1.0, 2.0, 3.0])
    for latencies in measured:
        averages.add(latencies)
    assert np.isfinite(averages.latency_us).all()
    assert (averages.latency_us > 0).all()


def test_an_operator_that_is_not_measured_keeps_its_prediction():
    averages = LatencyAverages([10.0, 7.0])
    for _ in range(5):
        averages.add([20.0, 0.0])
    assert averages.latency_us[1] == 7.0
    assert averages.measurements == 0


def test_the_total_is_the_sum_of_the_averages():
    averages = LatencyAverages([10.0, 30.0], weight=1.0)
    for _ in range(3):
        averages.add([20.0, 30.0])
    assert averages.total_us == 50.0


def test_what_is_not_a_beginning_is_refused():
    for predicted in ([float("nan")], [-1.0], [[1.0]], [float("inf")]):
        with pytest.raises(MeasurementError, match="begin with one finite latency"):
            LatencyAverages(predicted)
    with pytest.raises(MeasurementError, match="weight"):
        LatencyAverages([1.0], weight=0.0)
    with pytest.raises(MeasurementError, match="2 operators are in groups"):
        LatencyAverages([1.0], twins=np.array([0, 0], np.int32))
    with pytest.raises(MeasurementError, match="3 operators were measured"):
        LatencyAverages([1.0]).add([1.0, 2.0, 3.0])
