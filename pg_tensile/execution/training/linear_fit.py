"""Fitting of linear models with scikit-learn, which is imported when it is used.

Regressions are ridge regressions, classifications logistic ones. The penalty is the one of a few with the least loss:
on the validation rows or, where the training rows are few, over folds of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pg_tensile.execution.data.calibration import log_losses
from pg_tensile.execution.data.dataset import Table, head, taken
from pg_tensile.execution.data.folds import FEW_ROWS, FOLDS
from pg_tensile.execution.data.preprocessing import ModelInputs, Preprocessing, Task
from pg_tensile.execution.models.linear import Linear

PENALTIES = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
MOST_ROWS = 1 << 17  # a linear model does not get better with more; the first are a random sample, in hash order
MOST_VALIDATED = 1 << 15

Fit = Callable[[float, Table], "_Lines"]


class _Lines:
    """Fitted weights: outputs are rows @ weights + intercepts."""

    def __init__(self, weights: NDArray[np.float64], intercepts: NDArray[np.float64]) -> None:
        self.weights = weights  # [columns, outputs]
        self.intercepts = intercepts

    def __call__(self, rows: Any) -> NDArray[np.float64]:
        outputs: NDArray[np.float64] = rows @ self.weights + self.intercepts
        return outputs


def fit_linear(
    preprocessing: Preprocessing,
    training: Table,
    validation: Table | None,
    observe: Callable[[int, int], Any],
    penalty: float | None = None,
) -> tuple[Linear, float]:
    """Return the model for the rows of `training`, and its penalty: the one given, or the best.

    `observe` is called with the number of fits done, and of all; it may raise an exception to end it."""
    training = head(training, MOST_ROWS)
    rows = _rows(training, preprocessing.model_inputs)
    splits = [] if penalty is not None else list(_splits(training, validation, rows, preprocessing.model_inputs))
    total, done = len(PENALTIES) * len(splits) + 1, 0
    losses = np.zeros(len(PENALTIES))
    for fitted_rows, fitted, held_rows, held in splits:
        for number, tried in enumerate(PENALTIES):
            lines = _fit(preprocessing.task, preprocessing.outputs, tried, fitted_rows, fitted)
            losses[number] += _loss(preprocessing.task, lines(held_rows), held)
            observe(done := done + 1, total)
    if penalty is None:
        penalty = PENALTIES[int(np.argmin(losses))] if splits else 1.0
    lines = _fit(preprocessing.task, preprocessing.outputs, penalty, rows, training)
    observe(total, total)
    return _model(preprocessing, lines, rows, training), penalty


def _splits(training: Table, validation: Table | None, rows: Any, inputs: ModelInputs) -> Any:
    if training.rows >= FEW_ROWS and validation is not None and validation.rows:
        held = head(validation, MOST_VALIDATED)
        yield rows, training, _rows(held, inputs), held
        return
    folds = np.array_split(np.arange(training.rows), min(FOLDS, training.rows))
    for fold in folds if len(folds) > 1 else ():
        others = np.setdiff1d(np.arange(training.rows), fold)
        yield rows[others], taken(training, others), rows[fold], taken(training, fold)


def _fit(task: Task, outputs: int, penalty: float, rows: Any, table: Table) -> _Lines:
    from sklearn.linear_model import LogisticRegression, Ridge

    weight = table.weight
    if task == Task.REGRESSION:
        ridge = Ridge(alpha=penalty, solver="lsqr" if rows.shape[1] > 500 else "auto").fit(rows, table.target, weight)
        return _Lines(ridge.coef_.reshape(-1, 1), np.array([float(ridge.intercept_)]))
    labels = np.unique(table.target.astype(np.int64))
    width = 2 if task == Task.BINARY else outputs
    if len(labels) < 2:  # of a fold
        weights, intercepts = np.zeros((rows.shape[1], len(labels))), np.zeros(len(labels))
    else:
        model = LogisticRegression(C=1.0 / penalty, max_iter=300, tol=1e-4)
        model.fit(rows, table.target.astype(np.int64), weight)
        weights, intercepts = model.coef_.T, model.intercept_
        if len(labels) == 2:
            weights = np.hstack((np.zeros_like(weights), weights))
            intercepts = np.array([0.0, float(intercepts[0])])
    all_weights, all_intercepts = np.zeros((rows.shape[1], width)), np.full(width, _ABSENT)
    all_weights[:, labels], all_intercepts[labels] = weights, intercepts
    if task == Task.BINARY:
        return _Lines(np.diff(all_weights, axis=1), np.diff(all_intercepts))
    return _Lines(all_weights, all_intercepts)


_ABSENT = -10.0  # intercept of a label that no row has


def _loss(task: Task, outputs: NDArray[np.float64], table: Table) -> float:
    weights = np.ones(table.rows) if table.weight is None else table.weight
    if task == Task.REGRESSION:
        losses = (outputs[:, 0] - table.target) ** 2
    else:
        losses = log_losses(outputs, table.target.astype(np.int64))
    return float(losses @ weights)


def _model(preprocessing: Preprocessing, lines: _Lines, rows: Any, table: Table) -> Linear:
    """Return the model; the quantiles of a regression have a constant distance from its prediction."""
    inputs = preprocessing.model_inputs
    weights, intercepts = lines.weights, lines.intercepts
    if preprocessing.quantiles:
        errors = table.target - lines(rows)[:, 0]
        shifts = np.array([0.0, *np.quantile(errors, preprocessing.quantiles)])
        weights, intercepts = np.repeat(weights, len(shifts), axis=1), intercepts + shifts
    model = Linear(inputs, preprocessing.outputs)
    numbers = model.numbers.in_features
    with torch.no_grad():
        model.numbers.weight.copy_(torch.from_numpy(weights[:numbers].T.copy()))
        model.numbers.bias.copy_(torch.from_numpy(intercepts))
        if model.categories is not None:
            model.categories.weight.copy_(torch.from_numpy(weights[numbers:].copy()))
    return model


def _rows(table: Table, inputs: ModelInputs) -> Any:
    """Return the features as a matrix [rows, columns]: numbers, elements of arrays, and a column for each code."""
    from scipy import sparse

    features = table.features
    numbers = np.concatenate([features.numeric, *features.arrays], axis=1, dtype=np.float64)
    if not inputs.cardinalities:
        return numbers
    starts = np.cumsum([0, *inputs.cardinalities])
    columns = (features.categories + starts[:-1]).ravel()
    places = np.arange(0, table.rows * len(inputs.cardinalities) + 1, len(inputs.cardinalities))
    codes = sparse.csr_matrix((np.ones(len(columns)), columns, places), (table.rows, int(starts[-1])))
    if starts[-1] <= 500:
        return np.hstack((numbers, codes.toarray()))
    return sparse.hstack((sparse.csr_matrix(numbers), codes), format="csr")
