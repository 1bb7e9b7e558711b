"""Loss and metrics of an epoch, accumulated batch by batch in float64: the scores of scores.py by the same names.

Those that are sums over rows, or follow from counts, are exact for any number of rows. The rankings (roc_auc, pr_auc)
need all outputs at once: they are computed from the first rows of an epoch's order, and only if `ranks`. A metric that
the rows do not define is None. Regressions are measured in the target's own unit.

Rows may have weights. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.answers import predictions, probabilities, target_values
from pg_tensile.execution.data.preprocessing import Preprocessing, Task
from pg_tensile.execution.data.scores import Classified, Counts, class_scores, probability_scores, rankings

RANKED_ROWS = 100_000
RANKED_OUTPUTS = 1 << 19  # each label is ranked by itself
RANKED_LABELS = 100

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """Metrics over `samples` rows; those that do not apply to the task, or are not defined, are None."""

    samples: int
    loss: float | None
    accuracy: float | None = None
    balanced_accuracy: float | None = None
    f1: float | None = None
    precision: float | None = None
    recall: float | None = None
    mcc: float | None = None
    log_loss: float | None = None
    calibrated_log_loss: float | None = None  # of validation rows, if probabilities are to be calibrated
    brier: float | None = None
    roc_auc: float | None = None
    pr_auc: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class MetricSums:
    """Sums from which metrics are computed.

    `arrays` is the complete state, to be stored and restored, except that of rankings."""

    def __init__(self, preprocessing: Preprocessing, ranks: bool = False) -> None:
        """Prepare for outputs and encoded targets of this preprocessing."""
        self._preprocessing = preprocessing
        labels = len(preprocessing.labels or ())
        self.arrays: dict[str, Numbers]
        if preprocessing.task == Task.REGRESSION:  # weights, squared and absolute errors, target and its square
            self.arrays = {"sums": np.zeros(5)}
            self._origin = target_values(np.zeros(1), preprocessing)  # near the targets, whose squares stay small
        else:  # weights of each label's hits, predictions and targets; sums of weights, log losses and Brier scores
            self.arrays = {name: np.zeros(labels) for name in ("hits", "predicted", "actual")} | {"sums": np.zeros(3)}
        self._ranked: list[tuple[NDArray[Any], NDArray[Any], Numbers | None]] = []
        width = labels if preprocessing.task == Task.MULTICLASS else 1
        ranked = ranks and 2 <= labels <= RANKED_LABELS
        self._most_ranked = self._unranked = min(RANKED_ROWS, RANKED_OUTPUTS // width) if ranked else 0

    @property
    def ranked(self) -> dict[str, NDArray[Any]]:
        """Outputs, targets and, if rows have them, weights [rows, …] from which rankings are computed."""
        columns = dict(zip(("outputs", "target", "weight"), zip(*self._ranked, strict=True), strict=False))
        return {name: np.concatenate(column) for name, column in columns.items() if column[0] is not None}

    def replaced(self, arrays: Mapping[str, Numbers], ranked: Mapping[str, NDArray[Any]]) -> MetricSums:
        """Return a copy with other `arrays` and, as far as it ranks them, rows of `ranked`."""
        other = copy(self)
        other.arrays = dict(arrays)
        rows = {name: array[: self._most_ranked] for name, array in ranked.items()}
        other._ranked = [(rows["outputs"], rows["target"], rows.get("weight"))] if rows else []
        return other

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue from `arrays`. What an earlier version did not store is not a number."""
        for name, array in self.arrays.items():
            stored = arrays.get(name)
            if stored is None or stored.shape != array.shape:
                stored = np.full_like(array, np.nan)
            self.arrays[name] = stored.astype(np.float64)

    def add(self, outputs: NDArray[Any], target: NDArray[Any], weight: NDArray[Any] | None = None) -> None:
        """Add a batch: outputs [rows, outputs], encoded targets [rows], weights [rows].

        Outputs of an ensemble in training are [rows, members, outputs]; their mean counts."""
        if outputs.ndim == 3:
            outputs = outputs.mean(axis=1)
        exact = outputs.astype(np.float64)
        weights = np.ones(len(target)) if weight is None else weight.astype(np.float64)
        if self._preprocessing.task == Task.REGRESSION:
            self._add_numbers(exact, target, weights)
        else:
            self._add_labels(exact, target.astype(np.int64), weights)
        rows = min(len(target), self._unranked)
        if rows:
            self._unranked -= rows
            self._ranked.append(
                (outputs[:rows].copy(), target[:rows].copy(), None if weight is None else weights[:rows])
            )

    def _add_numbers(self, outputs: Numbers, target: NDArray[Any], weights: Numbers) -> None:
        y = target_values(target.astype(np.float64), self._preprocessing) - self._origin
        error = predictions(outputs, self._preprocessing) - self._origin - y
        weighted = (weights.sum(), weights @ error**2, weights @ np.abs(error), weights @ y, weights @ y**2)
        self.arrays["sums"] += weighted

    def _add_labels(self, outputs: Numbers, actual: NDArray[np.int64], weights: Numbers) -> None:
        chances = probabilities(outputs, self._preprocessing)
        binary = self._preprocessing.task == Task.BINARY
        predicted = (outputs[:, 0] > 0).astype(np.int64) if binary else outputs.argmax(axis=1)
        counts = Counts.of(actual, predicted, weights, len(self.arrays["hits"]))
        for name, numbers in counts._asdict().items():
            self.arrays[name] += numbers
        log_losses, scores = probability_scores(chances, actual, binary)
        self.arrays["sums"] += (weights.sum(), weights @ log_losses, weights @ scores)

    def result(self, samples: int, loss: float | None) -> Metrics:
        """Return the metrics of the `samples` rows added, whose mean loss is `loss`."""
        if samples == 0:
            return Metrics(0, None)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = (
                self._numbers() if self._preprocessing.task == Task.REGRESSION else self._labels() | self._rankings()
            )
        finite = {name: float(value) for name, value in values.items() if value is not None and np.isfinite(value)}
        return Metrics(samples, loss, **finite)

    def _numbers(self) -> dict[str, Any]:
        weight, squares, errors, total, target_squares = self.arrays["sums"]
        spread = target_squares - total * total / weight
        r2 = 1.0 - squares / spread if spread > 1e-12 * target_squares else None
        return {"rmse": np.sqrt(squares / weight), "mae": errors / weight, "r2": r2}

    def _labels(self) -> dict[str, Any]:
        weight, log_loss, brier = self.arrays["sums"]
        counts = Counts(*(self.arrays[name] for name in Counts._fields))
        of_counts = class_scores(counts, weight, self._preprocessing.task == Task.BINARY)
        return of_counts | {"log_loss": log_loss / weight, "brier": brier / weight}

    def _rankings(self) -> dict[str, Any]:
        if not self._ranked:
            return {}
        outputs, target, weights = zip(*self._ranked, strict=True)
        chances = probabilities(np.concatenate(outputs).astype(np.float64), self._preprocessing)
        weight = None if weights[0] is None else np.concatenate(weights)
        actual = np.concatenate(target).astype(np.int64)
        return rankings(Classified(actual, chances, actual), weight)
