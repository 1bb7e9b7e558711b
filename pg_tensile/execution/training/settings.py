"""Settings of a run, and whether a model and its data can be trained with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from pg_tensile.errors import ArchitectureError, DataError, TrainingError
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.training import checkpoint as ckpt
from pg_tensile.planning.plan.plan import CODECS

COMPRESSIONS = ("none", "auto", *CODECS[1:])
KEPT = ("best", "last")
SCHEDULES = ("constant", "plateau", "cosine")
PRECISIONS = ("float32", "bfloat16")


class EarlyStopping(NamedTuple):
    """Rule to stop after `patience` epochs in which the loss has not improved by more than `min_delta`.

    The loss is that of validation, or of training if there are no validation rows; course.py has the details."""

    patience: int
    min_delta: float = 0.0


@dataclass(frozen=True)
class Settings:
    """Settings of a run. Raises TrainingError if `compression`, `keep`, `precision` or a schedule is unknown.

    `keep`: the model is that of the best epoch, or of the last one. `max_time_s` limits the time of training: the run
    ends at the first step after it, and an unfinished epoch does not count unless it is the first one.
    `learning_rate_schedule`: constant; plateau: the rate falls when the loss has not improved for PLATEAU_EPOCHS
    (recipe.py); or cosine: it rises, and falls to 0 at the end of the epochs (schedule.py). `average_weights`: the
    model has averages of the weights of all steps, later ones counting more; its buffers are the last step's.
    `calibrate`: a classifier's probabilities will be calibrated on the validation rows, so its epochs are compared by
    their log loss after a calibration. `refit`: once the best epoch is known, the model is trained again on all rows
    (refit.py), if they are in memory. `repeats`: how often all rows are divided for a cross-validation before that, in
    a run of one rank with `refit`. `clip`: largest norm of the gradient.
    `checkpoint_interval_s`: least time between checkpoints (checkpoint_schedule.py), 0 = between epochs only. `lead`:
    rows of the first batches of the first epoch, whatever the batch size. `compression` of swapped tensors: none, auto,
    or the only codec to use, where it pays. `quantiles` of the target that a regression learns as well; its model has
    an output for each, behind the first. `precision` of forward and backward: float32, or bfloat16 by autocast.
    `accumulate`: the most parts of a batch for one update. `ranks`: processes that train together, each on its part of
    every batch; `batch_size` is that of all of them. `device_graphs`: iterations under a plan are captured and
    replayed on an accelerator (runtime/replay.py)."""

    epochs: int
    batch_size: int
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    seed: int = 0
    weight_decay: float | None = None
    momentum: float | None = None
    clip: float | None = None
    early_stopping: EarlyStopping | None = None
    checkpoint_interval_s: float = 60.0
    lead: tuple[int, ...] = ()
    compression: str = "none"
    keep: str = "best"
    max_time_s: float | None = None
    learning_rate_schedule: str = "constant"
    average_weights: bool = False
    refit: bool = False
    repeats: int = 0
    calibrate: bool = False
    quantiles: tuple[float, ...] = ()
    precision: str = "float32"
    accumulate: int = 1
    ranks: int = 1
    device_graphs: bool = False

    def __post_init__(self) -> None:
        words = {
            "compression": COMPRESSIONS,
            "keep": KEPT,
            "learning_rate_schedule": SCHEDULES,
            "precision": PRECISIONS,
        }
        for name, choices in words.items():
            if getattr(self, name) not in choices:
                hint = f"Use one of {', '.join(choices)}."
                raise TrainingError(f'there is no {name} "{getattr(self, name)}"', hint=hint)
        if self.ranks < 1 or any(rows < self.ranks for rows in self.lead):
            raise TrainingError(f"{self.ranks} ranks cannot divide every batch among themselves")


def check_model(model: nn.Module, batch_rows: int) -> None:
    """Raise ArchitectureError or TrainingError if the model cannot be trained on batches of `batch_rows` rows.

    With several ranks, the rows are those of the one that has the fewest."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArchitectureError("the model has no parameters to train")
    if batch_rows == 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        hint = 'Use a batch_size of at least 2, or the norm "layer".'
        raise TrainingError("batch normalisation cannot train on batches of one row", hint=hint)
    ckpt.model_tensors(model)


def check_batch_size(batch_size: int, fitted: FittedPreprocessing) -> None:
    """Raise DataError if the training rows do not fill one batch."""
    rows = fitted.training_rows
    if batch_size > rows:
        hint = f"Use a batch_size of at most {rows}, or a query that returns more rows."
        detail = f"{fitted.validation_rows} rows are for validation, {fitted.skipped_rows} have no target."
        there = "is only 1 row" if rows == 1 else f"are only {rows} rows"
        message = f"batch_size is {batch_size}, but there {there} to train on"
        raise DataError(message, hint=hint, detail=detail)
