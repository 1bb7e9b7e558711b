"""Loss, accuracy, F1, RMSE and R² of an epoch, accumulated batch by batch in float64 or integers. Needs numpy only.

F1 is that of `labels[1]` for two labels; for more it is the unweighted mean over the labels that occur in target or
prediction, as scikit-learn's "macro". RMSE is in the target's own unit; the reference of R² is the mean target of the
same rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.preprocessing import Task


@dataclass(frozen=True)
class Metrics:
    """Metrics over `samples` rows; those that do not apply to the task are None."""

    samples: int
    loss: float | None
    accuracy: float | None = None
    f1: float | None = None
    rmse: float | None = None
    r2: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class MetricSums:
    """Sums from which metrics are computed.

    `std` is the standard deviation of a regression's target, the unit of its encoded values. `arrays` is the complete
    state, to be stored and restored."""

    def __init__(self, task: Task, labels: int, std: float) -> None:
        self._task = task
        self._std = std
        if task == Task.REGRESSION:  # squared errors, sum and squares of the target
            self.arrays = {"sums": np.zeros(3, np.float64)}
        else:
            self.arrays = {name: np.zeros(labels, np.int64) for name in ("hits", "predicted", "actual")}

    def add(self, outputs: NDArray[np.float32], target: NDArray[Any]) -> None:
        """Add a batch: model outputs [rows, outputs] and encoded targets [rows]."""
        if self._task == Task.REGRESSION:
            y = target.astype(np.float64)
            error = outputs[:, 0].astype(np.float64) - y
            self.arrays["sums"] += (error @ error, y.sum(), y @ y)
            return
        predicted = (outputs[:, 0] > 0).astype(np.int64) if self._task == Task.BINARY else outputs.argmax(axis=1)
        actual = target.astype(np.int64)
        labels = len(self.arrays["hits"])
        self.arrays["hits"] += np.bincount(actual[predicted == actual], minlength=labels)
        self.arrays["predicted"] += np.bincount(predicted, minlength=labels)
        self.arrays["actual"] += np.bincount(actual, minlength=labels)

    def result(self, samples: int, loss_sum: float) -> Metrics:
        """Return the metrics of the `samples` rows added, whose losses sum to `loss_sum`."""
        if samples == 0:
            return Metrics(0, None)
        loss = loss_sum / samples
        if self._task == Task.REGRESSION:
            squared_error, total, squares = self.arrays["sums"].tolist()
            spread = squares - total * total / samples
            r2 = 1.0 - squared_error / spread if spread > 1e-12 * squares else None
            return Metrics(samples, loss, rmse=self._std * float(np.sqrt(squared_error / samples)), r2=r2)
        hits, predicted, actual = (self.arrays[name] for name in ("hits", "predicted", "actual"))
        either = predicted + actual
        f1 = 2.0 * hits / np.maximum(either, 1)
        mean_f1 = f1[1] if self._task == Task.BINARY else f1[either > 0].mean()
        return Metrics(samples, loss, accuracy=float(hits.sum()) / samples, f1=float(mean_f1))
