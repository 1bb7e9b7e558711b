"""Course of a run from epoch to epoch: the epoch whose model is kept, the learning rate, and why the run ends.

The decisive loss of an epoch is that of validation, or of training if there are no validation rows. Of a classifier
that will be calibrated it is the log loss after a calibration on these rows: a network becomes too sure of itself long
before it stops learning to tell labels apart (Berta et al. 2025, Rethinking Early Stopping: Refine, Then Calibrate;
arXiv 2501.19195). Everything that
later decisions depend on is part of a checkpoint, the time spent so far included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pg_tensile.execution.training.recipe import PLATEAU_EPOCHS, PLATEAU_FACTOR
from pg_tensile.execution.training.settings import Settings


class Kept(NamedTuple):
    """Epoch (from 1) whose model is kept, its decisive loss, its metrics, and the model after it."""

    loss: float
    epoch: int
    metrics: dict[str, Any]
    tensors: dict[str, Tensor]


class Course:
    """Course of one run; `clock` returns seconds."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept: Kept | None = None  # None: the model is the last epoch's
        self._settings = settings
        self._clock = clock
        self._seconds = 0.0  # of training before `_began`
        self._began: float | None = None
        self._least = Improvement(None, 0)
        self._reductions = 0  # of the learning rate
        self._reduced_after = 0  # number of epochs

    # ---- time ----

    def begin(self) -> None:
        """Start the clock, which continues where that of a resumed checkpoint stopped."""
        if self._began is None:
            self._began = self._clock()

    @property
    def seconds(self) -> float:
        """Time that the run has taken so far, in all attempts."""
        return self._seconds + (0.0 if self._began is None else self._clock() - self._began)

    @property
    def time_is_up(self) -> bool:
        most = self._settings.max_time_s
        return most is not None and self.seconds >= most

    # ---- epochs ----

    @property
    def reduced_rate(self) -> float | None:
        """Learning rate after the reductions so far, or None for that of the settings."""
        if not self._reductions:
            return None
        return self._settings.learning_rate * PLATEAU_FACTOR**self._reductions

    def epoch_ended(
        self, epoch: int, loss: float, metrics: dict[str, Any], model: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Take note of an epoch (from 1): keep its model if it is the best so far, and adapt the learning rate."""
        if self._is_to_be_kept(loss):
            tensors = {name: tensor.detach().clone() for name, tensor in model().items()}
            self.kept = Kept(loss, epoch, metrics, tensors)
        stopping = self._settings.early_stopping
        if self._least.loss is None or loss < self._least.loss - (0.0 if stopping is None else stopping.min_delta):
            self._least = Improvement(loss, epoch)
        plateau = epoch - max(self._least.epoch, self._reduced_after) >= PLATEAU_EPOCHS
        if plateau and self._settings.learning_rate_schedule == "plateau":
            self._reductions += 1
            self._reduced_after = epoch

    def _is_to_be_kept(self, loss: float) -> bool:
        if self._settings.keep == "last":
            return self._settings.max_time_s is not None  # the next epoch may remain unfinished
        return self.kept is None or loss < self.kept.loss

    def end(self, epochs: int) -> str | None:
        """Return why the run ends after this number of epochs, or None: epochs, early_stopping or max_time."""
        stopping, least = self._settings.early_stopping, self._least
        if epochs >= self._settings.epochs:
            return "epochs"
        if stopping is not None and least.loss is not None and epochs - least.epoch >= stopping.patience:
            return "early_stopping"
        return "max_time" if epochs and self.time_is_up else None

    def earliest_end(self, epochs: int) -> int:
        """Return after how many epochs the run will end if none after the first `epochs` is better."""
        stopping = self._settings.early_stopping
        if stopping is None:
            return self._settings.epochs
        improved = self._least.epoch or 1  # the first epoch is better than none
        return max(epochs, min(improved + stopping.patience, self._settings.epochs))

    # ---- checkpoints ----

    def to_json(self) -> dict[str, Any]:
        """Return the state as `meta` of a checkpoint, without the tensors of the kept model."""
        kept = self.kept
        return {
            "best": None if kept is None else {"loss": kept.loss, "epoch": kept.epoch, "metrics": kept.metrics},
            "improved": list(self._least),
            "reductions": [self._reductions, self._reduced_after],
            "trained_s": self.seconds,
        }

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take over the state of a checkpoint; one of an earlier version has the best epoch only."""
        best = meta["best"]
        if best is not None:
            self.kept = Kept(tensors={name: tensor.to(device) for name, tensor in tensors.items()}, **best)
        improved = (None, 0) if best is None else (best["loss"], best["epoch"])
        self._least = Improvement(*meta.get("improved", improved))
        self._reductions, self._reduced_after = meta.get("reductions", (0, 0))
        self._seconds = meta.get("trained_s", 0.0)


class Improvement(NamedTuple):
    """Last epoch (from 1) that was better by `min_delta`, and its loss; None before the first epoch."""

    loss: float | None
    epoch: int
