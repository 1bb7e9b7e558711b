"""The target of a model, and transforms of a regression's target that are undone in every answer.

log       the sign of x times log(1 + |x|): for amounts over several orders of magnitude; of both signs, with zeros
quantile  ranks as quantiles of the normal distribution, linear between at most MOST_QUANTILES quantiles of the training
          targets; answers stay between the least and the largest of these
auto      log if the training targets are skewed and log halves their skewness, quantile if log does not help targets
          that are skewed extremely, else none

Counts and amounts cannot be negative, and no answer about them is: a target is taken for one if none is negative and
either some are 0 or they are skewed to the right, as distributions with an end at 0 are. Others that happen to be
positive, such as temperatures in summer, may be negative later.

Needs numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.stored_numbers import with_floats

MOST_QUANTILES = 1001
LARGEST_LOG = 700.0  # whose exponential is finite
SKEWED, EXTREMELY_SKEWED = 1.0, 5.0  # skewness; 0: symmetric, 2: exponential
AMOUNT_SKEWNESS, AMOUNT_ZEROS = 0.5, 0.01  # least skewness, and share of zeros, of counts and amounts


@dataclass(frozen=True)
class Target:
    """The fitted target; mean and standard deviation are those of a regression's transformed target.

    `transform` is None, log or quantile; `quantiles` are ascending. `nonnegative`: no answer is below 0."""

    name: str
    type: str
    mean: float = 0.0
    std: float = 1.0
    transform: str | None = None
    quantiles: tuple[float, ...] | None = None
    nonnegative: bool = False

    def transformed(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return finite targets in transformed units."""
        if self.transform == "log":
            return signed_log(x)
        if self.transform == "quantile":
            return np.interp(x, *self.knots)
        return x

    def original(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return transformed targets in the target's own unit: the inverse of `transformed`."""
        if self.transform == "log":
            return np.sign(x) * np.expm1(np.minimum(np.abs(x), LARGEST_LOG))
        if self.transform == "quantile":
            values, scores = self.knots
            return np.interp(x, scores, values)
        return x

    def answered(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return transformed answers in the target's own unit, not below 0 if no target is."""
        values = self.original(x)
        return np.maximum(values, 0.0) if self.nonnegative else values

    @cached_property
    def knots(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Distinct quantiles and their scores, quantiles of the normal distribution; equal ones have the mean score."""
        assert self.quantiles is not None
        count = len(self.quantiles)
        shares = np.linspace(0.0, 1.0, count).clip(0.5 / count, 1.0 - 0.5 / count)
        normal = NormalDist()
        scores = np.array([normal.inv_cdf(share) for share in shares.tolist()])
        values, groups = np.unique(np.array(self.quantiles), return_inverse=True)
        return values, np.bincount(groups, scores) / np.bincount(groups)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("name", "type", "mean", "std", "transform")}
        optional = {} if self.quantiles is None else {"quantiles": list(self.quantiles)}
        return fields | optional | ({"nonnegative": True} if self.nonnegative else {})

    @staticmethod
    def from_json(value: dict[str, Any]) -> Target:
        return Target(**with_floats(Target, value))


def signed_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sign of x times log(1 + |x|)."""
    return np.sign(x) * np.log1p(np.abs(x))


def choose_transform(sample: NDArray[np.float64]) -> str | None:
    """Return the transform that "auto" stands for, from a sample of the training targets."""
    skewness = abs(_skewness(sample)) if len(sample) else 0.0
    if skewness <= SKEWED:
        return None
    if abs(_skewness(signed_log(sample))) <= skewness / 2:
        return "log"
    return "quantile" if skewness > EXTREMELY_SKEWED else None


def is_amount(sample: NDArray[np.float64], low: float) -> bool:
    """Return whether targets, the least of which is `low`, are counts or amounts, judging by a sample of them."""
    if low < 0 or not len(sample):
        return False
    return float((sample == 0).mean()) >= AMOUNT_ZEROS or _skewness(sample) >= AMOUNT_SKEWNESS


def quantiles_of(sample: NDArray[np.float64], low: float, high: float) -> tuple[float, ...]:
    """Return at most MOST_QUANTILES ascending quantiles of a sample, from `low` to `high`."""
    count = max(min(MOST_QUANTILES, len(sample)), 2)
    quantiles = np.quantile(sample, np.linspace(0.0, 1.0, count), method="inverted_cdf")
    return (low, *quantiles[1:-1].tolist(), high)


def _skewness(x: NDArray[np.float64]) -> float:
    """Return the third standardised moment, 0 for constant numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        u = x / max(float(np.abs(x).max(initial=0.0)), np.finfo(np.float64).tiny)
        u = u - u.mean()
        spread = float(u.std())
        skewness = float((u**3).mean()) / spread**3 if spread > 0 else 0.0
    return skewness if np.isfinite(skewness) else 0.0
