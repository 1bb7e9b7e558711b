"""Scores are those of scikit-learn; where the rows do not define them they are None; tables of classes and chances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

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


def classified(labels: int, rows: int, seed: int) -> Classified:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.ones(labels), rows)
    return Classified(random.integers(0, labels, rows), probabilities, probabilities.argmax(axis=1))


def same(value: float | None) -> object:
    return None if value is None or not np.isfinite(value) else pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
@settings(deadline=None, max_examples=30)
@given(st.integers(3, 5), st.integers(1, 60), st.integers(0, 1000), st.booleans())
def test_scores_of_classes_are_scikit_learns_macro_averages(labels: int, rows: int, seed: int, unseen: bool) -> None:
    data = classified(labels, rows, seed)
    if unseen:
        data = data._replace(actual=np.where(np.arange(rows) % 4 == 1, labels, data.actual))
    actual, predicted, result = data.actual, data.predicted, scores(data)
    assert result["accuracy"] == same(sk.accuracy_score(actual, predicted))
    assert result["balanced_accuracy"] == same(sk.balanced_accuracy_score(actual, predicted))
    assert result["f1"] == same(sk.f1_score(actual, predicted, average="macro", zero_division=0))
    assert result["precision"] == same(sk.precision_score(actual, predicted, average="macro", zero_division=0))
    assert result["recall"] == same(sk.recall_score(actual, predicted, average="macro", zero_division=0))
    if result["mcc"] is not None:
        assert result["mcc"] == same(sk.matthews_corrcoef(actual, predicted))
    else:
        assert len(np.unique(actual)) == 1 or len(np.unique(predicted)) == 1
    if data.has_only_labels:
        assert result["log_loss"] == same(sk.log_loss(actual, data.probabilities, labels=range(labels)))
        assert result["brier"] == same(sk.brier_score_loss(actual, data.probabilities, labels=range(labels)))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60), st.integers(0, 1000))
def test_scores_of_two_classes_are_those_of_the_second(rows: int, seed: int) -> None:
    data = classified(2, rows, seed)
    result, of_second = scores(data), {"labels": [1], "average": None, "zero_division": np.nan}
    for name, function in (("f1", sk.f1_score), ("precision", sk.precision_score), ("recall", sk.recall_score)):
        assert result[name] == same(function(data.actual, data.predicted, **of_second)[0]), name
    assert result["brier"] == same(sk.brier_score_loss(data.actual, data.probabilities[:, 1], pos_label=1))
    assert result["log_loss"] == same(sk.log_loss(data.actual, data.probabilities, labels=[0, 1]))


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 5), st.integers(1, 50), st.integers(0, 1000), st.booleans())
def test_rankings_are_scikit_learns(labels: int, rows: int, seed: int, weighted: bool) -> None:
    """Of the second of two classes, or the mean over the classes that occur; some probabilities are equal."""
    random = np.random.default_rng(seed)
    data = classified(labels, rows, seed)
    data = data._replace(
        probabilities=data.probabilities.round(1),
        weight=random.integers(1, 4, rows).astype(float) if weighted else None,
    )
    classes = np.unique(data.actual)
    found = rankings(data)
    for name, function in (("roc_auc", sk.roc_auc_score), ("pr_auc", sk.average_precision_score)):
        expected = None
        if len(classes) > 1:
            expected = np.mean([
                function(data.actual == label, data.probabilities[:, label], sample_weight=data.weight)
                for label in ([1] if labels == 2 else classes)
            ])  # fmt: skip
        assert found[name] == same(expected), name
        assert weighted or score(name, data) == found[name]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 60), st.integers(0, 1000))
def test_scores_of_regressions_are_scikit_learns(rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    actual = random.normal(3, 10, rows)
    data = Estimated(actual, actual + random.normal(size=rows))
    assert scores(data) == {
        "r2": same(sk.r2_score(*data)),
        "rmse": same(sk.root_mean_squared_error(*data)),
        "mae": same(sk.mean_absolute_error(*data)),
        "mape": same(sk.mean_absolute_percentage_error(*data)),
        "median_absolute_error": same(sk.median_absolute_error(*data)),
    }


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
    data = classified(labels, 100, 7)
    matrix = np.zeros((labels, labels), int)
    for actual, predicted, rows in confusion(data):
        matrix[actual, predicted] = rows
    assert (matrix == sk.confusion_matrix(data.actual, data.predicted)).all()


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 1000), st.booleans())
def test_calibration_is_scikit_learns(rows: int, seed: int, rounded: bool) -> None:
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
