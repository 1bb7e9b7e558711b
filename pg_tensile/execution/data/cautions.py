"""Warnings about a job's data before it is trained: what makes its validation misleading or its features useless.

Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.leaks import DISTINCT, LEAST_ROWS, Sample, identifiers, leaking_features, sample_rows
from pg_tensile.execution.data.preprocessing import Feature, Kind, Task
from pg_tensile.execution.data.splits import Rows, Split

MOST_NAMES = 10  # in one warning
FEW_NUMBERS = 20  # of a target that may be classes
LEAST_REPEATED = 5  # rows of each of them, on average


def cautions(rows: Rows, fitted: FittedPreprocessing, split: Split, task: str | None = None) -> list[str]:
    """Return warnings, one sentence each. Reads the first rows again. `task`: the job's option, None if it is open."""
    sample = sample_rows(rows, fitted)
    features = fitted.preprocessing.features
    warnings = _about_split(fitted, split) + _about_target(sample, fitted, task)
    constant = [feature.name for feature in features if _is_constant(feature, fitted.training_rows)]
    if constant:
        warnings.append(f"{_columns(constant)} constant in the training rows, so nothing can be learned from it")
    unknown = [name for name in identifiers(sample, fitted) if name not in constant]
    if unknown:
        reason = "as an identifier has; leave it out, because nothing learned from it applies to other rows"
        warnings.append(f"{_columns(unknown)} different in nearly every row, {reason}")
    texts = [feature.name for feature in features if feature.vectors is not None]
    if texts:
        better = (
            "where the server has a pretrained model, the architecture pretrained reads it better (docs/pretrained.md)"
        )
        warnings.append(f"{_columns(texts)} read as text, by TF-IDF of words and characters; {better}")
    leaking = leaking_features(sample, fitted)
    if leaking:
        reason = "check that it is known before the target is, otherwise leave it out"
        warnings.append(f"{_columns(leaking)} enough to predict the target nearly without error; {reason}")
    return warnings


def _about_split(fitted: FittedPreprocessing, split: Split) -> list[str]:
    division, validation_rows = fitted.division, fitted.validation_rows
    if split.fraction > 0 and validation_rows == 0:
        return ["no row fell into the validation part, so there are no validation metrics"]
    times = [feature.name for feature in fitted.preprocessing.features if feature.kind == Kind.TIMESTAMP]
    if division.by == "random" and validation_rows and times:
        return [
            f'the split is random, but "{times[0]}" is a time: rows from the same time are on both sides, so the'
            f" validation metrics may be better than those on future rows; split_by => '{times[0]}' validates with the"
            " newest rows"
        ]
    if division.column is None or not validation_rows:
        return []
    rows = fitted.training_rows + validation_rows
    if split.fraction * rows / 2 <= validation_rows <= 2 * split.fraction * rows:
        return []
    what = "time" if division.by == "time" else "group"
    return [
        f"{validation_rows / rows:.0%} of the rows are for validation instead of {split.fraction:.0%}, because rows"
        f' with the same {what} "{division.column}" stay together'
    ]


def _about_target(sample: Sample, fitted: FittedPreprocessing, task: str | None) -> list[str]:
    column = fitted.columns[fitted.roles.target]
    values = sample.chunk.columns[fitted.roles.target].data
    distinct = np.unique(values)
    if fitted.preprocessing.task == Task.REGRESSION:
        few = len(distinct) <= FEW_NUMBERS and len(values) >= LEAST_REPEATED * len(distinct)
        if task is None and few and (distinct == np.rint(distinct)).all():
            return [
                f'the target "{column.name}" has only {len(distinct)} different numbers, all integers, and is predicted'
                ' as a quantity: if they are classes, train with options => {"task": "classification"}'
            ]
        if fitted.suits_log:
            return [
                f'the target "{column.name}" is never negative and skewed: options => {{"target_transform": "log"}}'
                " learns it on a logarithmic scale, where errors count relative to it and intervals grow with it"
            ]
    elif len(values) >= LEAST_ROWS and len(distinct) >= DISTINCT * len(values):
        return [f'the target "{column.name}" is different in nearly every row, so there are no classes to learn']
    return []


def _is_constant(feature: Feature, training_rows: int) -> bool:
    """Return whether the feature has the same value in all training rows, or none."""
    if feature.nulls == training_rows:
        return True
    if feature.kind == Kind.CATEGORY:
        return feature.nulls == 0 and len(feature.categories or ()) == 1 and not feature.buckets
    return feature.nulls == 0 and feature.std == 0 and feature.tokens is None


def _columns(names: Sequence[str]) -> str:
    """Return the names with the verb: 'column "a" is' or 'columns "a", "b" are each'."""
    shown = ", ".join(f'"{name}"' for name in names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        shown += f" and {len(names) - MOST_NAMES} more"
    return f"column {shown} is" if len(names) == 1 else f"columns {shown} are each"
