"""Weights of rows in loss and metrics: a column of the query, the balance of the labels, or their product.

Weights have a mean of 1 over the training rows, so they need no other learning rate. Balanced labels have the weights
of scikit-learn's `compute_class_weight`: rows / (labels * rows of the label), in which rows count by their weights if
there is a column of weights. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import Chunk
from pg_tensile.execution.data.roles import Roles
from pg_tensile.execution.data.splits import Division, Rows

LARGEST = 1e30  # of a weight, so that it is finite in float32
LEAST_MEAN = 1e-30  # of the validation rows' weights, so that they are more than 0 in float32


class Weighting(NamedTuple):
    """Requested weights: name of the column (None means 1 for every row), and whether labels are balanced."""

    column: str | None = None
    balanced: bool = False

    @staticmethod
    def of(options: dict[str, Any]) -> Weighting:
        """Return the weighting of a job's options."""
        return Weighting(options.get("weight"), options.get("class_weight") == "balanced")


@dataclass(frozen=True)
class Weights:
    """Fitted weights: index of the column or None, factor of each label or None, and the factor for a mean of 1."""

    column: int | None
    labels: NDArray[np.float64] | None
    factor: float

    def of(self, block: Chunk, target: NDArray[Any]) -> NDArray[np.float32]:
        """Return the weights [rows] of a block without unknown targets; `target` is the encoded one."""
        weights = np.full(block.rows, self.factor)
        if self.column is not None:
            weights *= block.columns[self.column].data
        if self.labels is not None:
            weights *= self.labels[target.astype(np.int64)]
        return np.minimum(weights, LARGEST).astype(np.float32)


def fit_weights(
    rows: Rows,
    roles: Roles,
    division: Division,
    weighting: Weighting,
    labels: int,
    encode_target: Callable[[Chunk], NDArray[Any]],
) -> Weights | None:
    """Return the weights of the rows, in one pass over them; None if none are requested.

    `labels` is their number, 0 for a regression; `encode_target` returns the label of each row of a block without
    unknown targets. Raises DataError for weights that are null, negative or not finite, if all weights of a part are 0,
    and for balanced labels of a regression."""
    column = roles.weight
    if weighting.balanced and not labels:
        hint = "Leave class_weight out, or set the option task to classification."
        raise DataError("class_weight balances the labels of a classification, but this is a regression", hint=hint)
    if column is None and not weighting.balanced:
        return None
    sums, counts = np.zeros((2, max(labels, 1))), [0, 0]  # of the training and of the validation rows
    wrong = {"null": 0, "negative": 0, "infinite or not a number": 0}
    for block in rows.blocks():
        block = roles.with_target(block)
        weights = np.ones(block.rows)
        if column is not None:
            values = block.columns[column]
            weights = values.data.astype(np.float64)
            weights[values.nulls] = 0.0
            wrong["null"] += int(values.nulls.sum())
            wrong["negative"] += int((weights < 0).sum())
            wrong["infinite or not a number"] += int((~np.isfinite(weights) & ~(weights < 0)).sum())
        label = encode_target(block).astype(np.int64) if labels else np.zeros(block.rows, np.int64)
        validation = division.validation_rows(block)
        for side, chosen in enumerate((~validation, validation)):
            sums[side] += np.bincount(label[chosen], weights[chosen], sums.shape[1])
            counts[side] += int(chosen.sum())
    _check(weighting.column, wrong, sums, counts)
    total = sums[0].sum()
    balance = None
    if weighting.balanced:
        present = sums[0] > 0
        balance = np.where(present, total / (present.sum() * np.where(present, sums[0], 1.0)), 1.0)
    return Weights(column, balance, counts[0] / total)


def _check(name: str | None, wrong: dict[str, int], sums: NDArray[np.float64], counts: list[int]) -> None:
    reasons = [f"{kind} in {count} rows" for kind, count in wrong.items() if count]
    if reasons:
        hint = "Use numbers that are 0 or larger; coalesce replaces nulls, greatest negative numbers."
        raise DataError(f'the weight column "{name}" is {", ".join(reasons)}', hint=hint)
    for part, weights, count in zip(("training", "validation"), sums, counts, strict=True):
        if count and weights.sum() == 0:
            hint = "A row with the weight 0 does not count; give some rows a larger weight."
            raise DataError(f'the weight column "{name}" is 0 in all {part} rows', hint=hint)
    if not np.isfinite(sums.sum()):
        raise DataError(f'the weights in column "{name}" are too large to be summed up', hint="Divide them.")
    if counts[1] and sums[1].sum() / counts[1] < LEAST_MEAN * sums[0].sum() / counts[0]:
        hint = f'Limit the largest ones, as with least("{name}", 1000).'
        message = (
            f'the weights in column "{name}" are so uneven that the validation rows do not count beside the others'
        )
        raise DataError(message, hint=hint)
