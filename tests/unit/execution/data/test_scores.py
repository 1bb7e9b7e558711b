"""Scores: scikit-learn's values, where the rows do not define them, tables of classes and of probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.data.scores import (
    BINS,
    CLASSIFICATION,
    LOSSES,
    REGRESSION,
    Classified,
    Estimated,
    calibration,
    confusion,
    higher_is_better,
    rankings,
    residual_quantiles,
    score,
    scores,
)
from tests.scikit_learn_scores import expected


def classified(labels: int, rows: int, seed: int) -> Classified:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.ones(labels), rows)
    return Classified(random.integers(0, labels, rows), probabilities, probabilities.argmax(axis=1))


@given(st.integers(2, 5), st.integers(1, 60), st.integers(0, 1000), st.booleans(), st.booleans())
def test_scores_of_classes_are_scikit_learns(labels: int, rows: int, seed: int, rounded: bool, unseen: bool) -> None:
    data = classified(labels, rows, seed)
    if rounded:  # equal probabilities, and some of 0
        chances = data.probabilities.round(1) + 1e-3 * (data.probabilities.round(1).sum(axis=1, keepdims=True) == 0)
        data = data._replace(probabilities=chances / chances.sum(axis=1, keepdims=True))
    if unseen:
        data = data._replace(actual=np.where(np.arange(rows) % 5 == 1, labels, data.actual))
    assert scores(data) == approximately(expected(data))


@given(st.integers(1, 60), st.integers(0, 1000))
def test_scores_of_numbers_are_scikit_learns(rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = Estimated(random.normal(size=rows), random.normal(size=rows))
    assert scores(data) == approximately(expected(data))


def approximately(values: dict[str, float | None]) -> dict[str, Any]:
    return {
        name: value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in values.items()
    }


@given(st.integers(2, 5), st.integers(1, 50), st.integers(0, 1000))
def test_a_row_with_a_weight_is_ranked_as_several(labels: int, rows: int, seed: int) -> None:
    data = classified(labels, rows, seed)
    weight = np.random.default_rng(seed).integers(1, 4, rows)
    repeated = Classified(*(np.repeat(part, weight, axis=0) for part in data))
    for name, value in rankings(data, weight.astype(np.float64)).items():
        expected = rankings(repeated)[name]
        assert value == (None if expected is None else pytest.approx(expected))


def test_no_rows_and_predictions_that_are_not_finite_have_no_scores() -> None:
    none: list[Classified | Estimated] = [
        Classified(np.zeros(0, np.int64), np.zeros((0, 3)), np.zeros(0, np.int64)),
        Classified(np.array([0, 1]), np.array([[np.nan, np.nan], [0.5, 0.5]]), np.array([0, 1])),
        Estimated(np.zeros(0), np.zeros(0)),
        Estimated(np.ones(2), np.array([1.0, np.inf])),
    ]
    for data in none:
        assert set(scores(data).values()) == {None}
    assert confusion(none[0]) == calibration(none[0]) == residual_quantiles(none[2]) == []  # type: ignore[arg-type]


def test_one_class_has_no_ranking_and_no_correlation() -> None:
    data = classified(3, 50, 3)._replace(actual=np.ones(50, np.int64))
    result = scores(data)
    assert (result["roc_auc"], result["pr_auc"], result["mcc"]) == (None, None, None)
    assert result["accuracy"] is not None and result["log_loss"] is not None


def test_unseen_labels_are_errors_without_probabilities() -> None:
    data = classified(2, 100, 4)
    half = np.arange(100) < 50
    unseen = data._replace(actual=np.where(half, 2, data.actual))
    result = scores(unseen)
    rest = Classified(data.actual[~half], data.probabilities[~half], data.predicted[~half])
    assert result["accuracy"] == pytest.approx((score("accuracy", rest) or 0) / 2)
    assert [result[name] for name in ("log_loss", "brier", "roc_auc", "pr_auc")] == [None] * 4
    assert sum(rows for actual, _, rows in confusion(unseen) if actual == 2) == 50


def test_a_class_that_is_never_predicted_has_no_precision() -> None:
    data = classified(2, 20, 5)._replace(predicted=np.zeros(20, np.int64))
    assert score("precision", data) is None
    assert score("recall", data) == 0


def test_a_regression_of_a_constant_and_of_zeros() -> None:
    assert score("r2", Estimated(np.full(3, 2.0), np.arange(3.0))) is None
    assert score("mape", Estimated(np.arange(3.0), np.arange(3.0))) is None
    assert score("mape", Estimated(np.array([1.0, 2.0]), np.array([1.0, 1.0]))) == 0.25


def test_every_score_has_a_direction() -> None:
    random = np.random.default_rng(0)
    actual = random.normal(size=200)
    good, bad = Estimated(actual, actual + 0.1), Estimated(actual, actual + random.normal(size=200))
    for name in REGRESSION:
        better, worse = score(name, good), score(name, bad)
        assert better is not None and worse is not None and (better > worse) == higher_is_better(name), name
    data = classified(2, 200, 6)
    sharp = np.clip(np.eye(2)[data.actual], 0.01, 0.99)
    for name in CLASSIFICATION:
        better = score(name, Classified(data.actual, sharp, data.actual))
        worse = score(name, data)
        assert better is not None and worse is not None and (better > worse) == higher_is_better(name), name
    assert {*REGRESSION, *CLASSIFICATION} > LOSSES


@pytest.mark.parametrize("labels", [2, 3])
def test_confusion_is_scikit_learns(labels: int) -> None:
    from sklearn import metrics as sk

    data = classified(labels, 100, 7)
    matrix = np.zeros((labels, labels), int)
    for actual, predicted, rows in confusion(data):
        matrix[actual, predicted] = rows
    assert (matrix == sk.confusion_matrix(data.actual, data.predicted)).all()


@given(st.integers(1, 200), st.integers(0, 1000), st.booleans())
def test_calibration_is_scikit_learns(rows: int, seed: int, rounded: bool) -> None:
    from sklearn.calibration import calibration_curve

    data = classified(2, rows, seed)
    if rounded:  # equal probabilities share a bin, others stay empty
        chance = data.probabilities[:, 1].round(1)
        data = data._replace(probabilities=np.stack([1 - chance, chance], axis=1))
    frequency, mean = calibration_curve(
        data.actual == 1, data.probabilities[:, 1], n_bins=BINS, strategy="quantile", pos_label=True
    )
    bins = calibration(data)
    assert [part.frequency for part in bins] == pytest.approx(frequency.tolist())
    assert [part.probability for part in bins] == pytest.approx(mean.tolist())
    assert sum(part.rows for part in bins) == rows
    assert all(0 < part.quantile <= 1 for part in bins)
