"""Calibration and scores after training: of the epoch whose weights are kept, however often the run was resumed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.preprocessing import Features
from pg_tensile.execution.data.weights import Weighting
from pg_tensile.execution.training import validation_sample
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.execution.training.settings import EarlyStopping
from pg_tensile.execution.training.uncertainty import derive
from pg_tensile.execution.training.validation_sample import ValidationSample
from tests.unit.execution.training.test_training import Recorder, noise, trainer
from tests.unit.rows import Prepared, Rows

STOPPING: dict[str, Any] = {"epochs": 200, "learning_rate": 0.05, "early_stopping": EarlyStopping(3, 0.0)}
MLP = {"type": "mlp", "hidden": [64]}


@pytest.mark.parametrize("settings", [STOPPING, {"epochs": 2}], ids=["best", "last"])
def test_the_outputs_are_those_of_the_weights_that_are_kept(settings: dict[str, Any]) -> None:
    prepared = noise(64)
    run, model = trainer(prepared, Recorder(), MLP, **settings)
    validation = run.run().validation
    features = Features.from_flat([torch.from_numpy(array) for array in prepared.dataset.validation.features.flat()])
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(validation["outputs"], model(features))
    assert (validation["target"].numpy() == prepared.dataset.validation.target).all()


@pytest.mark.parametrize("stop_after", [1, 4, 9])
def test_a_resumed_run_keeps_the_same_outputs(stop_after: int) -> None:
    prepared = noise(64)
    expected = trainer(prepared, Recorder(), MLP, **STOPPING)[0].run().validation
    stopped = Recorder(stop_after)
    assert trainer(prepared, stopped, MLP, **STOPPING)[0].run().stopped
    run, _ = trainer(prepared, Recorder(), MLP, **STOPPING)
    assert run.resume(Checkpoint.from_bytes(*stopped.checkpoints[-1])) is None
    validation = run.run().validation
    assert all(torch.equal(validation[name], tensor) for name, tensor in expected.items()) and len(expected) == 2


def test_a_sample_ends_at_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(outputs: int) -> int:
        sample = ValidationSample()
        for start in range(0, 30, 4):
            target = torch.arange(start, start + 4)
            sample.add(target[:, None].repeat(1, outputs), target, target * 2)
        tensors = sample.tensors()
        assert tensors["weight"].tolist() == [2 * number for number in tensors["target"].tolist()]
        assert tensors["outputs"][:, 0].tolist() == tensors["target"].tolist() == list(range(len(tensors["target"])))
        return len(tensors["target"])

    monkeypatch.setattr(validation_sample, "SAMPLED_ROWS", 10)
    monkeypatch.setattr(validation_sample, "MOST_OUTPUTS", 33)
    assert (rows(1), rows(3), rows(5)) == (10, 10, 6)
    assert ValidationSample().tensors() == {}


def classes(rows: int) -> Prepared:
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {"x": ("float8", rng.normal(size=rows).tolist())}
    columns["y"] = ("bool", (rng.random(rows) < 0.3).tolist())
    return Rows(columns).prepare()


def outputs_and_target(rows: int, factor: float) -> dict[str, Tensor]:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(rows, 1)).astype(np.float32)
    target = rng.random(rows) < 1.0 / (1.0 + np.exp(-logits[:, 0]))
    return {"outputs": torch.from_numpy(factor * logits), "target": torch.from_numpy(target.astype(np.float32))}


def test_overconfident_probabilities_are_calibrated_unless_that_is_off() -> None:
    preprocessing = classes(50).fitted.preprocessing
    validation = outputs_and_target(5000, 4.0)
    derived = derive(preprocessing, validation, calibrate=True)
    assert derived.preprocessing.calibration is not None
    assert derived.preprocessing.calibration.scale == pytest.approx(0.25, rel=0.15)
    notes = derived.notes["calibration"]
    assert notes["kept"] and notes["rows"] == 5000 and notes["calibrated_log_loss"] < notes["log_loss"]
    assert derive(preprocessing, validation, calibrate=False) == (preprocessing, {})
    assert derive(preprocessing, outputs_and_target(1, 4.0), calibrate=True) == (preprocessing, {})
    assert derive(preprocessing, {}, calibrate=True) == (preprocessing, {})


def test_a_regression_gets_its_scores() -> None:
    preprocessing = noise(64).fitted.preprocessing
    validation = {"outputs": torch.tensor([[1.0], [2.0], [3.0]]), "target": torch.tensor([1.5, 2.0, 1.0])}
    conformal = derive(preprocessing, validation, calibrate=True).preprocessing.conformal
    assert conformal is not None and (conformal.rows, conformal.scores) == (3, (0.0, 0.5, 2.0))
    times = np.array([3, 2, 1, 0])  # of more rows than are sampled
    newest = derive(preprocessing, validation, True, times).preprocessing.conformal
    assert newest == Conformal.of(np.array([0.5, 0.0, 2.0]), times[:3]) and newest != conformal


def test_labels_that_were_balanced_in_training_stay_so() -> None:
    preprocessing = classes(50).fitted.preprocessing
    validation = outputs_and_target(5000, 1.0)
    weight = torch.where(validation["target"] == 1.0, 9.0, 1.0)
    calibration = derive(preprocessing, validation | {"weight": weight}, calibrate=True).preprocessing.calibration
    assert calibration is not None and calibration.shift == pytest.approx(np.log(9.0), rel=0.2)


def test_the_weights_of_a_run_are_kept_with_its_outputs() -> None:
    rng = np.random.default_rng(3)
    columns: dict[str, Any] = {"x": ("float8", rng.normal(size=80).tolist())}
    columns["y"] = ("bool", (rng.random(80) < 0.2).tolist())
    prepared = Rows(columns).prepare(0.4, weighting=Weighting(balanced=True))
    validation = trainer(prepared, Recorder(), MLP, epochs=1)[0].run().validation
    assert (validation["weight"].numpy() == prepared.dataset.validation.weight).all()
