"""Observer of a run and its reports: progress, metrics of epochs, checkpoints; it may ask the run to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pg_tensile.execution.data.metrics import Metrics
from pg_tensile.execution.training.checkpoint import Checkpoint


class Memory(NamedTuple):
    """Bytes on the device, now and at the peak, and the cost of swapping so far; None means unknown."""

    device_bytes: int | None = None
    device_peak_bytes: int | None = None
    bytes_swapped: int | None = None
    stall_us: int | None = None
    passive_swap_ins: int | None = None
    raw_bytes_swapped: int | None = None  # before compression; `bytes_swapped` counts bytes over the link


class Progress(NamedTuple):
    """Progress of a run: epoch from 1, of how many at most, steps done of this epoch's steps, its mean loss so far.

    `step_s`: mean seconds of a step since the last report. `time_left_s` and `least_time_left_s`: estimated seconds
    until the run ends, at most and at least (time_left.py). None means unknown."""

    phase: str
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None
    samples_per_s: float | None
    memory: Memory
    step_s: float | None = None
    time_left_s: float | None = None
    least_time_left_s: float | None = None


class EpochMetrics(NamedTuple):
    """Metrics of one epoch (from 1) on one split: training (summed up during the epoch) or validation (after it)."""

    epoch: int
    split: str
    metrics: Metrics
    seconds: float


class Outcome(NamedTuple):
    """Outcome of a run; `stopped` means that it ended on request.

    `metrics`, as JSON, are those of the epoch whose weights the model has; of the last complete epoch if stopped.
    `epochs` counts those that ended. `reason` is why the run ended: epochs, early_stopping or max_time; None if it was
    stopped. `validation` has the outputs and targets of validation rows after the same epoch, unless it was stopped
    (validation_sample.py). `refitted_rows`: the rows of the training on all rows (refit.py), None without one.
    `warnings` are for the user. `crossed`: outputs [repeats, rows, outputs] of a cross-validation, or None; its rows
    are those for training, and behind them those for validation."""

    stopped: bool
    metrics: dict[str, Any]
    epochs: int = 0
    reason: str | None = None
    validation: Mapping[str, Tensor] = MappingProxyType({})
    refitted_rows: int | None = None
    warnings: tuple[str, ...] = ()
    crossed: NDArray[np.float32] | None = None


class StopTraining(Exception):
    """Raised by `Observer.poll` to stop the run now; `checkpoint`: whether a last one is to be made."""

    def __init__(self, checkpoint: bool) -> None:
        super().__init__("training was asked to stop")
        self.checkpoint = checkpoint


class Observer(Protocol):
    """Receiver of a run's reports and checkpoints."""

    def progress(self, progress: Progress) -> None: ...

    def metrics(self, metrics: EpochMetrics) -> None: ...

    def checkpoint(self, checkpoint: Checkpoint, written: Callable[[float], None]) -> None:
        """Store the checkpoint, and call `written` with the time (time.monotonic) at which it was stored.

        `written` may be called later, but the run makes no other checkpoint until then."""

    def poll(self) -> None:
        """Raise StopTraining if the run is to stop; called between steps."""
