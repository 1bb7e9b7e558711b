"""Answers to what a model's outputs mean: predictions, probabilities and labels.

The only way from outputs to answers, for the predictor, the metrics and evaluations. Outputs are float64 [rows,
outputs]: the standardised target of a regression, the logit of `labels[1]` of two labels, else one logit for each
label. Needs numpy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.preprocessing import Preprocessing, Task

FEW_ROWS = 16  # each of which is answered as if it was alone, by a model that can do without PyTorch


class Answers(NamedTuple):
    """Answers to rows, as in a PREDICTION frame; docs/internals.md, "Features (PREDICT)".

    `prediction` is in the target's unit for a regression, else the probability of `labels[1]` of two labels or the
    label's number; `probability` is that of the label. NaN and a label of −1 stand for what the task lacks."""

    prediction: NDArray[np.float64]  # [rows]
    probability: NDArray[np.float64]  # [rows]
    label: NDArray[np.int32]  # [rows]


def answers(outputs: NDArray[np.float64], preprocessing: Preprocessing) -> Answers:
    """Return the answers for outputs [rows, outputs]."""
    rows = len(outputs)
    if preprocessing.task == Task.REGRESSION:
        return Answers(predictions(outputs, preprocessing), np.full(rows, np.nan), np.full(rows, -1, np.int32))
    outputs = _calibrated(outputs, preprocessing)
    if preprocessing.task == Task.BINARY:
        positive = sigmoid(outputs[:, 0])
        label = positive > 0.5
        return Answers(positive, np.where(label, positive, 1.0 - positive), label.astype(np.int32))
    odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    label = outputs.argmax(axis=1)
    numbers = preprocessing.label_numbers
    prediction = numbers[label] if numbers is not None else np.full(rows, np.nan)
    return Answers(prediction, odds.max(axis=1) / odds.sum(axis=1), label.astype(np.int32))


def predictions(outputs: NDArray[np.float64], preprocessing: Preprocessing) -> NDArray[np.float64]:
    """Return a regression's predictions [rows] in the target's unit for outputs [rows, outputs]."""
    return _answered(outputs[:, 0], preprocessing)


def _answered(encoded: NDArray[np.float64], preprocessing: Preprocessing) -> NDArray[np.float64]:
    """Return encoded predictions and bounds in the target's unit."""
    target = preprocessing.target
    return target.answered(encoded * target.std + target.mean)


def target_values(encoded: NDArray[np.float64], preprocessing: Preprocessing) -> NDArray[np.float64]:
    """Return targets of a regression in their unit for encoded ones."""
    target = preprocessing.target
    return target.original(encoded * target.std + target.mean)


def interval(
    outputs: NDArray[np.float64], preprocessing: Preprocessing, coverage: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and upper bounds [rows], in the target's unit, between which targets lie with this probability.

    Raises DataError if the model is not a regression, or its validation rows are too few for the coverage."""
    if preprocessing.task != Task.REGRESSION:
        hint = "Use predict_probabilities."
        raise DataError("the model predicts labels, which have no interval", hint=hint)
    if preprocessing.conformal is None:
        hint = "Train it again with validation above 0."
        raise DataError("the model was trained without validation rows, from which intervals are derived", hint=hint)
    radius = preprocessing.conformal.radius(coverage)
    lower, upper = spread(outputs)
    encoded = outputs[:, 0]  # lies outside if the bounds are narrower than the learned quantiles, which may cross
    lower, upper = np.minimum(lower - radius, encoded), np.maximum(upper + radius, encoded)
    return _answered(lower, preprocessing), _answered(upper, preprocessing)


def spread(outputs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds [rows] that a regression's outputs [rows, outputs] state: its quantiles, else its prediction.

    They are encoded like the target. Conformity scores tell how much farther out, or in, the bounds have to be."""
    stated = outputs[:, 1:] if outputs.shape[1] > 1 else outputs
    return stated.min(axis=1), stated.max(axis=1)


def probabilities(outputs: NDArray[np.float64], preprocessing: Preprocessing) -> NDArray[np.float64]:
    """Return a classifier's probabilities [rows, labels] for outputs [rows, outputs]."""
    outputs = _calibrated(outputs, preprocessing)
    if preprocessing.task == Task.BINARY:
        positive = sigmoid(outputs[:, 0])
        return np.stack((1.0 - positive, positive), axis=1)
    odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def _calibrated(outputs: NDArray[np.float64], preprocessing: Preprocessing) -> NDArray[np.float64]:
    calibration = preprocessing.calibration
    return outputs if calibration is None else calibration.apply(outputs)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + e^−x), with x clipped to ±700 against overflow: beyond, it is 0 or 1 to within 1e-304."""
    return 1.0 / (1.0 + np.exp(np.minimum(np.maximum(-x, -700.0), 700.0)))
