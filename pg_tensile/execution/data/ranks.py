"""Rank scale of numbers: a piecewise linear map to the normal deviates of their ranks among the training rows.

It makes every distribution a normal one, so that neither a long tail nor an outlier sets the scale. The same quantiles
give a robust standardisation with a smooth limit, as RealMLP (Holzmüller et al. 2024) has it. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.stored_numbers import with_floats

QUANTILES = 128  # intervals of equally many rows
LEAST_RANK = 1e-3  # and 1 minus that is the largest: deviates stay within ±3.1
BINS = 32  # of the embedding of a number
SMOOTH_LIMIT = 3.0  # of robust values
_NORMAL = NormalDist()


class RankScale(NamedTuple):
    """Distinct quantiles of a number in ascending order, at least two, and their normal deviates."""

    values: tuple[float, ...]
    deviates: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @staticmethod
    def from_json(value: dict[str, Any]) -> RankScale:
        return RankScale(**with_floats(RankScale, value))

    @property
    def bins(self) -> tuple[float, ...]:
        """Edges of the bins for an embedding, ascending deviates, at least two."""
        edges = np.array(self.deviates)
        if len(edges) > BINS + 1:
            edges = edges[np.linspace(0, len(edges) - 1, BINS + 1).round().astype(int)]
        return tuple(edges.tolist())

    @property
    def center(self) -> float:
        """Median."""
        return float(np.interp(0.0, self.deviates, self.values))

    @property
    def spread(self) -> float:
        """Distance of the quartiles or, where they are equal, half the range."""
        quartile = _NORMAL.inv_cdf(0.75)
        low, high = np.interp([-quartile, quartile], self.deviates, self.values)
        return float(high - low) or (self.values[-1] - self.values[0]) / 2


def rank_scale(sample: NDArray[np.float64]) -> RankScale | None:
    """Return the scale for a sample [rows] of finite numbers, or None if they are all equal."""
    ordered = np.sort(sample)
    if len(ordered) == 0 or ordered[0] == ordered[-1]:
        return None
    with np.errstate(over="ignore"):
        spread = ordered[-1] - ordered[0]
    if not np.isfinite(spread):  # the differences of such numbers exceed float64
        return None
    positions = np.linspace(0, len(ordered) - 1, QUANTILES + 1).round().astype(int)
    values = np.unique(ordered[positions])
    ranks = (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / (2 * len(ordered))
    deviates = [round(_NORMAL.inv_cdf(rank), 6) for rank in np.clip(ranks, LEAST_RANK, 1 - LEAST_RANK).tolist()]
    edges = np.array(deviates, np.float32)  # as the embedding has them
    distinct = np.flatnonzero(np.diff(edges, prepend=-np.inf) > 0)
    return RankScale(tuple(values[distinct].tolist()), tuple(deviates[i] for i in distinct.tolist()))


class RankScales:
    """Scales of several numbers, applied to all of them at once."""

    def __init__(self, scales: Sequence[RankScale]) -> None:
        self._knots = [np.array(scale.values) for scale in scales]
        most = max((len(knots) for knots in self._knots), default=1)
        self._padded = np.full((len(scales), most), np.inf)  # of knots
        # of segments [numbers, segments]: where they start, their width, their deviate at the start and its rise
        segments = np.zeros((4, len(scales), most + 1))
        starts, widths, bases, rises = segments
        widths[:] = 1.0
        for row, scale in enumerate(scales):
            x, z = np.array(scale.values), np.array(scale.deviates)
            self._padded[row, : len(x)] = x
            # segment i lies in front of knot i; the first and those from the last knot on are constant
            starts[row, 1 : len(x) + 1] = x
            bases[row] = z[-1]
            bases[row, : len(x) + 1] = (z[0], *z)
            widths[row, 1 : len(x)], rises[row, 1 : len(x)] = np.diff(x), np.diff(z)
        self._segments = segments.reshape(4, -1)
        self._centers = np.array([scale.center for scale in scales]).reshape(-1, 1)
        self._spreads = np.array([scale.spread for scale in scales]).reshape(-1, 1)
        self._offsets = np.arange(len(scales)).reshape(-1, 1) * (most + 1)

    def ranks(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the normal deviates [numbers, rows] of finite numbers."""
        if x.shape[1] <= 4:  # one comparison with all knots is faster than a search for each number
            segments = (self._padded[:, None, :] <= x[:, :, None]).sum(axis=2)
        else:
            searches = [np.searchsorted(knots, row, "right") for knots, row in zip(self._knots, x, strict=True)]
            segments = np.array(searches, np.intp).reshape(x.shape)
        starts, widths, bases, rises = self._segments.take(segments + self._offsets, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            parts = (x - starts) / widths
        return bases + np.minimum(parts, 1.0, out=parts) * rises

    def robust(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the distances from the median [numbers, rows], scaled and limited smoothly to ±SMOOTH_LIMIT."""
        with np.errstate(over="ignore"):
            z = (x - self._centers) / self._spreads
            np.maximum(np.minimum(z, 1e100, out=z), -1e100, out=z)
            return z / np.sqrt(1.0 + (z / SMOOTH_LIMIT) ** 2)
