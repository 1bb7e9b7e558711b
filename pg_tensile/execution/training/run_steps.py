"""The steps of a run, as the trainer sees them; steps.py executes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pg_tensile.execution.data.batches import Batch
from pg_tensile.execution.training.observer import Memory


class StepResult(NamedTuple):
    """Result of a step: outputs [rows, outputs] of the model, and the mean loss, both of this rank's rows."""

    outputs: Tensor
    loss: float


class StepsState(NamedTuple):
    """State from which a run's next step starts.

    `model` is its state_dict. `optimizer` has keys "number.name": the number of the parameter among those trained, and
    the name of the state."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


class Steps(Protocol):
    """Execution of the steps of a run.

    `model` holds the weights again after `close`. Batches must be on `batch_device`; those for evaluation have at most
    `evaluation_rows` rows."""

    model: nn.Module
    batch_device: torch.device
    device: torch.device  # that steps are executed on
    evaluation_rows: int

    def train(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        """Take one training step; `learning_rate` None means that of the settings."""

    def evaluate(self, batch: Batch) -> StepResult:
        """Compute outputs and loss in evaluation mode, without an update."""

    def state(self) -> StepsState:
        """Return the state; its tensors are valid until the next step."""

    def load(self, state: StepsState) -> None:
        """Continue from `state`. Raises CheckpointError if it belongs to another model."""

    def memory(self) -> Memory: ...

    def close(self) -> None: ...
