"""Prediction intervals from the errors on validation rows (split conformal prediction).

The score of a row is the absolute difference between its encoded target and the model's output, so intervals are
symmetric in the space in which the target was learned, and not where a transform of the target is undone. Of a model
that has learned quantiles it is how far the target lies outside of them (below 0: inside), and intervals are as wide as
the quantiles and the scores make them (conformalised quantile regression). Among n
validation rows and a further row like them, every rank of the further row's score is equally likely: a score of rank
⌈(n + 1) · coverage⌉ is thus not exceeded with at least that probability.

Rows to come are not like the validation rows where these come one after the other in time: errors grow with the
distance from the training rows. There the newest rows tell more. Weights that halve every so many rows give a second
set of scores (nonexchangeable conformal prediction, Barber et al. 2023, whose weights are powers of 0.99), and of the
two scores of a rank the larger one counts: the newest rows can widen intervals, never narrow them. Needs numpy only.
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
HALF_LIFE = 69  # rows, after which the weight of an older row is half as large: 0.99 ** 69
HALF_LIFE_SHARE = 0.05  # of the validation rows, if that is more


class Conformal(NamedTuple):
    """Sorted scores of `rows` validation rows: all, or those of the ranks ⌈i · rows / scores⌉ for i = 1, 2, …

    With times, the scores of these ranks, or those of the newest rows where they are larger."""

    rows: int
    scores: tuple[float, ...]

    @staticmethod
    def of(scores: NDArray[np.float64], times: NDArray[np.int64] | None = None) -> Conformal | None:
        """Return the sorted scores [rows], at most MOST_SCORES of them; None for no rows.

        `times` [rows] are those of a division by time, None of other ones."""
        rows = len(scores)
        if rows == 0 or not np.isfinite(scores).all():
            return None
        count = min(rows, MOST_SCORES)
        ranks = np.array([-(-number * rows // count) for number in range(1, count + 1)])
        kept = np.sort(scores)[ranks - 1]
        if times is not None:
            kept = np.maximum(kept, _newest(scores, times, ranks / (rows + 1)))
        return Conformal(rows, tuple(kept.tolist()))

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


def _newest(
    scores: NDArray[np.float64], times: NDArray[np.int64], coverages: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the score for each coverage, with weights that halve with the age of rows, or the largest score.

    The further row has the weight 1, as the newest one."""
    ascending = np.sort(times)
    ages = len(times) - np.searchsorted(ascending, times, "right")  # numbers of newer rows
    weights = 0.5 ** (ages / max(HALF_LIFE, HALF_LIFE_SHARE * len(times)))
    order = np.argsort(scores, kind="stable")
    sums = np.cumsum(weights[order])
    places = np.searchsorted(sums, coverages * (sums[-1] + 1.0) - ROUNDING)
    return scores[order][np.minimum(places, len(scores) - 1)]
