"""The graphs of a job: which there are, how large evaluation's batches may be, and what they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pg_tensile.errors import ArchitectureError, CaptureError, TrainingError
from pg_tensile.execution import models
from pg_tensile.execution.data.batches import Batches
from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.training import checkpoint
from pg_tensile.execution.training.graphs import (
    Sizes,
    capture_graphs,
    evaluation_rows,
    evaluation_sizes,
    rows_of,
    state_bytes,
    step_spec,
)
from pg_tensile.execution.training.settings import Settings
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.plan.memory import footprint
from tests.unit.rows import Prepared, every_type

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return every_type(400).prepare()


def build(prepared: Prepared, architecture: dict[str, Any]) -> nn.Module:
    preprocessing = prepared.fitted.preprocessing
    return models.build(models.parse(architecture), preprocessing.model_inputs, preprocessing.outputs)


def sizes(prepared: Prepared, training: int, validation: int) -> Sizes:
    preprocessing = prepared.fitted.preprocessing
    assert Sizes.of(prepared.dataset, preprocessing).row == tuple(preprocessing.layout())
    return Sizes(training, validation, tuple(preprocessing.layout()))


@pytest.mark.parametrize("rows", [32, 33, 40, 64, 65, 100])
def test_training_graphs_have_the_rows_of_the_batches(prepared: Prepared, rows: int) -> None:
    graphs = capture_graphs(
        build(prepared, {"type": "mlp", "hidden": [8]}), Settings(1, 32), Task.BINARY, sizes(prepared, rows, 0), CPU
    )
    table = prepared.dataset.training._replace(
        features=type(prepared.dataset.training.features).from_flat(
            [array[:rows] for array in prepared.dataset.training.features.flat()]
        ),
        target=prepared.dataset.training.target[:rows],
    )
    batches = {batch.rows for batch in Batches(table, 32, 0, CPU, False).epoch(0)}
    assert {rows_of(graph) for graph in graphs.named().values()} == batches
    assert graphs.evaluate is graphs.evaluate_last is graphs.evaluation_rows is None


def test_evaluation_is_as_large_as_any_plan_for_training_allows(prepared: Prepared) -> None:
    wide = {"type": "mlp", "hidden": [256, 256]}  # whose weights outweigh a batch
    model, settings = build(prepared, wide), Settings(1, 8)
    graphs = capture_graphs(model, settings, Task.BINARY, sizes(prepared, 100, 1000), CPU)
    assert graphs.evaluate is not None and graphs.evaluate_last is not None
    rows, least = rows_of(graphs.evaluate), least_bytes(graphs.train.trace)
    assert footprint(graphs.evaluate.trace).device_peak_bytes <= least
    assert rows > 8 and rows in evaluation_sizes(sizes(prepared, 100, 1000), 8)
    twice = capture_graphs(model, Settings(1, 2 * rows), Task.BINARY, sizes(prepared, 10_000, 2 * rows), CPU)
    assert twice.evaluate is not None and footprint(twice.evaluate.trace).device_peak_bytes > least
    assert rows_of(graphs.evaluate_last) == 1000 % rows
    assert evaluation_rows(model, settings, Task.BINARY, sizes(prepared, 100, 1000), CPU) == rows


def test_evaluation_has_at_least_the_rows_of_a_batch(prepared: Prepared) -> None:
    assert list(evaluation_sizes(sizes(prepared, 100, 10_000), 5000)) == [5000]
    assert list(evaluation_sizes(sizes(prepared, 100, 100), 64)) == [64, 100]
    assert list(evaluation_sizes(sizes(prepared, 100, 10), 64)) == [10]
    assert list(evaluation_sizes(sizes(prepared, 100, 0), 64)) == []


def test_names_are_the_models_own_and_the_model_stays_as_it_is(prepared: Prepared) -> None:
    model = build(prepared, {"type": "mlp", "norm": "batch", "dropout": 0.1})
    before, state = checkpoint.to_bytes(checkpoint.model_tensors(model)), torch.get_rng_state()
    graphs = capture_graphs(model, Settings(1, 32), Task.BINARY, sizes(prepared, 100, 50), CPU)
    names = {persistent.name for persistent in graphs.train.persistents}
    assert names <= set(dict(model.named_parameters())) | set(dict(model.named_buffers())) and "dense.0.weight" in names
    assert checkpoint.to_bytes(checkpoint.model_tensors(model)) == before
    assert torch.equal(torch.get_rng_state(), state) and "forward" not in vars(model)
    assert graphs.train.spec.returns_outputs and len(graphs.train.outputs) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_state_without_a_plan_is_that_of_the_trace(prepared: Prepared, optimizer: str) -> None:
    model = build(prepared, {"type": "mlp", "norm": "batch"})
    settings = Settings(1, 32, optimizer=optimizer, momentum=0.9)
    trace = capture_graphs(model, settings, Task.BINARY, sizes(prepared, 64, 0), CPU).train.trace
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    steps = 4 * len(list(model.parameters())) if optimizer != "sgd" else 0  # a counter for each parameter
    counters = sum(buffer.nbytes for buffer in model.buffers())
    held = int(trace.tensor_bytes[trace.persistent].sum())
    assert abs(state_bytes(model, settings) + steps - gradients - held) <= counters


def test_settings_become_the_optimizer() -> None:
    sgd = step_spec(Settings(1, 2, "sgd", 0.1, momentum=0.9, weight_decay=0.2, clip=3.0), Task.REGRESSION)
    assert (sgd.optimizer.momentum, sgd.optimizer.weight_decay, sgd.clip) == (0.9, 0.2, 3.0)
    adam = step_spec(Settings(1, 2, "adam", momentum=0.8), Task.REGRESSION).optimizer
    assert adam.betas == (0.8, 0.999) and adam.weight_decay is None


def test_a_models_own_errors_are_explained_where_they_are(prepared: Prepared) -> None:
    source = """
import torch
class Model(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)
    def forward(self, x):
        return self.layer(x[x.sum(1) > -1e9])
def build(inputs, outputs):
    return Model(inputs, outputs)
"""
    model, args = build(prepared, {"type": "python", "source": source}), (Task.BINARY, sizes(prepared, 64, 5000), CPU)
    with pytest.raises(CaptureError, match=r"depends on the data.*<architecture>:8"):
        capture_graphs(model, Settings(1, 32), *args)
    assert evaluation_rows(model, Settings(1, 32), *args) == max(evaluation_sizes(args[1], 32))  # eager only
    with pytest.raises(TrainingError, match="batches of one row"):
        capture_graphs(build(prepared, {"type": "mlp", "norm": "batch"}), Settings(1, 1), *args)
    with pytest.raises(ArchitectureError, match="no parameters"):
        capture_graphs(nn.Identity(), Settings(1, 32), *args)


def test_other_latencies_and_workspaces(prepared: Prepared) -> None:
    model = build(prepared, {"type": "mlp", "hidden": [8]})
    graphs = capture_graphs(model, Settings(1, 32), Task.BINARY, sizes(prepared, 64, 10), CPU)
    trace = graphs.train.trace.with_latencies(np.full(graphs.train.trace.operator_count, 3.0))
    changed = graphs.with_traces({"train": trace})
    assert changed.train.trace is trace and changed.evaluate is graphs.evaluate
