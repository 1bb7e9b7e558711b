"""Baselines: fitted on training rows, measured as a model with constant outputs, and the warning of a model that is no
better."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pg_tensile.errors import ModelFileError
from pg_tensile.execution.data import baseline_metrics
from pg_tensile.execution.data.baseline import Baseline
from pg_tensile.execution.data.baseline_metrics import measured, shortfall, with_baseline
from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.columns import Column
from pg_tensile.execution.data.evaluation import EvaluatedRows
from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.data.weights import Weighting
from pg_tensile.execution.exchange.fields import checked_preprocessing
from tests.unit.execution.data.test_evaluation import chunk, dictionary
from tests.unit.rows import Prepared, Rows

COUNT = 600
DAY = 86_400_000_000
RNG = np.random.default_rng(5)
Y = np.exp(RNG.normal(size=COUNT)) * 10
WEIGHT = RNG.integers(0, 4, COUNT).astype(float)
LABELS = RNG.choice(["a", "b", "c"], COUNT, p=[0.2, 0.5, 0.3])


def fitted(kind: str, target: Any, time: Any = None, **arguments: Any) -> tuple[Prepared, Preprocessing]:
    """Prepare rows with a weight, a time and a target; return them and the preprocessing with its baseline."""
    times = np.arange(COUNT) * DAY if time is None else time
    columns = {
        "x": ("float8", RNG.normal(size=COUNT).tolist()),
        "w": ("float8", WEIGHT.tolist()),
        "at": ("timestamp", times.tolist()),
        "y": (kind, np.asarray(target).tolist()),
    }
    part = Rows(columns).prepare(**arguments)
    return part, with_baseline(part.fitted, part.store.blocks(), part.dataset).preprocessing


def sides(part: Prepared) -> list[list[NDArray[Any]]]:
    """Return the targets and the weights of the training and of the validation rows, as the query has them."""
    names = [column.name for column in part.fitted.columns]
    blocks = list(part.store.blocks())
    validation = np.concatenate([part.fitted.division.validation_rows(block) for block in blocks])
    columns = [np.concatenate([block.columns[names.index(name)].data for block in blocks]) for name in ("y", "w")]
    return [[column[rows] for column in columns] for rows in (~validation, validation)]


@pytest.mark.parametrize("transform", ["none", "log", "quantile"])
@pytest.mark.parametrize("piece", [1 << 18, 50])
def test_a_regressions_baseline_is_the_mean_and_the_median(
    monkeypatch: pytest.MonkeyPatch, transform: str, piece: int
) -> None:
    monkeypatch.setattr(baseline_metrics, "PIECE", piece)
    part, preprocessing = fitted("float8", Y, transform=transform)
    (train, _), (valid, _) = sides(part)
    assert preprocessing.baseline is not None and preprocessing.baseline.mean == pytest.approx(train.mean(), rel=1e-5)
    result = measured(preprocessing, part.dataset)
    assert (result["kind"], result["split"]) == ("mean", "validation")
    assert result["rmse"] == pytest.approx(np.sqrt(((valid - train.mean()) ** 2).mean()), rel=1e-5)
    if piece > COUNT:
        assert result["mae"] == pytest.approx(np.abs(valid - np.median(train)).mean(), rel=1e-3)
    assert -1 < result["r2"] <= 1e-9


def test_weighted_rows_count_by_their_weights_in_training_and_not_in_evaluations() -> None:
    part, preprocessing = fitted("float8", Y, weighting=Weighting("w"))
    (train, w), (valid, v) = sides(part)
    mean = np.average(train, weights=w)
    error = np.sqrt(np.average((valid - mean) ** 2, weights=v))
    assert measured(preprocessing, part.dataset)["rmse"] == pytest.approx(error, rel=1e-5)
    assert preprocessing.baseline is not None and preprocessing.baseline.mean == pytest.approx(train.mean(), rel=1e-5)


def test_balanced_classes_are_equally_frequent_only_in_training() -> None:
    part, preprocessing = fitted("text", LABELS, weighting=Weighting(balanced=True))
    assert measured(preprocessing, part.dataset)["log_loss"] == pytest.approx(np.log(3))
    assert preprocessing.baseline is not None and preprocessing.baseline.frequencies is not None
    assert preprocessing.baseline.frequencies[1] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("labels", [LABELS, np.where(LABELS == "b", "yes", "no")])
def test_a_classifiers_baseline_is_the_frequencies(labels: NDArray[Any]) -> None:
    from sklearn import metrics

    part, preprocessing = fitted("text", labels)
    names = np.array(preprocessing.labels)
    (train, _), (valid, _) = sides(part)
    frequencies = np.bincount(train, minlength=len(names)) / len(train)
    result = measured(preprocessing, part.dataset)
    assert result["accuracy"] == (valid == frequencies.argmax()).mean()
    chances = np.tile(frequencies, (len(valid), 1))
    assert result["log_loss"] == pytest.approx(metrics.log_loss(valid, chances, labels=range(len(names))))
    assert result["calibrated_log_loss"] == result["log_loss"] and result["roc_auc"] == 0.5
    assert "mcc" not in result  # it is not defined


def test_without_validation_rows_it_is_that_of_the_training_rows() -> None:
    part, preprocessing = fitted("float8", Y, validation=0.0)
    result = measured(preprocessing, part.dataset)
    assert result["split"] == "training" and result["r2"] == pytest.approx(0.0, abs=1e-9)


def test_beside_a_cross_validation_it_is_that_of_all_rows() -> None:
    part, preprocessing = fitted("float8", Y)
    (train, _), (valid, _) = sides(part)
    result = measured(preprocessing, part.dataset, crossed=True)
    error = np.sqrt(((np.concatenate([train, valid]) - train.mean()) ** 2).mean())
    assert (result["split"], result["rmse"]) == ("validation", pytest.approx(error, rel=1e-5))


def test_the_last_value_counts_where_it_is_better() -> None:
    """The newest time has two rows, one of which is above the walk by as much as the other is below."""
    walk = np.cumsum(np.ones(COUNT)) + RNG.normal(size=COUNT)
    times = np.arange(COUNT) * DAY
    walk[478:480] = 480.0, 490.0
    times[478] = times[479]
    part, preprocessing = fitted("float8", walk, times, split_by="at")
    assert preprocessing.baseline == Baseline(last=485.0)
    result = measured(preprocessing, part.dataset)
    assert result["kind"] == "last"
    assert result["mae"] == pytest.approx(np.abs(walk[480:] - 485.0).mean(), rel=1e-5)
    noise = RNG.normal(size=COUNT)
    noise[479] = 5.0
    for type, target, kind in (("float8", noise, "mean"), ("text", LABELS, "frequencies")):
        baseline = fitted(type, target, split_by="at")[1].baseline
        assert baseline is not None and baseline.kind == kind


# ---- evaluations ----


def scored(preprocessing: Preprocessing, outputs: Any, kind: str, values: list[Any], *strings: str) -> dict[str, Any]:
    """Return the value and the baseline of each metric in an evaluation of these rows."""
    rows = EvaluatedRows(preprocessing, [Column("y", kind, True)], 1 << 30)
    rows.add(np.asarray(outputs, np.float32), chunk((kind, values)))
    result = rows.result(dictionary(*strings) if strings else [])
    assert {row[6] for row in result if row[4] is not None or row[2] is not None} <= {None}
    return {row[1]: row[5:] for row in result if row[4] is None and row[2] is None}


def test_an_evaluation_has_the_baseline_beside_each_metric() -> None:
    _, preprocessing = fitted("float8", Y)
    values = [1.0, 2.0, 30.0]
    result = scored(preprocessing, np.zeros((3, 1)), "float8", values)
    mean, median = Y.mean(), np.median(Y)
    assert result["rmse"][1] == pytest.approx(np.sqrt(((np.array(values) - mean) ** 2).mean()), rel=0.1)
    assert result["mae"][1] == pytest.approx(np.abs(np.array(values) - median).mean(), rel=0.1)
    assert result["rows"] == (3, None)


def test_a_calibrated_classifiers_baseline_is_not_calibrated() -> None:
    _, preprocessing = fitted("text", np.where(LABELS == "b", "yes", "no"))
    calibrated = replace(preprocessing, calibration=Calibration(0.1, 3.0))
    results = [
        scored(each, [[1.0], [-1.0], [0.5]], "text", [0, 1, 2], "yes", "no", "new")
        for each in (preprocessing, calibrated)
    ]
    assert [value for _, value in results[0].values()] == [value for _, value in results[1].values()]
    assert results[0]["log_loss"] == (None, None)  # of a label that training did not have
    known = scored(calibrated, [[1.0], [-1.0]], "text", [0, 1], "yes", "no")
    assert known["roc_auc"][1] == 0.5 and known["log_loss"][1] == pytest.approx(np.log(2), abs=0.1)


def test_versions_of_earlier_releases_have_none() -> None:
    _, preprocessing = fitted("float8", Y)
    result = scored(replace(preprocessing, baseline=None), np.zeros((3, 1)), "float8", [1.0, 2.0, 3.0])
    assert result["rmse"][0] is not None and {baseline for _, baseline in result.values()} == {None}


@pytest.mark.parametrize(("kind", "target"), [("float8", Y), ("text", LABELS)])
def test_it_is_stored_with_the_version_and_checked_in_files(kind: str, target: Any) -> None:
    _, preprocessing = fitted(kind, target)
    stored = json.loads(json.dumps(preprocessing.to_json()))
    assert checked_preprocessing(stored).baseline == preprocessing.baseline
    for wrong in ({}, {"mean": 1.0}, {"frequencies": [0.5, 0.5]}, {"mean": "x", "median": 1.0}, {"other": 1.0}):
        with pytest.raises(ModelFileError, match="baseline"):
            checked_preprocessing(stored | {"baseline": wrong})


# ---- warnings ----


def regression(rmse: float, mae: float, samples: int = 1000) -> list[str]:
    baseline = {"kind": "mean", "split": "validation", "rmse": 2.0, "mae": 1.0, "r2": 0.0}
    return shortfall({"validation": {"samples": samples, "rmse": rmse, "mae": mae}, "baseline": baseline})


def test_a_model_that_is_no_better_is_warned_of() -> None:
    (warning,) = regression(2.04, 1.1)
    assert warning.startswith(
        "the model is no better than the mean of the training rows: rmse 2.04 on the validation rows instead of 2;"
    )
    assert "hardly better" in regression(1.99, 0.999)[0]
    assert regression(1.9, 1.1) == regression(2.1, 0.9) == []  # either error will do
    assert regression(1.9, 0.95, samples=20)  # so few rows may say so by chance


def test_of_probabilities_the_log_loss_after_calibration_counts() -> None:
    own = {"samples": 1000, "log_loss": 0.9, "calibrated_log_loss": 0.5, "brier": 0.3}
    baseline = {"kind": "frequencies", "split": "validation", "log_loss": 0.6, "calibrated_log_loss": 0.6, "brier": 0.2}
    assert shortfall({"validation": own, "baseline": baseline}) == []
    (warning,) = shortfall({"validation": own | {"calibrated_log_loss": None}, "baseline": baseline})
    assert "the frequencies of the classes: log_loss 0.9 on the validation rows instead of 0.6" in warning
