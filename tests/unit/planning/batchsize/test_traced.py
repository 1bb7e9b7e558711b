"""The traces of all batch sizes are those that capturing gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pg_tensile.errors import CaptureError
from pg_tensile.execution import models
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.training.graphs import Sizes, capture_step
from pg_tensile.execution.training.settings import Settings
from pg_tensile.planning.batchsize.traces import SIZES, BatchLaw, BatchTraces
from pg_tensile.planning.trace.trace import Strings, Trace
from tests.examples import examples
from tests.unit.rows import every_type
from tests.unit.zoo import thinned

SPEC = StepSpec(F.cross_entropy, OptimizerSpec("adamw", 1e-3), returns_outputs=True)


def ours(architecture: dict[str, Any]) -> Callable[[int], Trace]:
    """A model of the database's own, as a job has it."""
    prepared = every_type(60).prepare()
    preprocessing = prepared.fitted.preprocessing
    model = models.build(models.parse(architecture), preprocessing.model_inputs, preprocessing.outputs)
    sizes = Sizes(60, 0, tuple(preprocessing.layout()))
    return lambda size: capture_step(model, Settings(1, size), Task.BINARY, sizes, torch.device("cpu")).trace


def images(model: nn.Module, pixels: int) -> Callable[[int], Trace]:
    def trace(size: int) -> Trace:
        inputs, targets = torch.empty(size, 3, pixels, pixels), torch.empty(size, dtype=torch.int64)
        return capture(model, [inputs], [targets], SPEC, early_update=True).trace

    return trace


MODELS: dict[str, Callable[[], Callable[[int], Trace]]] = {
    "mlp": lambda: ours({"type": "mlp", "hidden": [16, 8], "norm": "batch", "dropout": 0.1}),
    "transformer": lambda: images(transformer(), 8),
    "cnn": lambda: images(models_cnn(), 12),
    "resnet": lambda: images(thinned("resnet_cifar.resnet20_cifar10", 4)(), 32),
}


def models_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10)
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(192, 10))


@cache
def traced(name: str) -> tuple[Callable[[int], Trace], BatchTraces]:
    trace = MODELS[name]()
    return trace, BatchTraces(trace)


def assert_same(found: Trace, expected: Trace) -> None:
    for column in fields(Trace):
        one, other = getattr(found, column.name), getattr(expected, column.name)
        if isinstance(one, Strings):
            assert one.values == other.values and np.array_equal(one.codes, other.codes), column.name
        else:
            assert np.array_equal(one, other), column.name
    assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize("name", MODELS)
@examples(2)
@given(size=st.integers(SIZES[0], 300))
def test_law_gives_the_trace_that_is_captured(name: str, size: int) -> None:
    trace, known = traced(name)
    assert known.law is not None and known.traced[: len(SIZES)] == SIZES
    assert_same(known.trace_at(size), trace(size))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_below_the_law_the_step_is_captured(name: str) -> None:
    trace, known = traced(name)
    assert_same(known.trace_at(2), trace(2))
    with pytest.raises(ValueError, match="from 3 rows on"):
        assert known.law is not None and known.law.trace_at(2)


class Looking(nn.Module):
    """A model that does more with large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.relu() if len(x) > 10 else x)


class Squaring(nn.Module):
    """A model that compares every row with every other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((x @ x.T).softmax(1) @ x)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 10)


@pytest.mark.parametrize(
    "model, reason", [(Looking(), "another way"), (Squaring(), "do not grow evenly")], ids=["looking", "squaring"]
)
def test_without_a_law_every_size_is_captured(model: nn.Module, reason: str) -> None:
    captured: list[int] = []

    def trace(size: int) -> Trace:
        captured.append(size)
        return capture(model, [torch.empty(size, 4)], [torch.empty(size, dtype=torch.int64)], SPEC).trace

    known = BatchTraces(trace)
    assert known.law is None and reason in known.lawless
    assert_same(known.trace_at(40), trace(40))
    known.trace_at(40)
    assert captured == [*SIZES, 40, 40]


def test_numbers_that_do_not_grow_evenly_are_no_law() -> None:
    trace, _ = traced("mlp")
    traces = {size: trace(size) for size in (4, 8, 16)}
    BatchLaw.fit(traces)
    flops = traces[8].flops.copy()
    flops[flops.argmax()] += 1
    with pytest.raises(CaptureError, match="flops of the step do not grow evenly"):
        BatchLaw.fit(traces | {8: replace(traces[8], flops=flops)})
    with pytest.raises(ValueError, match="third"):
        BatchLaw.fit({4: traces[4], 8: traces[8]})


def test_workspaces_grow_with_the_batch() -> None:
    trace, _ = traced("cnn")
    known = BatchTraces(trace)
    count = known.trace_at(8).operator_count
    known.add_workspaces(8, np.full(count, 1000))
    known.add_workspaces(32, np.full(count, 1600))
    found = [int(known.trace_at(size).workspace_bytes[3]) for size in (4, 8, 20, 32, 64)]
    assert found == [1000, 1000, 1300, 1600, 3200]
