"""Learning rate by a schedule that is known when a run begins.

cosine  rises to the rate of the settings in the first tenth of the epochs, and falls like a cosine to 0 at their end
        (Loshchilov & Hutter 2017, SGDR, without restarts; arXiv 1608.03983)

Under `plateau` the losses decide (course.py).
"""

from __future__ import annotations

import math

from pg_tensile.execution.training.settings import Settings

RISE = 0.1  # part of the epochs


def scheduled(settings: Settings, epochs: float, reduced: float | None) -> float | None:
    """Return the learning rate after this number of epochs, or None for that of the settings.

    `reduced`: the rate to which losses have reduced it, or None."""
    if settings.learning_rate_schedule != "cosine":
        return reduced
    return settings.learning_rate * cosine(epochs / settings.epochs)


def cosine(part: float) -> float:
    """Return the learning rate after this part of the epochs, relative to the highest one."""
    if part < RISE:
        return part / RISE
    return (1.0 + math.cos(math.pi * (part - RISE) / (1.0 - RISE))) / 2
