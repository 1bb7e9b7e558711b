"""Scores by scikit-learn, with which those of scores.py and metrics.py are compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics

from pg_tensile.execution.data import scores

Numbers = NDArray[np.float64]


class Classified(NamedTuple):
    """Rows as scores.Classified, and their weights [rows], None if all rows count the same."""

    actual: NDArray[np.integer[Any]]
    probabilities: Numbers
    predicted: NDArray[np.integer[Any]]
    weight: Numbers | None = None

    @property
    def labels(self) -> int:
        return self.probabilities.shape[1]

    @property
    def has_only_labels(self) -> bool:
        return bool((self.actual < self.labels).all())


class Estimated(NamedTuple):
    """Rows as scores.Estimated, and their weights [rows] or None."""

    actual: Numbers
    predicted: Numbers
    weight: Numbers | None = None


def expected(
    data: scores.Classified | scores.Estimated, weight: NDArray[np.float64] | None = None
) -> dict[str, float | None]:
    """Return all scores by name; None: the rows do not define it."""
    rows: Classified | Estimated
    if isinstance(data, scores.Classified):
        rows, functions = Classified(data.actual, data.probabilities, data.predicted, weight), CLASSIFICATION
    else:
        rows, functions = Estimated(data.actual, data.predicted, weight), REGRESSION
    result = {}
    for name, function in functions.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = function(rows)
        result[name] = None if value is None or not math.isfinite(value) else float(value)
    return result


def _accuracy(data: Classified) -> float:
    return float(metrics.accuracy_score(data.actual, data.predicted, sample_weight=data.weight))


def _balanced_accuracy(data: Classified) -> float:
    return float(metrics.balanced_accuracy_score(data.actual, data.predicted, sample_weight=data.weight))


def _of_classes(name: str) -> Callable[[Classified], float]:
    """Return a score of class 1 of two, or the mean over the classes that occur in targets or predictions."""

    def score(data: Classified) -> float:
        function = getattr(metrics, f"{name}_score")
        if data.labels == 2:
            of_class = {"labels": [1], "average": None, "zero_division": np.nan}
            return float(function(data.actual, data.predicted, **of_class, sample_weight=data.weight)[0])
        macro = {"average": "macro", "zero_division": 0.0}
        return float(function(data.actual, data.predicted, **macro, sample_weight=data.weight))

    return score


def _mcc(data: Classified) -> float | None:
    if (data.actual == data.actual[0]).all() or (data.predicted == data.predicted[0]).all():
        return None
    return float(metrics.matthews_corrcoef(data.actual, data.predicted, sample_weight=data.weight))


def _log_loss(data: Classified) -> float | None:
    if not data.has_only_labels:
        return None
    labels = range(data.labels)
    return float(metrics.log_loss(data.actual, data.probabilities, labels=labels, sample_weight=data.weight))


def _brier(data: Classified) -> float | None:
    if not data.has_only_labels:
        return None
    weight = {"sample_weight": data.weight}
    if data.labels == 2:
        return float(metrics.brier_score_loss(data.actual, data.probabilities[:, 1], pos_label=1, **weight))
    return float(metrics.brier_score_loss(data.actual, data.probabilities, labels=range(data.labels), **weight))


def _ranking(name: str) -> Callable[[Classified], float | None]:
    """Return a score of the order of the probabilities of class 1 of two, or the mean over all classes that occur."""

    def score(data: Classified) -> float | None:
        classes = np.unique(data.actual)
        if len(classes) < 2 or not data.has_only_labels:
            return None
        function = partial(getattr(metrics, name), sample_weight=data.weight)
        if data.labels == 2:
            return float(function(data.actual, data.probabilities[:, 1]))
        return float(np.mean([function(data.actual == label, data.probabilities[:, label]) for label in classes]))

    return score


CLASSIFICATION: Mapping[str, Callable[[Any], float | None]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": _balanced_accuracy,
    "f1": _of_classes("f1"),
    "precision": _of_classes("precision"),
    "recall": _of_classes("recall"),
    "mcc": _mcc,
    "log_loss": _log_loss,
    "brier": _brier,
    "roc_auc": _ranking("roc_auc_score"),
    "pr_auc": _ranking("average_precision_score"),
}


def _error(name: str) -> Callable[[Estimated], float]:
    def score(data: Estimated) -> float:
        return float(getattr(metrics, name)(data.actual, data.predicted, sample_weight=data.weight))

    return score


def _r2(data: Estimated) -> float | None:
    if (data.actual == data.actual[0]).all():
        return None
    return float(metrics.r2_score(data.actual, data.predicted, sample_weight=data.weight))


def _mape(data: Estimated) -> float | None:
    return None if (data.actual == 0).any() else _error("mean_absolute_percentage_error")(data)


REGRESSION: Mapping[str, Callable[[Any], float | None]] = {
    "r2": _r2,
    "rmse": _error("root_mean_squared_error"),
    "mae": _error("mean_absolute_error"),
    "mape": _mape,
    "median_absolute_error": _error("median_absolute_error"),
}
