"""CSWAP's epochs, simulated: which layers are sparse, by how much, and what compressing them costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.experiments import cswap
from benchmarks.experiments.cswap import POOLING, RELU, Layer, Step, on_device, zero_share
from benchmarks.experiments.networks import TEN, Network

PLAIN = Network("plain", "benchmarks.experiments.tiny:cnn", ("float32:3x64x64",), TEN, kwargs='{"layers": 5}')


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(PLAIN, 64)


def test_zeros_are_those_of_the_papers_text() -> None:
    course = {n: [zero_share("VGG-16", Layer(0, RELU, n), epoch) for epoch in (0, 10, 50)] for n in (4, 7)}
    assert course[4] == pytest.approx([0.5, 0.56, 0.8]) and course[7] == pytest.approx([0.6, 0.8, 0.6])
    assert zero_share("AlexNet", Layer(0, RELU, 7), 50) == pytest.approx(0.8)
    assert all(zero_share("VGG-16", Layer(0, POOLING, 4), epoch) < 0.45 for epoch in range(50))


def test_swapped_outputs_of_relu_are_sparse_and_images_are_not(step: Step) -> None:
    images = next(tensor for tensor in step.windows if step.trace.tensor_first[tensor] == 0)
    assert {layer.tensor for layer in step.layers} == set(step.windows) - {images}
    assert [layer[1:] for layer in step.layers] == [(RELU, number) for number in range(1, 5)]


def test_coding_takes_turns_with_the_link(step: Step) -> None:
    """Coding for nothing gains, coding that takes as long as moving what it saves does not."""
    shares = {layer.tensor: 0.9 for layer in step.layers}
    none, free, slow = step.us(None), step.us(on_device(step.trace, shares, 0.0)), 1.0
    assert free < none < step.us(on_device(step.trace, shares, slow))
    assert np.count_nonzero(step.chosen(shares).codec) == len(shares)
    assert not step.chosen(dict.fromkeys(shares, 0.05)).compresses


def test_epochs_are_checked(step: Step) -> None:
    def row(epoch: int, **ms: float) -> dict[str, Any]:
        found = {"vdnn": 10.0, "vdnn++": 20.0, "sc": 9.0, "cswap": 8.0, "orac": 7.0} | ms
        return {"case": "A", "epoch": epoch, "step_ms": found, "compressed": ["relu1"] * (3 - epoch)}

    assert [check.holds for check in cswap.checks([row(0), row(1)])] == [True] * 8 + [False]
    assert [check.holds for check in cswap.checks([row(0, cswap=11.0)])] == [True, False, False, True, True]
    zeros = [step.epoch(epoch) for epoch in (0, 48)]
    assert zeros[0]["zero_share"] == pytest.approx(0.5) and zeros[1]["step_ms"]["sc"] < zeros[0]["step_ms"]["sc"]
    assert zeros[1]["step_ms"]["vdnn++"] > zeros[1]["step_ms"]["vdnn"] == zeros[0]["step_ms"]["vdnn"]
