"""Calibration of a classifier's probabilities, scores of a regression's intervals, and the histogram of predictions,
all derived from the validation rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pg_tensile.execution.data import calibration
from pg_tensile.execution.data.answers import answers, spread
from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.drift import Reference, with_predictions
from pg_tensile.execution.data.preprocessing import Preprocessing, Task


class Derived(NamedTuple):
    """A preprocessing with calibration or scores, and what is noted about that in the version's `training`."""

    preprocessing: Preprocessing
    notes: dict[str, Any]


def derive(
    preprocessing: Preprocessing,
    validation: Mapping[str, Tensor],
    calibrate: bool,
    times: NDArray[np.int64] | None = None,
) -> Derived:
    """Return the preprocessing of a trained model; `validation` are a ValidationSample's tensors.

    `calibrate`: whether a classifier is calibrated. `times`: those of the validation rows, at least of as many as the
    sample has, where they are the newest ones (`Dataset.validation_times`)."""
    if not validation:
        return Derived(preprocessing, {})
    outputs = validation["outputs"].double().numpy()
    target = validation["target"].numpy()
    if preprocessing.task == Task.REGRESSION:
        lower, upper = spread(outputs)
        scores = np.maximum(lower - target, target - upper)
        sampled = None if times is None else times[: len(scores)]
        return Derived(replace(preprocessing, conformal=Conformal.of(scores, sampled)), {})
    weight = validation["weight"].numpy() if "weight" in validation else None
    fit = calibration.fit(outputs, target, weight) if calibrate else None
    if fit is None:
        return Derived(preprocessing, {})
    kept = fit.calibration if fit.kept else None
    return Derived(replace(preprocessing, calibration=kept), {"calibration": fit.to_json()})


def with_validation(reference: Reference, preprocessing: Preprocessing, validation: Mapping[str, Tensor]) -> Reference:
    """Return the reference with the predictions for the validation rows, if there are any; arguments as in `derive`."""
    if not validation:
        return reference
    return with_predictions(reference, preprocessing, answers(validation["outputs"].double().numpy(), preprocessing))
