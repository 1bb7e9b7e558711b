"""Quantiles of a regression's target: the loss, models that learn them, and steps under a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pg_tensile.errors import OptionError
from pg_tensile.execution import models
from pg_tensile.execution.data.answers import interval
from pg_tensile.execution.data.preprocessing import Features
from pg_tensile.execution.training.quantile_loss import with_quantiles
from pg_tensile.execution.training.uncertainty import derive
from pyworker.children.job import with_quantiles as fit_quantiles
from tests.unit.execution.training.test_steps import assert_same, case
from tests.unit.execution.training.test_training import Recorder, trainer
from tests.unit.rows import Prepared, Rows

QUANTILES = (0.1, 0.9)


def mean_loss(outputs: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs.squeeze(-1), target)


def uneven(rows: int) -> Prepared:
    """Return rows whose target's spread is 4 for a positive feature and 1 for a negative one."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=rows)
    y = rng.normal(size=rows) * np.where(x > 0, 4.0, 1.0)
    prepared = Rows({"x": ("float8", x.tolist()), "y": ("float8", y.tolist())}).prepare(validation=0.3)
    return prepared._replace(fitted=fit_quantiles(prepared.fitted, {"quantiles": list(QUANTILES)}))


def test_the_loss_is_scikit_learns() -> None:
    from sklearn.metrics import mean_pinball_loss

    rng = np.random.default_rng(0)
    outputs, target = rng.normal(size=(50, 3)), rng.normal(size=50)
    loss = with_quantiles(mean_loss, QUANTILES)(torch.from_numpy(outputs), torch.from_numpy(target))
    pinball = [mean_pinball_loss(target, outputs[:, i], alpha=q) for i, q in enumerate(QUANTILES, 1)]
    assert loss.item() == pytest.approx(np.mean((outputs[:, 0] - target) ** 2) + np.mean(pinball))


def test_members_of_an_ensemble_have_losses_of_their_own_and_rows_weights() -> None:
    rng = np.random.default_rng(1)
    outputs, target = torch.from_numpy(rng.normal(size=(8, 4, 3))), torch.from_numpy(rng.normal(size=8))

    def none(outputs: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return outputs.new_zeros(())

    loss = with_quantiles(none, QUANTILES)
    alone = [loss(outputs[:, member], target).item() for member in range(4)]
    assert loss(outputs, target).item() == pytest.approx(np.mean(alone))
    weight = torch.tensor([2.0, 0.0] * 4, dtype=torch.float64)
    assert loss(outputs, target, weight).item() == pytest.approx(loss(outputs[::2], target[::2]).item())


def test_the_quantiles_are_learned_and_the_mean_stays() -> None:
    prepared = uneven(3000)
    settings: dict[str, Any] = {"epochs": 20, "learning_rate": 0.02, "quantiles": QUANTILES}
    run, model = trainer(prepared, Recorder(), {"type": "mlp", "hidden": [16]}, **settings)
    preprocessing = derive(prepared.fitted.preprocessing, run.run().validation, calibrate=True).preprocessing
    assert preprocessing.outputs == 3
    with torch.no_grad():
        x = torch.tensor([[-1.0], [1.0]])
        outputs = model.eval()(Features(x, torch.empty(2, 0, dtype=torch.int64), ())).double().numpy()
    lower, upper = interval(outputs, preprocessing, 0.8)
    assert (upper - lower) == pytest.approx(2 * 1.2816 * np.array([1.0, 4.0]), rel=0.3)


def test_steps_under_a_plan_have_the_same_bits() -> None:
    job = case(uneven(300), quantiles=QUANTILES)
    assert_same(job, job.planned(0.5))


def test_every_built_in_model_has_an_output_for_each() -> None:
    preprocessing = uneven(60).fitted.preprocessing
    model = models.build(models.parse({"type": "mlp"}), preprocessing.model_inputs, preprocessing.outputs).eval()
    few_rows = models.few_rows(model)
    x = np.ones((2, 1), np.float32)
    assert few_rows is not None and few_rows(Features(x, np.empty((2, 0), np.int64), ())).shape == (2, 3)


def test_a_classification_has_no_quantiles() -> None:
    fitted = Rows({"x": ("float8", [1.0, 2.0] * 9), "y": ("bool", [True, False] * 9)}).prepare().fitted
    assert fit_quantiles(fitted, {}) is fitted
    with pytest.raises(OptionError, match="is for regressions"):
        fit_quantiles(fitted, {"quantiles": [0.1, 0.9]})
