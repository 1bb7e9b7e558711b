"""Folds of a table for cross-validation. Needs numpy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDS = 5
FEW_ROWS = 2000  # rows below which folds tell more than validation rows do
LEAST_ROWS = 20
MOST_REPEATS = 5


class Fold(NamedTuple):
    """Rows that are held out, and those that a model is fitted to, as indices; `repeat` counts from 0."""

    repeat: int
    held: NDArray[np.int64]
    fitted: NDArray[np.int64]


def repeats_for(rows: int) -> int:
    """Return how often a table of this many rows is divided: 0 if its validation rows are enough, or it has too few."""
    if not LEAST_ROWS <= rows < FEW_ROWS:
        return 0
    return max(1, min(FEW_ROWS // (2 * rows), MOST_REPEATS))


def folds_of(target: NDArray[np.float32], repeats: int, seed: int) -> list[Fold]:
    """Return the folds for encoded targets [rows], each repeat dividing all rows.

    The targets of a fold are like those of the others: rows are dealt out in the order of their targets."""
    rows = len(target)
    folds = []
    for repeat in range(repeats):
        shuffled = np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, repeat]).permutation(rows)
        order = shuffled[np.argsort(target[shuffled], kind="stable")]
        number = np.empty(rows, np.int64)
        number[order] = np.arange(rows) % FOLDS
        folds += [Fold(repeat, np.flatnonzero(number == fold), np.flatnonzero(number != fold)) for fold in range(FOLDS)]
    return folds
