"""Scaling of the learning rate to another batch size (AccUDNN, section 4.2)."""

from __future__ import annotations

import math
from typing import Literal, get_args

from pg_tensile.errors import OptionError

RateLaw = Literal["accudnn", "linear", "none"]
RATE_LAWS: tuple[RateLaw, ...] = get_args(RateLaw)
BASE_BATCH = 64  # rows, for which the learning rate of a job is specified that leaves its batch size to plans
CONVEXITY = 1.0  # c of eq. (9); with 0.1 for a batch of 256, where ResNets start, it gives the paper's 0.22 for 592


def scaled_learning_rate(base_rate: float, base_batch: int, batch: int, law: RateLaw = "accudnn") -> float:
    """Return the rate for a batch of `batch` rows, given that `base_rate` is the rate for `base_batch` rows.

    With q = `batch` / `base_batch`, the laws are:

    - `accudnn`: eq. (9), (1 - (1 - base_rate)^q): one step contracts the error as much as q steps of the base rate do.
      It is nearly linear while it is small, and always below 1. For a base rate of 1 or more the equation has no
      solution, and the rate is not scaled.
    - `linear`: q times the base rate.
    - `none`: the base rate.

    Raises OptionError for another law, or for a rate or a batch that is not positive and finite.
    """
    if law not in RATE_LAWS:
        raise OptionError(f'unknown learning rate law "{law}"', hint=f"There are {', '.join(RATE_LAWS)}.")
    if not (base_rate > 0 and math.isfinite(base_rate) and base_batch > 0 and batch > 0):
        raise OptionError(
            f"a learning rate of {base_rate} for a batch of {base_batch} cannot be scaled to one of {batch}",
            hint="Learning rates and batch sizes are positive.",
        )
    ratio = batch / base_batch
    if law == "none" or (law == "accudnn" and base_rate * CONVEXITY >= 1):
        return base_rate
    if law == "linear":
        return ratio * base_rate
    return -math.expm1(ratio * math.log1p(-base_rate * CONVEXITY)) / CONVEXITY
