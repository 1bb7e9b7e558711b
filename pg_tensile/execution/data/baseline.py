"""Baseline of a model: the answer without features, from the targets of the training rows, that it has to beat.

regression      the mean, and for absolute errors the median; or, where rows are divided by time, the last value before
                those for validation, if it has the smaller squared error on them
classification  the frequencies of the labels as probabilities, so that the most frequent label is predicted

baseline_metrics.py fits and measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pg_tensile.execution.data.stored_numbers import with_floats

MEAN, MEDIAN, LAST, FREQUENCIES = "mean", "median", "last", "frequencies"
ABSOLUTE = ("mae", "mape", "median_absolute_error")  # metrics of which the median is the best constant


@dataclass(frozen=True)
class Baseline:
    """Answers in the target's unit, or frequencies [labels]; those of other kinds are None."""

    mean: float | None = None
    median: float | None = None
    last: float | None = None
    frequencies: tuple[float, ...] | None = None

    @property
    def kind(self) -> str:
        """One of MEAN, LAST and FREQUENCIES; MEAN includes the median."""
        if self.frequencies is not None:
            return FREQUENCIES
        return MEAN if self.last is None else LAST

    def answer(self, metric: str) -> str:
        """Return the name of the answer with which a metric is compared."""
        return MEDIAN if self.kind == MEAN and metric in ABSOLUTE else self.kind

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Baseline:
        return Baseline(**with_floats(Baseline, value))
