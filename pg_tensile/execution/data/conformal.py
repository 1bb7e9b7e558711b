"""Prediction intervals from the errors on validation rows (split conformal prediction).

The score of a row is the absolute difference between its encoded target and the model's output, so intervals are
symmetric in the space in which the target was learned, and not where a transform of the target is undone. Of a model
that has learned quantiles it is how far the target lies outside of them (below 0: inside), and intervals are as wide as
the quantiles and the scores make them (conformalised quantile regression). Among n
validation rows and a further row like them, every rank of the further row's score is equally likely: a score of rank
⌈(n + 1) · coverage⌉ is thus not exceeded with at least that probability. Needs numpy only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.stored_numbers import with_floats

MOST_SCORES = 2001
ROUNDING = 1e-9  # of (n + 1) · coverage, which is meant in decimal


class Conformal(NamedTuple):
    """Sorted scores of `rows` validation rows: all, or those of the ranks ⌈i · rows / scores⌉ for i = 1, 2, …"""

    rows: int
    scores: tuple[float, ...]

    @staticmethod
    def of(scores: NDArray[np.float64]) -> Conformal | None:
        """Return the sorted scores [rows], at most MOST_SCORES of them; None for no rows."""
        rows = len(scores)
        if rows == 0 or not np.isfinite(scores).all():
            return None
        count = min(rows, MOST_SCORES)
        ranks = [-(-number * rows // count) for number in range(1, count + 1)]
        return Conformal(rows, tuple(np.sort(scores)[np.array(ranks) - 1].tolist()))

    def radius(self, coverage: float) -> float:
        """Return the score that a further row exceeds with a probability of at most 1 − `coverage`.

        Raises DataError if there are too few rows for that coverage."""
        rank = math.ceil((self.rows + 1) * coverage - ROUNDING)
        if rank > self.rows:
            least = math.ceil(coverage / (1.0 - coverage) - ROUNDING)
            most = math.floor(1e4 * self.rows / (self.rows + 1)) / 1e4
            rows = "1 validation row" if self.rows == 1 else f"{self.rows} validation rows"
            raise DataError(
                f"a coverage of {coverage:g} needs at least {least} validation rows, but the model had {rows}",
                hint=f"Use a coverage of at most {most:g}, or train with more validation rows.",
            )
        return self.scores[(max(rank, 1) - 1) * len(self.scores) // self.rows]

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "scores": list(self.scores)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Conformal:
        return Conformal(**with_floats(Conformal, value))
