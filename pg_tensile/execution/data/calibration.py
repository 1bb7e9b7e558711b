"""Calibration of a classifier's probabilities on validation rows (Platt scaling; temperature scaling).

A calibrated logit is `scale` times the model's plus `shift`; only the logit of two labels has a shift, since a common
one changes nothing among several. The two numbers minimise the log loss on the rows, and are kept only if they lower it
on rows that they were not fitted to. Needs numpy, and SciPy to fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_ROWS = 200  # fewer say too little about two numbers
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
    def improves(self) -> bool:
        return self.calibrated_log_loss < self.log_loss

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "log_loss": self.log_loss,
            "calibrated_log_loss": self.calibrated_log_loss,
            "kept": self.improves,
        }


def fit(outputs: NDArray[np.float64], target: NDArray[Any]) -> Fit | None:
    """Fit a calibration to logits [rows, outputs] and labels [rows], rows of equal features being neighbours.

    Returns None if there are fewer than LEAST_ROWS rows or logits that are not finite."""
    rows = len(outputs)
    if rows < LEAST_ROWS or not np.isfinite(outputs).all():
        return None
    labels = target.astype(np.int64)
    # Folds of neighbours keep equal rows together, so that none is fitted to and judged.
    folds = np.array_split(np.arange(rows), FOLDS)
    loss = 0.0
    for fold in folds:
        others = np.ones(rows, np.bool_)
        others[fold] = False
        calibration = _minimum(outputs[others], labels[others])
        loss += log_loss(calibration.apply(outputs[fold]), labels[fold]) * len(fold)
    return Fit(_minimum(outputs, labels), rows, log_loss(outputs, labels), loss / rows)


def log_loss(outputs: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the mean log loss (nats) of logits [rows, outputs] for labels [rows]."""
    logits = _logits(outputs)
    return float((_log_sums(logits) - logits[np.arange(len(labels)), labels]).mean())


def _minimum(outputs: NDArray[np.float64], labels: NDArray[np.int64]) -> Calibration:
    """Return the calibration with the least log loss.

    Labels count as if each had been seen once more (Platt's and Laplace's rule): otherwise the best scale for rows
    without an error would be infinite."""
    from scipy.optimize import minimize

    logits = _logits(outputs)
    rows, count = logits.shape
    target = np.full(logits.shape, 1.0 / (rows + count))
    target[np.arange(rows), labels] += rows / (rows + count)
    shifted = outputs.shape[1] == 1

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        scale, shift = parameters
        calibrated = logits * scale
        calibrated[:, 1] += shift if shifted else 0.0
        sums = _log_sums(calibrated)
        error = np.exp(calibrated - sums[:, None]) - target
        slopes = np.array([(error * logits).sum() / rows, error[:, 1].mean() if shifted else 0.0])
        return float((sums - (target * calibrated).sum(axis=1)).mean()), slopes

    bounds = [SCALES, SHIFTS if shifted else (0.0, 0.0)]
    scale, shift = minimize(loss, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=bounds).x.tolist()
    return Calibration(scale, shift)


def _logits(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a logit for each label [rows, labels]; the first of two labels has 0."""
    return np.hstack((np.zeros_like(outputs), outputs)) if outputs.shape[1] == 1 else outputs


def _log_sums(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of the sum of the exponentials of each row, [rows]."""
    most = logits.max(axis=1)
    return most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
