"""Models that a library fits, trees and lines, and metrics of versions that consist of them.

A fitted model has not seen the validation rows, from which its metrics are; `refit` returns one for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.calibration import least_log_loss
from pg_tensile.execution.data.dataset import Dataset, Table, head, taken, together
from pg_tensile.execution.data.folds import Fold
from pg_tensile.execution.data.metrics import Metrics, MetricSums
from pg_tensile.execution.data.preprocessing import Preprocessing, Task
from pg_tensile.execution.models.boosted import Boosted, BoostedArchitecture
from pg_tensile.execution.models.linear import LinearArchitecture
from pg_tensile.execution.models.trees import MOST_LEAVES
from pg_tensile.execution.models.whole import WholeModel
from pg_tensile.execution.training import boosting, linear_fit
from pg_tensile.execution.training.graphs import step_spec
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.validation_sample import ValidationSample

MEASURED_ROWS = 1 << 17  # of the training rows, for metrics
BINS = 255  # of a column, LightGBM's default


class Step(NamedTuple):
    """Steps of fitting done, of at most `steps`, and the loss of the validation rows after the last one, if known."""

    done: int
    steps: int
    loss: float | None = None


Observe = Callable[[Step], bool]  # returns whether to end now, with what there is


class Fitted(NamedTuple):
    """A fitted model, its steps, those kept and those done, and notes; `found` are the settings for another fit."""

    notes: dict[str, Any]
    model: nn.Module
    kept: int
    done: int
    found: Any


class Fitting(NamedTuple):
    """What models are fitted to, and how; `observe` may also raise an exception to end it."""

    preprocessing: Preprocessing
    dataset: Dataset
    settings: Settings
    threads: int
    observe: Observe
    learning_rate: float | None = None  # of trees; None: theirs
    is_quick: bool = False  # whether trees are for a first look

    def fit(self, architecture: BoostedArchitecture | LinearArchitecture) -> Fitted:
        """Return the model of the training rows."""
        return self._fit(architecture, self.dataset.training, self.dataset.validation, None)

    def refit(self, architecture: BoostedArchitecture | LinearArchitecture, fitted: Fitted) -> nn.Module:
        """Return the model of all rows."""
        return self._fit(architecture, together(self.dataset.training, self.dataset.validation), None, fitted).model

    def cross_validate(
        self, architecture: BoostedArchitecture | LinearArchitecture, fitted: Fitted, folds: Sequence[Fold]
    ) -> NDArray[np.float32]:
        """Return outputs [repeats, rows, outputs] for all rows, each by a model that has not seen the row's fold."""
        table = together(self.dataset.training, self.dataset.validation)
        found = np.empty((1 + folds[-1].repeat, table.rows, self.preprocessing.outputs), np.float32)
        for repeat, held, others in folds:
            model = self._fit(architecture, taken(table, others), None, fitted).model
            found[repeat, held] = outputs_of(model, taken(table, held), self.preprocessing)
        return found

    def _fit(self, architecture: Any, training: Table, validation: Table | None, fitted: Fitted | None) -> Fitted:
        found = None if fitted is None else fitted.found
        if isinstance(architecture, LinearArchitecture):
            penalty = architecture.penalty if found is None else found
            line, penalty = linear_fit.fit_linear(
                self.preprocessing, training, validation, lambda done, of: self.observe(Step(done, of)), penalty
            )
            return Fitted({"type": "linear", "penalty": penalty}, line, 1, 1, penalty)
        grown = boosting.grow(
            boosting.Boosting(architecture, self.threads, self.settings.seed, self.learning_rate, self.is_quick),
            self.preprocessing,
            training,
            validation,
            lambda state: self.observe(Step(*state)),
            found,
        )
        model = Boosted(self.preprocessing.model_inputs, self.preprocessing.outputs, grown.forest)
        notes = {"type": "boosted", "rounds": list(grown.rounds)}
        return Fitted(notes, model, max(grown.rounds), grown.done, grown.rounds)


def outputs_of(model: nn.Module, table: Table, preprocessing: Preprocessing) -> NDArray[np.float32]:
    """Return the model's outputs [rows, outputs]."""
    with torch.inference_mode():
        outputs: NDArray[np.float32] = WholeModel(preprocessing, model)(table.features, table.rows)
    return outputs


def measured(outputs: NDArray[np.float32], table: Table, preprocessing: Preprocessing, settings: Settings) -> Metrics:
    """Return the metrics of outputs [rows, outputs] for a table's rows."""
    sums = MetricSums(preprocessing, ranks=True)
    sums.add(outputs, table.target, table.weight)
    tensors = [torch.from_numpy(array) for array in (outputs, table.target, table.weight) if array is not None]
    metrics = sums.result(table.rows, float(step_spec(settings, preprocessing.task).loss(*tensors)))
    if not settings.calibrate or preprocessing.task == Task.REGRESSION:
        return metrics
    least = least_log_loss(outputs.astype(np.float64), table.target, table.weight)
    return Metrics(**(metrics.to_json() | {"calibrated_log_loss": least}))


def metrics_of(
    model: nn.Module,
    outputs: NDArray[np.float32],
    training: Table,
    validation: Table,
    preprocessing: Preprocessing,
    settings: Settings,
    epoch: int,
) -> dict[str, Any]:
    """Return the metrics of a version, as JSON: its model's on training rows, those of `outputs` on validation rows."""
    training = head(training, MEASURED_ROWS)
    of_training = measured(outputs_of(model, training, preprocessing), training, preprocessing, settings)
    held = measured(outputs, validation, preprocessing, settings).to_json() if validation.rows else None
    return {"epoch": epoch, "training": of_training.to_json(), "validation": held}


def fitting_bytes(dataset: Dataset, preprocessing: Preprocessing) -> int:
    """Return the memory that fitting takes beside the rows: copies and bins of them, and histograms."""
    inputs = preprocessing.model_inputs
    rows = dataset.training.rows + dataset.validation.rows
    columns = inputs.numeric + len(inputs.cardinalities) + sum(array.length for array in inputs.arrays)
    return rows * columns * 5 + MOST_LEAVES * columns * BINS * 16 * preprocessing.outputs


def cross_validated(
    outputs: NDArray[np.float32], table: Table, folds: Sequence[Fold], preprocessing: Preprocessing, settings: Settings
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the metrics, as JSON, of outputs [repeats, rows, outputs], and the standard deviation of each over folds.

    The metrics are means over the repeats, each of which has outputs for all rows of the table."""
    of_repeats = [measured(repeat, table, preprocessing, settings).to_json() for repeat in outputs]
    uncalibrated = replace(settings, calibrate=False)
    of_folds = [
        measured(outputs[repeat, held], taken(table, held), preprocessing, uncalibrated).to_json()
        for repeat, held, _ in folds
    ]
    means = {name: _over(np.mean, [found[name] for found in of_repeats]) for name in of_repeats[0]}
    spreads = {name: _over(np.std, [found[name] for found in of_folds]) for name in of_folds[0] if name != "samples"}
    spread = {name: value for name, value in spreads.items() if value is not None}
    return means | {"samples": table.rows}, spread


def _over(function: Callable[[Any], Any], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(function(known)) if known else None


def sample_of(outputs: NDArray[np.float32], table: Table) -> Mapping[str, Tensor]:
    """Return the sample of validation rows from which calibration and intervals are derived."""
    sample = ValidationSample()
    if table.rows:
        weight = None if table.weight is None else torch.from_numpy(table.weight)
        sample.add(torch.from_numpy(outputs), torch.from_numpy(table.target), weight)
    return sample.tensors()
