"""Recipe of a training: batch size, epochs, learning rate, its schedule, patience and the like where a job leaves them
open.

A pure function of what is known when the rows have been read, so that `explain_training` and a resumed job find the
same values as the job itself. The numbers are in the tables at the top.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LEARNING_RATES = {
    "boosted": 5e-2,
    "mlp": 2e-3,
    "tabular": 1.2e-2,
    "cnn": 3e-3,
    "pretrained": 2e-4,
}  # by type of architecture
TUNING_RATES = {"head": 1e-3, "full": 2e-5}  # of pretrained models that train other weights than adapters, by `tune`
LEARNING_RATE = 1e-3  # of the other types
STEPS = 64  # of an epoch, about, as long as the batch size is within its bounds
STEPS_OF = {"cnn": 128}  # in place of these, by type of architecture
BATCH_SIZES = (32, 1024)
BATCH_SIZES_OF = {"tabular": (64, 256), "pretrained": (32, 32)}  # in place of these, by type of architecture
PATIENCE = 18  # epochs: by `plateau`, the learning rate falls twice before a run ends
PATIENCES = {"cnn": 8}  # in place of it, by type of architecture: the learning rate falls once
COSINE_PATIENCE = (6, 8)  # epochs at least, and part of them all: only what gets worse early is to end early
SCHEDULES = {"mlp": "plateau", "tabular": "cosine", "cnn": "plateau"}  # of the learning rate, by type of architecture
SCHEDULE = "constant"  # of the other types
EPOCHS = (10, 64)  # of a job for which cosine is chosen, as many as have EPOCHS_ROWS rows together
EPOCHS_ROWS = 800_000
PLATEAU_EPOCHS = 6  # without an improvement, after which the learning rate falls
PLATEAU_FACTOR = 0.25
REFITTED = ("tabular",)  # types of architectures that are trained again on all rows, if they have few
MOST_REFITTED = 10_000  # training rows
AVERAGED = ("tabular",)  # types of architectures whose weights are averaged
CLIPS = {"tabular": 1.0}  # largest norm of the gradient, by type of architecture; without it, a high rate may diverge


class Subject(NamedTuple):
    """Training for which values are chosen: type of the architecture, its rows, and `tune` of a pretrained model."""

    architecture: str
    training_rows: int
    tune: str | None = None


class Explicit(NamedTuple):
    """Values given by the job, which a recipe keeps; None: left open. Batch size 0: plans choose it.

    `epochs`: the most that it may have."""

    batch_size: int | None = None
    learning_rate: float | None = None
    patience: int | None = None
    learning_rate_schedule: str | None = None
    average_weights: bool | None = None
    refit: bool | None = None
    epochs: int = 200
    clip: float | None = None


OPEN = Explicit()


class Recipe(NamedTuple):
    """Values to train with; `patience` is that of early stopping, in epochs. Batch size 0: plans choose it.

    `epochs`: the most that the run has. A schedule that ends does so with them."""

    batch_size: int
    learning_rate: float
    patience: int
    learning_rate_schedule: str
    average_weights: bool
    refit: bool
    epochs: int
    clip: float | None


def recipe(subject: Subject, explicit: Explicit = OPEN) -> Recipe:
    """Return the values for a job, those that it has given included."""
    batch_size, learning_rate, patience, schedule, average, refit, epochs, clip = explicit
    architecture, rows = subject.architecture, subject.training_rows
    if schedule is None:
        schedule = SCHEDULES.get(architecture, SCHEDULE)
        epochs = min(epochs, epochs_for(rows)) if schedule == "cosine" else epochs
    return Recipe(
        _batch_size(subject) if batch_size is None else batch_size,
        _learning_rate(subject) if learning_rate is None else learning_rate,
        _patience(architecture, schedule, epochs) if patience is None else patience,
        schedule,
        architecture in AVERAGED if average is None else average,
        _is_refitted(subject) if refit is None else refit,
        epochs,
        CLIPS.get(architecture) if clip is None else clip,
    )


def _learning_rate(subject: Subject) -> float:
    of_type = LEARNING_RATES.get(subject.architecture, LEARNING_RATE)
    return of_type if subject.tune is None else TUNING_RATES.get(subject.tune, of_type)


def _batch_size(subject: Subject) -> int:
    architecture = subject.architecture
    bounds, steps = BATCH_SIZES_OF.get(architecture, BATCH_SIZES), STEPS_OF.get(architecture, STEPS)
    return batch_size_for(subject.training_rows, *bounds, steps)


def _patience(architecture: str, schedule: str, epochs: int) -> int:
    least, parts = COSINE_PATIENCE
    return max(least, epochs // parts) if schedule == "cosine" else PATIENCES.get(architecture, PATIENCE)


def _is_refitted(subject: Subject) -> bool:
    return subject.architecture in REFITTED and subject.training_rows <= MOST_REFITTED


def batch_size_for(rows: int, least: int = BATCH_SIZES[0], most: int = BATCH_SIZES[1], steps: int = STEPS) -> int:
    """Return the power of two nearest to rows / steps within these bounds, and not more than the rows."""
    nearest = 2 ** round(math.log2(max(rows, 1) / steps)) if rows > steps else 1
    return max(1, min(max(least, min(nearest, most)), rows))


def epochs_for(rows: int) -> int:
    """Return the number of epochs with about EPOCHS_ROWS rows together, within EPOCHS."""
    least, most = EPOCHS
    return max(least, min(EPOCHS_ROWS // max(rows, 1), most))
