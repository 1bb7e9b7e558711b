"""Calibration of a classifier's probabilities on validation rows (Platt scaling; temperature scaling).

A calibrated logit is `scale` times the model's plus `shift`; only the logit of two labels has a shift, since a common
one changes nothing among several. The two numbers minimise the log loss on the rows, and are kept only if they lower it
on rows that they were not fitted to. Rows count by their weights, as in training: otherwise calibration would undo the
balance of labels. Needs numpy, and SciPy to fit.

Fewer than `MANY_ROWS` rows say too little about two numbers, and if a network is right about all of them, nothing about
how often it errs. They can only lower its confidence (`scale` up to 1, no shift), and that is kept in any case: half an
error more than was seen is expected, so that n rows without an error are worth an error rate of 0.5 / (n + 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MANY_ROWS = 200
LEAST_ROWS = 2
FOLDS = 5
SCALES = (1e-3, 1e3)
SHIFTS = (-50.0, 50.0)


class Calibration(NamedTuple):
    """The map of a logit x to scale · x + shift."""

    scale: float
    shift: float = 0.0

    def apply(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return logits * self.scale + self.shift


class Fit(NamedTuple):
    """A calibration and mean log losses: of the model's probabilities, and of calibrated ones of rows not fitted to."""

    calibration: Calibration
    rows: int
    log_loss: float
    calibrated_log_loss: float

    @property
    def kept(self) -> bool:
        return self.rows < MANY_ROWS or self.calibrated_log_loss < self.log_loss

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "log_loss": self.log_loss,
            "calibrated_log_loss": self.calibrated_log_loss,
            "kept": self.kept,
        }


def fit(outputs: NDArray[np.float64], target: NDArray[Any], weight: NDArray[Any] | None = None) -> Fit | None:
    """Fit a calibration to logits [rows, outputs] and labels [rows], rows of equal features being neighbours.

    `weight` [rows] is that of each row, None means 1. Returns None if fewer than LEAST_ROWS rows have a weight, or if
    logits are not finite."""
    usable = _counted(outputs, target, weight)
    if usable is None:
        return None
    outputs, labels, weights = usable
    rows = len(outputs)
    many = rows >= MANY_ROWS  # of the folds as well: they are to judge what is kept
    # Folds of neighbours keep equal rows together, so that none is fitted to and judged.
    folds = np.array_split(np.arange(rows), min(FOLDS, rows))
    loss = 0.0
    for fold in folds:
        others = np.ones(rows, np.bool_)
        others[fold] = False
        calibration = _minimum(outputs[others], labels[others], weights[others], many)
        loss += float(log_losses(calibration.apply(outputs[fold]), labels[fold]) @ weights[fold])
    before = float(log_losses(outputs, labels) @ weights)
    return Fit(_minimum(outputs, labels, weights, many), rows, before / rows, loss / rows)


def least_log_loss(
    outputs: NDArray[np.float64], target: NDArray[Any], weight: NDArray[Any] | None = None
) -> float | None:
    """Return the mean log loss (nats) of logits [rows, outputs] after the calibration that suits these rows best.

    It says how well a model tells labels apart, however sure of itself it is. Arguments, and None, as in `fit`."""
    rows = _counted(outputs, target, weight)
    if rows is None:
        return None
    outputs, labels, weights = rows
    calibrated = _minimum(outputs, labels, weights, len(outputs) >= MANY_ROWS).apply(outputs)
    return float(log_losses(calibrated, labels) @ weights) / len(labels)


def _counted(
    outputs: NDArray[np.float64], target: NDArray[Any], weight: NDArray[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]] | None:
    """Return logits, labels and weights, whose mean is 1, of the rows with a weight; None if `fit` refuses them."""
    weights = np.ones(len(outputs)) if weight is None else weight.astype(np.float64)
    counted = weights > 0
    outputs, labels, weights = outputs[counted], target[counted].astype(np.int64), weights[counted]
    if len(outputs) < LEAST_ROWS or not np.isfinite(outputs).all():
        return None
    return outputs, labels, weights / weights.mean()


def log_losses(outputs: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the log losses [rows] (nats) of logits [rows, outputs] for labels [rows]."""
    logits = _logits(outputs)
    losses: NDArray[np.float64] = _log_sums(logits) - logits[np.arange(len(labels)), labels]
    return losses


def _minimum(
    outputs: NDArray[np.float64], labels: NDArray[np.int64], weights: NDArray[np.float64], many: bool
) -> Calibration:
    """Return the calibration with the least log loss, rows counting by `weights`; unless `many`, one that lowers
    confidence only.

    Half an error more than was seen is expected (Jeffreys' rule): otherwise the best scale for rows without an error
    would be infinite."""
    from scipy.optimize import minimize

    logits = _logits(outputs)
    rows, count = logits.shape
    error = 0.5 / (rows + 1)
    target = np.full(logits.shape, error / (count - 1))
    target[np.arange(rows), labels] = 1.0 - error
    shifted = many and outputs.shape[1] == 1

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        scale, shift = parameters
        calibrated = logits * scale
        calibrated[:, 1] += shift if shifted else 0.0
        sums = _log_sums(calibrated)
        excess = (np.exp(calibrated - sums[:, None]) - target) * weights[:, None] / rows
        slopes = np.array([(excess * logits).sum(), excess[:, 1].sum() if shifted else 0.0])
        return float((sums - (target * calibrated).sum(axis=1)) @ weights) / rows, slopes

    bounds = [SCALES if many else (SCALES[0], 1.0), SHIFTS if shifted else (0.0, 0.0)]
    scale, shift = minimize(loss, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=bounds).x.tolist()
    return Calibration(scale, shift)


def _logits(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a logit for each label [rows, labels]; the first of two labels has 0."""
    return np.hstack((np.zeros_like(outputs), outputs)) if outputs.shape[1] == 1 else outputs


def _log_sums(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the sum of the exponentials of each row, [rows]."""
    most = logits.max(axis=1)
    return most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
