"""Latency models: trained on a device whose latencies are a known function."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import mlp, model_bytes, roofline
from pg_tensile.planning.latency.features import Sample
from pg_tensile.planning.latency.mlp import LatencyModels
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.graphs import traces

DEVICE = replace(RTX_A6000, flops_per_s=1e11, bytes_per_s=2e10, launch_us=3.0)
CONVOLUTION, RELU = "aten.convolution.default", "aten.relu.default"


def convolution(batch: int, channels: int, filters: int, size: int, load: float = 0.0) -> Sample:
    """Return a sample of a 3 × 3 convolution: more channels come closer to the device's rate, load slows it down."""
    flops = 2 * batch * channels * filters * size * size * 9
    traffic = 4 * (batch * (channels + filters) * size * size + channels * filters * 9)
    efficiency = 0.8 * channels / (channels + 60) * filters / (filters + 30)
    latency = (12 + flops / DEVICE.flops_per_s / efficiency * 1e6) * (1 + 0.6 * load)
    shapes = f"f32[{batch},{channels},{size},{size}], f32[{filters},{channels},3,3]"
    return Sample(CONVOLUTION, f"{shapes}, None, [1,1], [1,1]", flops, traffic, load, latency)


def relu(batch: int, channels: int, size: int, load: float = 0.0) -> Sample:
    """Three times as fast where it fits into a cache."""
    traffic = 8 * batch * channels * size * size
    bandwidth = DEVICE.bytes_per_s * (3 - 2 / (1 + (2**20 / traffic) ** 2))
    latency = (2 + traffic / bandwidth * 1e6) * (1 + 0.6 * load)
    return Sample(RELU, f"f32[{batch},{channels},{size},{size}]", 0, traffic, load, latency)


CHANNELS = (16, 24, 32, 64, 96, 128)


def shapes(batches: tuple[int, ...], sizes: tuple[int, ...], loads: tuple[float, ...]) -> list[Sample]:
    samples = []
    for load in loads:
        for batch in batches:
            for size in sizes:
                samples += [relu(batch, channels, size, load) for channels in CHANNELS]
                samples += [convolution(batch, c, f, size, load) for c in CHANNELS for f in CHANNELS]
    return samples


@cache
def trained() -> LatencyModels:
    """On batches 1, 4, 16 of three sizes under three loads, measured to some 5 %, a few off by a factor of 3."""
    random = np.random.default_rng(1)
    samples = shapes((1, 4, 16), (8, 16, 32), (0.0, 0.5, 1.0))
    noise = np.exp(random.normal(0, 0.05, len(samples))) * np.where(random.random(len(samples)) < 0.02, 3.0, 1.0)
    return mlp.train(
        [sample._replace(latency_us=sample.latency_us * n) for sample, n in zip(samples, noise, strict=True)], DEVICE
    )


def trace_of(samples: list[Sample], target: str = "") -> Trace:
    read = (Access(0, Mode.READ),)
    operators = [
        Operator(target or s.target, Phase.FORWARD, read, flops=s.flops, bytes=s.bytes, signature=s.signature)
        for s in samples
    ]
    first = Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),))
    return Trace.build([first, *operators, Operator("output", Phase.OPTIMIZER, read)], [Tensor(64, Kind.INPUT)])


def errors(samples: list[Sample], load: float) -> np.ndarray:
    measured = np.array([sample.latency_us for sample in samples])
    return np.abs(trained().predict(trace_of(samples), DEVICE, load)[1:-1] / measured - 1)


# ---- prediction ----


@pytest.mark.parametrize("load", [0.0, 0.25, 1.0])
def test_shapes_that_were_not_measured_are_predicted(load):
    held_out = shapes((2, 8), (12, 24), (load,))
    error = errors(held_out, load)
    assert np.median(error) < 0.1
    assert np.quantile(error, 0.9) < 0.25
    by_roofline = roofline.estimate(trace_of(held_out), DEVICE)[1:-1]
    assert np.median(np.abs(by_roofline / [sample.latency_us for sample in held_out] - 1)) > 0.25


def test_a_kind_without_a_model_has_the_roofline():
    trace = trace_of([relu(4, 16, 16)] * 3, target="aten.never_measured.default")
    assert (trained().predict(trace, DEVICE) == roofline.estimate(trace, DEVICE)).all()


def test_placeholder_and_output_have_the_roofline():
    trace = trace_of([relu(4, 16, 16)])
    predicted, estimated = trained().predict(trace, DEVICE), roofline.estimate(trace, DEVICE)
    assert predicted[[0, -1]].tolist() == estimated[[0, -1]].tolist()
    assert predicted[1] != estimated[1]


def test_far_from_what_was_measured_the_roofline_stands():
    near, far = convolution(32, 128, 128, 32), convolution(4096, 2048, 2048, 512)
    trace = trace_of([near, far])
    ratio = (trained().predict(trace, DEVICE) / roofline.estimate(trace, DEVICE))[1:-1]
    assert errors([near], 0.0) < 0.3
    assert ratio[1] == pytest.approx(1.0, abs=0.05)


def test_a_device_measured_again_is_predicted_alike():
    """Models are independent of another measurement of the device's rates."""
    trace = trace_of(shapes((2,), (16,), (0.0,)))
    again = replace(DEVICE, flops_per_s=2e11, bytes_per_s=1e10, launch_us=9.0)
    assert trained().predict(trace, DEVICE)[1:-1] == pytest.approx(trained().predict(trace, again)[1:-1])


@given(traces(), st.floats())
def test_every_prediction_is_finite_and_positive(trace, load):
    latency = trained().predict(trace, DEVICE, load)
    assert latency.dtype == np.float64
    assert latency.shape == (trace.operator_count,)
    assert np.isfinite(latency).all()
    assert (latency > 0).all()


def test_predicting_does_not_import_torch():
    program = (
        "import sys; from pg_tensile.planning.latency.model_bytes import decode;"
        "import pg_tensile.planning.latency.averages;"
        "import pg_tensile.planning.latency.load; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- training ----


def test_training_twice_gives_the_same_models():
    samples = shapes((1,), (8, 16), (0.0,))
    assert model_bytes.encode(mlp.train(samples, DEVICE)) == model_bytes.encode(mlp.train(samples, DEVICE))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_measurements_are_remembered(count):
    samples = [relu(batch, 64, 16) for batch in range(1, count + 1)]
    predicted = mlp.train(samples, DEVICE).predict(trace_of(samples), DEVICE)[1:-1]
    assert predicted == pytest.approx([sample.latency_us for sample in samples], rel=0.1)


def test_there_is_nothing_to_train_without_samples():
    with pytest.raises(MeasurementError, match="without samples"):
        mlp.train([], DEVICE)


def test_samples_that_are_no_times_are_left_out():
    samples = [relu(4, 64, 16), relu(4, 64, 16)._replace(latency_us=0.0), relu(2, 64, 16)._replace(latency_us=-1.0)]
    predicted = mlp.train(samples, DEVICE).predict(trace_of(samples[:1]), DEVICE)[1]
    assert predicted == pytest.approx(samples[0].latency_us, rel=0.1)


# ---- bytes ----


def sealed(payload: bytes, version: int = model_bytes.FORMAT) -> bytes:
    """Bytes that are wrong inside only."""
    body = zlib.compress(payload)
    return model_bytes.HEADER.pack(model_bytes.MAGIC, version, zlib.crc32(body)) + body


def opened(data: bytes) -> bytes:
    return zlib.decompress(data[model_bytes.HEADER.size :])


@cache
def small() -> bytes:
    return model_bytes.encode(mlp.train([relu(1, 64, 16), relu(2, 64, 16)], DEVICE))


def test_models_come_back_as_they_were():
    again = model_bytes.decode(model_bytes.encode(trained()))
    trace = trace_of(shapes((2, 5), (12,), (0.0,)))
    assert (again.predict(trace, DEVICE, 0.5) == trained().predict(trace, DEVICE, 0.5)).all()
    assert model_bytes.encode(again) == model_bytes.encode(trained())
    assert len(model_bytes.encode(trained())) < 20_000


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data):
    with pytest.raises(MeasurementError, match="latency models"):
        model_bytes.decode(data)


@given(st.data())
def test_damaged_bytes_are_refused(data):
    damaged = bytearray(small())
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MeasurementError, match="latency models"):
        model_bytes.decode(bytes(damaged))
    with pytest.raises(MeasurementError, match="latency models"):
        model_bytes.decode(small()[:position])


@given(st.data())
def test_hostile_numbers_are_refused_or_predict_finite_ones(data):
    """With a checksum that is right."""
    payload = bytearray(opened(small()))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position : position + 4] = data.draw(st.binary(min_size=4, max_size=4))
    try:
        models = model_bytes.decode(sealed(bytes(payload)))
    except MeasurementError:
        return
    latency = models.predict(trace_of([relu(4, 64, 16)]), DEVICE, 0.5)
    assert np.isfinite(latency).all()
    assert (latency > 0).all()


def test_another_format_a_bomb_and_a_surplus_are_refused():
    with pytest.raises(MeasurementError, match="format 9"):
        model_bytes.decode(sealed(opened(small()), version=9))
    with pytest.raises(MeasurementError, match="another size"):
        model_bytes.decode(sealed(bytes(model_bytes.MAX_PAYLOAD + 1)))
    with pytest.raises(MeasurementError, match="does not end"):
        model_bytes.decode(sealed(opened(small()) + b"\0"))
    many = bytearray(opened(small()))
    struct.pack_into("<I", many, model_bytes.RATES.size - 4, 2**32 - 1)
    with pytest.raises(MeasurementError, match="longer than their bytes"):
        model_bytes.decode(sealed(bytes(many)))
