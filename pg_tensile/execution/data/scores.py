"""Scores of predictions against targets, with the values of scikit-learn. A score that the rows do not define is None.

Classes are numbers: the position of the label in the preprocessing's labels; higher ones are labels that training did
not have. Rows with such a label count as errors. Scores of probabilities are then not defined, because the model has no
probability for the label.

Needs numpy only: importing scikit-learn takes longer than most evaluations, and changes the state of Python's random
numbers, which training must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 10
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of residuals
EPSILON = float(np.finfo(np.float64).eps)  # least probability in log_loss, as in scikit-learn

Numbers = NDArray[np.float64]


class Classified(NamedTuple):
    """Rows of a classification.

    actual: classes [rows]; probabilities: [rows, labels], each row adds up to 1; predicted: classes [rows]."""

    actual: NDArray[np.integer[Any]]
    probabilities: Numbers
    predicted: NDArray[np.integer[Any]]

    @property
    def labels(self) -> int:
        return self.probabilities.shape[1]

    @property
    def has_only_labels(self) -> bool:
        """True if training had the labels of all rows."""
        return bool((self.actual < self.labels).all())


class Estimated(NamedTuple):
    """Rows of a regression: targets and predictions [rows] in the target's unit."""

    actual: Numbers
    predicted: Numbers


class Counts(NamedTuple):
    """Numbers of rows, or sums of their weights, of each class [classes]."""

    hits: Numbers
    predicted: Numbers
    actual: Numbers

    @staticmethod
    def of(actual: NDArray[Any], predicted: NDArray[Any], weight: Numbers, classes: int) -> Counts:
        hit = predicted == actual
        columns = ((actual[hit], weight[hit]), (predicted, weight), (actual, weight))
        return Counts(*(np.bincount(column, of_rows, classes).astype(np.float64) for column, of_rows in columns))


class Bin(NamedTuple):
    """Rows of a calibration table: those with probabilities up to the `quantile` of all, from the one before."""

    quantile: float
    probability: float  # mean
    frequency: float
    rows: int


def score(name: str, data: Classified | Estimated) -> float | None:
    """Return one of CLASSIFICATION or REGRESSION; None also if predictions are not finite."""
    numbers = data.probabilities if isinstance(data, Classified) else data.predicted
    if len(data.actual) == 0 or not np.isfinite(numbers).all():
        return None
    with np.errstate(all="ignore"):
        value = CLASSIFICATION[name](data) if isinstance(data, Classified) else REGRESSION[name](data)
    return None if value is None or not math.isfinite(value) else float(value)


def scores(data: Classified | Estimated) -> dict[str, float | None]:
    """Return all scores by name."""
    return {name: score(name, data) for name in (CLASSIFICATION if isinstance(data, Classified) else REGRESSION)}


def higher_is_better(name: str) -> bool:
    return name not in LOSSES


# ---- classification ----


def class_scores(counts: Counts, weight: float, binary: bool) -> dict[str, Any]:
    """Return the scores that follow from counts of rows, whose weights add up to `weight`.

    A score of classes is that of class 1 of two, else the mean over those that occur in targets or predictions."""
    hits, predicted, actual = counts
    right = hits.sum()
    spread = (weight**2 - (predicted**2).sum()) * (weight**2 - (actual**2).sum())
    occurs = predicted + actual > 0

    def of_classes(numerator: Numbers, denominator: Numbers) -> Any:
        quotient = numerator / denominator
        return quotient[1] if binary else np.where(denominator > 0, quotient, 0.0)[occurs].mean()

    return {
        "accuracy": right / weight,
        "balanced_accuracy": (hits / actual)[actual > 0].mean() if (actual > 0).any() else None,
        "f1": of_classes(2.0 * hits, predicted + actual),
        "precision": of_classes(hits, predicted),
        "recall": of_classes(hits, actual),
        "mcc": (right * weight - predicted @ actual) / np.sqrt(spread) if spread > 1e-12 * weight**4 else None,
    }


def probability_scores(chances: Numbers, actual: NDArray[Any], binary: bool) -> tuple[Numbers, Numbers]:
    """Return the log loss and the Brier score of each row; `chances`: [rows, labels]."""
    true = chances[np.arange(len(actual)), actual]
    log_losses = -np.log(np.clip(true, EPSILON, 1.0 - EPSILON))
    return log_losses, (1.0 - true) ** 2 if binary else (chances**2).sum(axis=1) - 2.0 * true + 1.0


def _of_counts(name: str, data: Classified) -> float | None:
    rows, classes = len(data.actual), int(max(data.labels, data.actual.max() + 1))
    counts = Counts.of(data.actual, data.predicted, np.ones(rows), classes)
    value: float | None = class_scores(counts, rows, data.labels == 2)[name]
    return value


def _of_probabilities(place: int, data: Classified) -> float | None:
    if not data.has_only_labels:
        return None
    return float(probability_scores(data.probabilities, data.actual, data.labels == 2)[place].mean())


CLASSIFICATION: Mapping[str, Callable[[Any], float | None]] = {
    **{
        name: partial(_of_counts, name)
        for name in ("accuracy", "balanced_accuracy", "f1", "precision", "recall", "mcc")
    },
    "log_loss": partial(_of_probabilities, 0),
    "brier": partial(_of_probabilities, 1),
    "roc_auc": lambda data: rankings(data)["roc_auc"],
    "pr_auc": lambda data: rankings(data)["pr_auc"],
}


def rankings(data: Classified, weight: Numbers | None = None) -> dict[str, float | None]:
    """Return roc_auc and pr_auc, from one sweep over the thresholds of each class; `weight`: of each row.

    They are those of class 1 of two, or the mean over all classes that occur."""
    classes = np.unique(data.actual)
    values = None
    if len(classes) >= 2 and data.has_only_labels and np.isfinite(data.probabilities).all():
        weight = np.ones(len(data.actual)) if weight is None else weight
        ranked = [1] if data.labels == 2 else classes.tolist()
        areas = [_areas(data.actual == label, data.probabilities[:, label], weight) for label in ranked]
        values = np.mean(areas, axis=0)
    if values is None or not np.isfinite(values).all():
        return {"roc_auc": None, "pr_auc": None}
    return {"roc_auc": float(values[0]), "pr_auc": float(values[1])}


def _areas(hit: NDArray[np.bool_], probability: Numbers, weight: Numbers) -> tuple[float, float]:
    """Return the area under the ROC curve, and the average precision; NaN if hits or the others weigh nothing."""
    order = np.argsort(-probability, kind="stable")
    last = np.append(np.flatnonzero(np.diff(probability[order])), len(order) - 1)  # of each distinct probability
    true = np.cumsum((weight * hit)[order])[last]
    false = np.cumsum((weight * ~hit)[order])[last]
    if true[-1] <= 0 or false[-1] <= 0:
        return np.nan, np.nan
    recall = np.append(0.0, true / true[-1])
    fallout = np.append(0.0, false / false[-1])
    positive = np.maximum(true + false, np.finfo(np.float64).tiny)
    return float(np.diff(fallout) @ (recall[1:] + recall[:-1]) / 2), float(np.diff(recall) @ (true / positive))


def confusion(data: Classified) -> list[tuple[int, int, int]]:
    """Return (actual, predicted, rows) for all pairs of classes that occur together."""
    if len(data.actual) == 0:
        return []
    width = int(max(data.actual.max(), data.predicted.max())) + 1
    pairs, rows = np.unique(data.actual.astype(np.int64) * width + data.predicted, return_counts=True)
    return [(*divmod(pair, width), count) for pair, count in zip(pairs.tolist(), rows.tolist(), strict=True)]


def calibration(data: Classified) -> list[Bin]:
    """Return BINS bins with about as many rows each, as scikit-learn's calibration_curve with strategy "quantile".

    The probabilities are those of class 1 of two, else those of the predicted class. Bins without rows are left out."""
    if len(data.actual) == 0:
        return []
    if data.labels == 2:
        probability, hit = data.probabilities[:, 1], data.actual == 1
    else:
        probability = data.probabilities[np.arange(len(data.actual)), data.predicted]
        hit = data.actual == data.predicted
    quantiles = np.linspace(0.0, 1.0, BINS + 1)[1:]
    number = np.searchsorted(np.percentile(probability, quantiles[:-1] * 100), probability)  # rounded likewise
    rows = np.bincount(number, minlength=BINS)
    probabilities = np.bincount(number, probability, BINS) / np.maximum(rows, 1)
    frequencies = np.bincount(number, hit, BINS) / np.maximum(rows, 1)
    bins = zip(quantiles.tolist(), probabilities.tolist(), frequencies.tolist(), rows.tolist(), strict=True)
    return [Bin(round(quantile, 6), *values) for quantile, *values in bins if values[-1]]


# ---- regression ----


def _r2(data: Estimated) -> float | None:
    if (data.actual == data.actual[0]).all():
        return None
    squares = ((data.actual - data.predicted) ** 2).sum()
    return float(1.0 - squares / ((data.actual - data.actual.mean()) ** 2).sum())


def _mape(data: Estimated) -> float | None:
    return None if (data.actual == 0).any() else float((_errors(data) / np.abs(data.actual)).mean())


def _errors(data: Estimated) -> Numbers:
    return np.abs(data.actual - data.predicted)


REGRESSION: Mapping[str, Callable[[Any], float | None]] = {
    "r2": _r2,
    "rmse": lambda data: float(np.sqrt(((data.actual - data.predicted) ** 2).mean())),
    "mae": lambda data: float(_errors(data).mean()),
    "mape": _mape,
    "median_absolute_error": lambda data: float(np.median(_errors(data))),
}
LOSSES = {"log_loss", "brier", "rmse", "mae", "mape", "median_absolute_error"}


def residual_quantiles(data: Estimated) -> list[tuple[float, float]]:
    """Return (quantile, residual) for each of QUANTILES; a residual is the target minus the prediction."""
    if len(data.actual) == 0:
        return []
    residuals = np.quantile(data.actual - data.predicted, QUANTILES)
    return list(zip(QUANTILES, residuals.tolist(), strict=True))
