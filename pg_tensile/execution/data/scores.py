"""Scores of predictions against targets, computed by scikit-learn. A score that the rows do not define is None.

Classes are numbers: the position of the label in the preprocessing's labels; higher ones are labels that training did
not have. Rows with such a label count as errors. Scores of probabilities are then not defined, because the model has no
probability for the label.

scikit-learn is imported only when a score is computed, because that takes most of a second; `rankings` does without.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 10
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of residuals

Numbers = NDArray[np.float64]


class Classified(NamedTuple):
    """Rows of a classification.

    actual: classes [rows]; probabilities: [rows, labels], each row adds up to 1; predicted: classes [rows]; weight:
    [rows], None if all rows count the same."""

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
    """Rows of a regression: targets and predictions [rows] in the target's unit, and weights [rows] or None."""

    actual: Numbers
    predicted: Numbers
    weight: Numbers | None = None


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
    with _scikit_learn():
        value = CLASSIFICATION[name](data) if isinstance(data, Classified) else REGRESSION[name](data)
    return None if value is None or not math.isfinite(value) else float(value)


def scores(data: Classified | Estimated) -> dict[str, float | None]:
    """Return all scores by name."""
    return {name: score(name, data) for name in (CLASSIFICATION if isinstance(data, Classified) else REGRESSION)}


def higher_is_better(name: str) -> bool:
    return name not in LOSSES


@contextmanager
def _scikit_learn() -> Iterator[None]:
    """Switch off checks of arguments that are known to be valid, and warnings of undefined scores."""
    import sklearn

    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- classification ----


def _accuracy(data: Classified) -> float:
    from sklearn import metrics

    return float(metrics.accuracy_score(data.actual, data.predicted, sample_weight=data.weight))


def _balanced_accuracy(data: Classified) -> float:
    from sklearn import metrics

    return float(metrics.balanced_accuracy_score(data.actual, data.predicted, sample_weight=data.weight))


def _of_classes(name: str) -> Callable[[Classified], float]:
    """Return a score of class 1 of two, or the mean over the classes that occur in targets or predictions."""

    def score(data: Classified) -> float:
        from sklearn import metrics

        function = getattr(metrics, f"{name}_score")
        if data.labels == 2:
            of_class = {"labels": [1], "average": None, "zero_division": np.nan}
            return float(function(data.actual, data.predicted, **of_class, sample_weight=data.weight)[0])
        macro = {"average": "macro", "zero_division": 0.0}
        return float(function(data.actual, data.predicted, **macro, sample_weight=data.weight))

    return score


def _mcc(data: Classified) -> float | None:
    from sklearn import metrics

    if (data.actual == data.actual[0]).all() or (data.predicted == data.predicted[0]).all():
        return None
    return float(metrics.matthews_corrcoef(data.actual, data.predicted, sample_weight=data.weight))


def _log_loss(data: Classified) -> float | None:
    from sklearn import metrics

    if not data.has_only_labels:
        return None
    labels = range(data.labels)
    return float(metrics.log_loss(data.actual, data.probabilities, labels=labels, sample_weight=data.weight))


def _brier(data: Classified) -> float | None:
    from sklearn import metrics

    if not data.has_only_labels:
        return None
    weight = {"sample_weight": data.weight}
    if data.labels == 2:
        return float(metrics.brier_score_loss(data.actual, data.probabilities[:, 1], pos_label=1, **weight))
    return float(metrics.brier_score_loss(data.actual, data.probabilities, labels=range(data.labels), **weight))


def _ranking(name: str) -> Callable[[Classified], float | None]:
    """Return a score of the order of the probabilities of class 1 of two, or the mean over all classes that occur."""

    def score(data: Classified) -> float | None:
        from sklearn import metrics

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


def rankings(data: Classified) -> dict[str, float | None]:
    """Return roc_auc and pr_auc like `score`, from one sweep over the thresholds of each class, without scikit-learn.

    For the metrics of epochs: importing scikit-learn takes longer than a short job, and changes the state of Python's
    random numbers, which training must not."""
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


def _error(name: str) -> Callable[[Estimated], float]:
    def score(data: Estimated) -> float:
        from sklearn import metrics

        return float(getattr(metrics, name)(data.actual, data.predicted, sample_weight=data.weight))

    return score


def _r2(data: Estimated) -> float | None:
    from sklearn import metrics

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
LOSSES = {"log_loss", "brier", "rmse", "mae", "mape", "median_absolute_error"}


def residual_quantiles(data: Estimated) -> list[tuple[float, float]]:
    """Return (quantile, residual) for each of QUANTILES; a residual is the target minus the prediction."""
    if len(data.actual) == 0:
        return []
    residuals = np.quantile(data.actual - data.predicted, QUANTILES)
    return list(zip(QUANTILES, residuals.tolist(), strict=True))
