"""The loss of rows with weights and of ensembles, alike in eager steps, in captured graphs and after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.data.weights import Weighting
from pg_tensile.execution.training.graphs import loss_function
from pg_tensile.execution.training.settings import Settings
from tests.unit.execution.training.test_steps import Case
from tests.unit.execution.training.test_training import MLP, Recorder
from tests.unit.rows import Prepared, Rows

CASES = [(Task.REGRESSION, 1), (Task.BINARY, 1), (Task.MULTICLASS, 3)]


def example(task: Task, outputs: int, members: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(members)
    shape = (12, members, outputs) if members else (12, outputs)
    target = torch.randint(0, 3 if task == Task.MULTICLASS else 2, (12,), generator=generator)
    weight = torch.rand(12, generator=generator)
    target = target if task == Task.MULTICLASS else target.to(torch.float32)
    return torch.randn(shape, generator=generator), target, weight


def row_losses(task: Task, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if task == Task.MULTICLASS:
        return -outputs.log_softmax(1)[torch.arange(len(target)), target]
    x = outputs[:, 0]
    return (x - target) ** 2 if task == Task.REGRESSION else F.softplus(x) - x * target


@pytest.mark.parametrize(("task", "outputs"), CASES)
def test_the_loss_is_the_mean_of_the_rows_losses_times_their_weights(task: Task, outputs: int) -> None:
    x, target, weight = example(task, outputs)
    loss, losses = loss_function(task), row_losses(task, x, target)
    torch.testing.assert_close(loss(x, target), losses.mean())
    torch.testing.assert_close(loss(x, target, weight), (losses * weight).mean())
    assert loss(x, target, torch.zeros(12)).item() == 0.0


@pytest.mark.parametrize(("task", "outputs"), CASES)
def test_each_member_of_an_ensemble_has_a_loss_of_its_own(task: Task, outputs: int) -> None:
    x, target, weight = example(task, outputs, members=4)
    loss = loss_function(task)
    for weights in ((), (weight,)):
        expected = torch.stack([loss(x[:, member], target, *weights) for member in range(4)]).mean()
        torch.testing.assert_close(loss(x, target, *weights), expected)


def weighted_rows(kind: str) -> Prepared:
    rng = np.random.default_rng(4)
    x = rng.normal(size=300)
    y: list[Any] = (x * 2 + rng.normal(size=300) / 5).tolist()
    if kind != "float8":
        y = ["high" if value > 1 else "mid" if value > -1 and kind == "three" else "low" for value in y]
    columns = {"x": ("float8", x.tolist()), "w": ("int4", rng.integers(0, 4, 300).tolist())}
    rows = Rows(columns | {"y": ("float8" if kind == "float8" else "text", y)})
    return rows.prepare(0.3, weighting=Weighting("w", kind == "three"))


@pytest.mark.parametrize("kind", ["float8", "two", "three"])
def test_weighted_runs_under_a_plan_have_the_bits_of_eager_ones(kind: str) -> None:
    case = Case(weighted_rows(kind), MLP, Settings(2, 32, seed=5))
    eager, planned = case.run(case.eager()), case.run(case.planned())
    assert planned.without_seconds() == eager.without_seconds()


def test_a_weighted_run_resumes_to_the_same_bits() -> None:
    case = Case(weighted_rows("three"), MLP, Settings(2, 32, seed=5))
    whole = case.run(case.eager())
    stopped = case.run(case.eager(), recorder=Recorder(stop_after=3))
    resumed = case.run(case.eager(), resume=stopped.checkpoints[-1])
    assert resumed.without_seconds() == whole.without_seconds()


def test_the_validation_loss_is_the_weighted_mean() -> None:
    prepared = weighted_rows("float8")
    case = Case(prepared, {"type": "mlp", "hidden": []}, Settings(1, 32, seed=5))
    steps = case.eager()
    recorder = case.run(steps)
    table = prepared.dataset.validation
    assert table.weight is not None
    with torch.inference_mode():
        features = type(table.features).from_flat([torch.from_numpy(array) for array in table.features.flat()])
        outputs = steps.model.eval()(features)[:, 0].numpy()
    expected = np.average((outputs - table.target) ** 2, weights=table.weight)
    (loss,) = [epoch.metrics.loss for epoch in recorder.epochs if epoch.split == "validation"]
    assert loss == pytest.approx(expected, rel=1e-5)
