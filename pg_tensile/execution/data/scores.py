"""Scores of predictions against targets, those of scikit-learn. A score that the rows do not define is None.

Classes are numbers: the position of the label in the preprocessing's labels; higher ones are labels that training did
not have. Rows with such a label count as errors. Scores of probabilities are then not defined, because the model has no
probability for the label.

scikit-learn itself is not used: importing it takes longer than most evaluations, and changes the state of Python's
random numbers, which training must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 10
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of residuals

Numbers = NDArray[np.float64]


class Classified(NamedTuple):
    """Rows of a classification.

    actual: classes [rows]; probabilities: [rows, labels], each row adds up to 1; predicted: classes [rows]; weight, of
    which `rankings` alone takes account: [rows], None if all rows count the same."""

    actual: NDArray[np.integer[Any]]
    probabilities: Numbers
    predicted: NDArray[np.integer[Any]]
    weight: Numbers | None = None

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
    value = CLASSIFICATION[name](data) if isinstance(data, Classified) else REGRESSION[name](data)
    return None if value is None or not math.isfinite(value) else float(value)


def scores(data: Classified | Estimated) -> dict[str, float | None]:
    """Return all scores by name."""
    return {name: score(name, data) for name in (CLASSIFICATION if isinstance(data, Classified) else REGRESSION)}


def higher_is_better(name: str) -> bool:
    return name not in LOSSES


# ---- classification ----


class _Counts(NamedTuple):
    """Rows of each class that occurs in targets or predictions [classes]."""

    classes: NDArray[np.int64]
    hits: Numbers  # rows that are of the class and predicted as such
    actual: Numbers
    predicted: Numbers


def _counts(data: Classified) -> _Counts:
    width = int(max(data.actual.max(), data.predicted.max())) + 1
    hits, actual, predicted = (
        np.bincount(classes, minlength=width).astype(np.float64)
        for classes in (data.actual[data.actual == data.predicted], data.actual, data.predicted)
    )
    classes = np.flatnonzero(actual + predicted)
    return _Counts(classes, hits[classes], actual[classes], predicted[classes])


def _accuracy(data: Classified) -> float:
    return float(np.mean(data.actual == data.predicted))


def _balanced_accuracy(data: Classified) -> float:
    counts = _counts(data)
    occurs = counts.actual > 0
    return float(np.mean(counts.hits[occurs] / counts.actual[occurs]))


def _of_classes(ratio: Callable[[_Counts], tuple[Numbers, Numbers]]) -> Callable[[Classified], float | None]:
    """Return a score of class 1 of two, or the mean over the classes that occur in targets or predictions.

    ratio: numerators and denominators [classes]; if a denominator is 0, the score of two classes is not defined, and
    that of the class is 0 in a mean."""

    def score(data: Classified) -> float | None:
        counts = _counts(data)
        above, below = ratio(counts)
        of_classes = above / np.where(below > 0, below, 1)
        if data.labels > 2:
            return float(np.mean(of_classes))
        (second,) = np.nonzero((counts.classes == 1) & (below > 0))
        return float(of_classes[second[0]]) if len(second) else None

    return score


def _mcc(data: Classified) -> float | None:
    """R. A. Fisher's correlation of two classes, and J. Gorodkin's of several."""
    rows = float(len(data.actual))
    _, hits, actual, predicted = _counts(data)
    spread = (rows**2 - predicted @ predicted) * (rows**2 - actual @ actual)
    return float((hits.sum() * rows - actual @ predicted) / math.sqrt(spread)) if spread > 0 else None


def _log_loss(data: Classified) -> float | None:
    if not data.has_only_labels:
        return None
    least = np.finfo(np.float64).eps
    right = data.probabilities[np.arange(len(data.actual)), data.actual]
    return float(-np.mean(np.log(np.clip(right, least, 1 - least))))


def _brier(data: Classified) -> float | None:
    """Half of the squared distance for two classes, as usual."""
    if not data.has_only_labels:
        return None
    distance = ((np.eye(data.labels)[data.actual] - data.probabilities) ** 2).sum(axis=1)
    return float(np.mean(distance)) / (2 if data.labels == 2 else 1)


CLASSIFICATION: Mapping[str, Callable[[Any], float | None]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": _balanced_accuracy,
    "f1": _of_classes(lambda counts: (2 * counts.hits, counts.actual + counts.predicted)),
    "precision": _of_classes(lambda counts: (counts.hits, counts.predicted)),
    "recall": _of_classes(lambda counts: (counts.hits, counts.actual)),
    "mcc": _mcc,
    "log_loss": _log_loss,
    "brier": _brier,
    "roc_auc": lambda data: rankings(data)["roc_auc"],
    "pr_auc": lambda data: rankings(data)["pr_auc"],
}


def rankings(data: Classified) -> dict[str, float | None]:
    """Return roc_auc and pr_auc of class 1 of two, or the mean over all classes that occur, from one sweep over the
    thresholds of each class."""
    classes = np.unique(data.actual)
    values = None
    if len(classes) >= 2 and data.has_only_labels and np.isfinite(data.probabilities).all():
        weight = np.ones(len(data.actual)) if data.weight is None else data.weight
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
    spread = ((data.actual - data.actual.mean()) ** 2).sum()
    if (data.actual == data.actual[0]).all() or spread == 0:
        return None
    return float(1 - ((data.actual - data.predicted) ** 2).sum() / spread)


def _mape(data: Estimated) -> float | None:
    if (data.actual == 0).any():
        return None
    return float(np.mean(np.abs(data.actual - data.predicted) / np.abs(data.actual)))


REGRESSION: Mapping[str, Callable[[Any], float | None]] = {
    "r2": _r2,
    "rmse": lambda data: float(np.sqrt(np.mean((data.actual - data.predicted) ** 2))),
    "mae": lambda data: float(np.mean(np.abs(data.actual - data.predicted))),
    "mape": _mape,
    "median_absolute_error": lambda data: float(np.median(np.abs(data.actual - data.predicted))),
}
LOSSES = {"log_loss", "brier", "rmse", "mae", "mape", "median_absolute_error"}


def residual_quantiles(data: Estimated) -> list[tuple[float, float]]:
    """Return (quantile, residual) for each of QUANTILES; a residual is the target minus the prediction."""
    if len(data.actual) == 0:
        return []
    residuals = np.quantile(data.actual - data.predicted, QUANTILES)
    return list(zip(QUANTILES, residuals.tolist(), strict=True))
