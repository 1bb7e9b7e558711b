"""Weights of an average of several models' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.calibration import log_losses
from pg_tensile.execution.data.dataset import Table, head
from pg_tensile.execution.data.preprocessing import Task

HALVES, WEIGHING_ROWS = 20, 1 << 14  # random halves of rows that weights are found for, and most rows
LEAST_WEIGHT = 0.02  # of a member of an average
MOST_WEIGHT = 4.0  # of logits, before the weights are divided by their sum
TOTAL = 1e4  # weight of the equation that the weights are 1 in total


def weights_of(outputs: Sequence[NDArray[Any]], table: Table, task: Task) -> tuple[float, ...]:
    """Return the weights of an average of several models' outputs [rows, outputs], whose sum is 1.

    They are those with the least loss on the table's rows, all equal if there are none: means over random halves of the
    rows, so that a few of these do not decide alone. Of a classifier, whose probabilities are calibrated afterwards,
    the scale of the average does not count."""
    count = len(outputs)
    if not table.rows or count == 1:
        return (1.0 / count,) * count
    table = head(table, WEIGHING_ROWS)
    stacked = np.stack([array[: table.rows].astype(np.float64) for array in outputs])  # [models, rows, outputs]
    rows = np.ones(table.rows) if table.weight is None else table.weight.astype(np.float64)
    random, found = np.random.default_rng(0), np.zeros(count)
    for _ in range(HALVES):
        half = random.permutation(table.rows)[: (table.rows + 1) // 2]
        if task == Task.REGRESSION:
            weights = _least_squares(stacked[:, half, 0] - table.target[half], rows[half])
        else:
            weights = _least_log_loss(stacked[:, half], table.target[half].astype(np.int64), rows[half])
        found += weights / (weights.sum() or 1.0)
    found /= found.sum() or 1.0
    found[found < LEAST_WEIGHT] = 0.0
    found = np.round(found / found.sum(), 4) if found.any() else np.full(count, 1.0 / count)
    return tuple(found.tolist())


def _least_squares(errors: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights, at least 0 and 1 in total, with the least mean square of weighted errors [models, rows]."""
    from scipy.optimize import nnls

    products = (errors * rows) @ errors.T / max(float(rows.sum()), 1e-300)
    values, vectors = np.linalg.eigh(products)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T  # its squares are the products
    total = TOTAL * max(float(root.max()), np.finfo(np.float64).tiny)
    solution, _ = nnls(np.vstack((root, np.full(len(errors), total))), np.append(np.zeros(len(errors)), total))
    weights: NDArray[np.float64] = solution
    return weights


def _least_log_loss(
    outputs: NDArray[np.float64], labels: NDArray[np.int64], rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weights, at least 0, with the least log loss of weighted logits [models, rows, outputs]."""
    from scipy.optimize import minimize

    def loss(weights: NDArray[np.float64]) -> float:
        return float(log_losses(np.tensordot(weights, outputs, axes=1), labels) @ rows) / max(float(rows.sum()), 1e-300)

    count = len(outputs)
    start = np.full(count, 1.0 / count)
    weights: NDArray[np.float64] = minimize(loss, start, method="L-BFGS-B", bounds=[(0.0, MOST_WEIGHT)] * count).x
    return weights
