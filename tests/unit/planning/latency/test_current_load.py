"""Latencies under the load of the device now, from those under another load."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.latency.current_load import SIMILAR, CurrentLoad
from pg_tensile.planning.latency.mlp import LatencyModels
from pg_tensile.planning.trace.trace import Floats, Trace
from tests.unit.handmade import network

TRACE = network(6)


class Models:
    """Models by which load makes operators slower by `slope` times its share; it counts the predictions."""

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope
        self.predictions = 0

    def predict(self, trace: Trace, profile: DeviceProfile, load: float) -> Floats:
        self.predictions += 1
        return roofline.estimate(trace, profile) * (1 + self.slope * load)


def current_load(models: Models) -> CurrentLoad:
    return CurrentLoad(cast(LatencyModels, models))


def at(trace: Trace, before: float, now: float, slope: float = 1.0) -> Floats:
    return current_load(Models(slope)).at(trace, RTX_A6000, before, now).latency_us


def test_a_prediction_becomes_the_one_for_the_load_now():
    models = Models()
    predicted = TRACE.with_latencies(models.predict(TRACE, RTX_A6000, 0.3))
    assert at(predicted, 0.3, 0.8) == pytest.approx(models.predict(TRACE, RTX_A6000, 0.8))
    assert at(predicted, 0.3, 0.0) == pytest.approx(roofline.estimate(TRACE, RTX_A6000))


def test_what_was_measured_keeps_its_distance_from_the_prediction():
    measured = TRACE.with_latencies(np.linspace(5.0, 50.0, TRACE.operator_count))
    assert at(measured, 0.0, 1.0) == pytest.approx(2 * measured.latency_us)
    assert at(measured, 1.0, 0.5) == pytest.approx(measured.latency_us * 1.5 / 2)


@given(st.floats(0, 1), st.floats(-0.999 * SIMILAR, 0.999 * SIMILAR))
def test_what_was_measured_under_a_similar_load_stays_as_it_is(before, difference):
    assert (at(TRACE, before, before + difference) == TRACE.latency_us).all()


@given(st.floats(-1, 2), st.floats(-1, 2), st.floats(-0.9, 3))
def test_more_load_makes_no_operator_faster(before, now, slope):
    latency = at(TRACE, before, now, slope)
    assert np.isfinite(latency).all()
    assert ((latency >= TRACE.latency_us) if now > before else (latency <= TRACE.latency_us)).all()


def test_predictions_are_made_once_for_each_trace_and_step_of_load():
    models = Models()
    load = current_load(models)
    first = load.at(TRACE, RTX_A6000, 0.0, 0.52)
    assert (load.at(TRACE, RTX_A6000, 0.04, 0.48).latency_us == first.latency_us).all()
    assert models.predictions == 2
    load.keep({network(2).fingerprint})
    load.at(TRACE, RTX_A6000, 0.0, 0.5)
    assert models.predictions == 4
