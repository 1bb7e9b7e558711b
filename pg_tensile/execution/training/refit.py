"""Training of the final model on all rows, those for validation included.

Once validation has told the epoch to keep, a small table's rows for validation are worth more as training rows: the
model is trained again from its first weights, for as many epochs, each with the learning rate that it had, on batches
of the same size. The metrics, the calibration and the intervals stay those of the model that has not seen the
validation rows. Rows that fill no batch are left out of an epoch, others in each, so that no graph of another shape is
needed.

A table of few rows is cross-validated before: the model is trained in the same way on all rows but those of a fold, for
which it then has outputs.

On all rows, which it has seen, the final model should be better than the validated one. Where it is clearly worse, as
few or other batches can make it, the validated model is the final one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pg_tensile.execution.data.batches import Batches, division
from pg_tensile.execution.data.dataset import Dataset, Table, taken, together
from pg_tensile.execution.data.folds import folds_of
from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.training.checkpoint import seed_generators
from pg_tensile.execution.training.graphs import step_spec
from pg_tensile.execution.training.run_steps import Steps, StepsState
from pg_tensile.execution.training.schedule import scheduled
from pg_tensile.execution.training.settings import Settings

WORSE = 1.05  # factor on the validated model's loss on all rows: beyond it, the validated model is the final one


class Refit:
    """The second training of one run, from `begin` on; it may be continued from a checkpoint at any step."""

    def __init__(self, settings: Settings, task: Task, dataset: Dataset, steps: Steps) -> None:
        """Take note of the first weights, which are those of `steps` now or, in a resumed run, the checkpoint's."""
        self.rows = dataset.training.rows + dataset.validation.rows
        self.epoch: int | None = None  # epochs done; None before `begin`
        self.step = 0  # steps done in the current epoch
        self.reduced_rates: list[float | None] = []  # of the epochs of the first training; None: the settings'
        self._validated_loss = 0.0  # on all rows, of the validated model
        self._fold: Batches | None = None  # of the fold that the model is trained for
        self._settings, self._task, self._dataset, self._steps = settings, task, dataset, steps
        self._first = {name: tensor.detach().clone() for name, tensor in steps.state().model.items()}

    @property
    def batches(self) -> Batches:
        """Batches of the rows that the model is trained on."""
        return self._all if self._fold is None else self._fold

    @cached_property
    def _table(self) -> Table:
        """All rows, those for validation last, which are copied when they are first needed."""
        return together(self._dataset.training, self._dataset.validation)

    @cached_property
    def _all(self) -> Batches:
        return self._batches(self._table)

    def _batches(self, table: Table) -> Batches:
        settings, device = self._settings, self._steps.batch_device
        return Batches(*(table, self.batch_size, settings.seed, device, False), full_only=True, ranks=settings.ranks)

    @property
    def batch_size(self) -> int:
        steps, last = division(self._dataset.training.rows, self._settings.batch_size, self._settings.ranks)
        return self._settings.batch_size if steps > 1 else last

    @property
    def epoch_steps(self) -> int:
        """Number of steps of an epoch."""
        return self.batches.steps(0) if self._fold is not None else self.rows // self.batch_size

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next step, that of the first training after the same part of the epoch."""
        assert self.epoch is not None
        done = self.epoch + (self.step + 0.5) / self.epoch_steps
        return scheduled(self._settings, done, self.reduced_rates[self.epoch])

    def begin(self, validated: Mapping[str, Tensor]) -> None:
        """Give the steps the first weights again, with an optimizer that has not seen a gradient.

        `validated`: the weights of the model of which validation has told the metrics."""
        self._steps.load(StepsState(validated, {}))
        self._validated_loss = self._loss()
        self._steps.load(StepsState(self._first, {}))
        self._fold, self.epoch, self.step = None, 0, 0

    def cross_validate(
        self, train: Callable[[], bool | None], averages: Callable[[], AbstractContextManager[None]]
    ) -> NDArray[np.float32] | None:
        """Return outputs [repeats, rows, outputs] for all rows, each by a model that has not seen the row's fold.

        `train` trains the model on this refit's batches, and returns whether it did; the outputs are those of the model
        inside `averages()`. Returns None if a fold cannot be trained, or if a model is of no use. The random numbers of
        each fold depend on nothing before, so that a resumed run begins with the first fold again."""
        seed, repeats = self._settings.seed, self._settings.repeats
        folds = folds_of(self._table.target, repeats, seed)
        if min(len(fold.fitted) for fold in folds) < self.batch_size:
            return None
        found: NDArray[np.float32] | None = None
        try:
            for number, (repeat, held, fitted) in enumerate(folds):
                seed_generators(seed + 1 + number)
                self._steps.load(StepsState(self._first, {}))
                self._fold, self.epoch, self.step = self._batches(taken(self._table, fitted)), 0, 0
                if not train():
                    return None
                with averages():
                    outputs = self._outputs().cpu().numpy()
                if not np.isfinite(outputs).all():
                    return None
                if found is None:
                    found = np.empty((repeats, *outputs.shape), outputs.dtype)
                found[repeat, held] = outputs[held]
            return found
        finally:
            self._fold, self.epoch, self.step = None, None, 0
            seed_generators(seed)

    def is_worse(self) -> bool:
        """Return whether the model, with its final weights, is clearly worse on all rows than the validated one."""
        return not self._loss() <= WORSE * self._validated_loss

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the mean loss on all rows of the model that the steps have."""
        batches = list(self._all.covering(self._steps.evaluation_rows))
        targets = [[tensor[-new:] for tensor in batch.targets] for batch, new in batches]
        loss = step_spec(self._settings, self._task).loss
        return float(loss(self._outputs(), *map(torch.cat, zip(*targets, strict=True))))

    @torch.no_grad()
    def _outputs(self) -> Tensor:
        """Return the outputs [rows, outputs] for all rows of the model that the steps have."""
        batches = self._all.covering(self._steps.evaluation_rows)
        return torch.cat([self._steps.evaluate(batch).outputs[-new:].clone() for batch, new in batches])

    def end_epoch(self) -> None:
        assert self.epoch is not None
        self.epoch, self.step = self.epoch + 1, 0

    # ---- checkpoints ----

    def to_json(self) -> dict[str, Any]:
        """Return the state as a part of a checkpoint's `meta`, without the tensors."""
        return {
            "epoch": None if self._fold is not None else self.epoch,  # folds begin again
            "step": self.step,
            "learning_rates": self.reduced_rates,
            "validated_loss": self._validated_loss,
        }

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The first weights."""
        return self._first

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.epoch, self.step, self.reduced_rates = meta["epoch"], meta["step"], list(meta["learning_rates"])
        self._validated_loss = meta["validated_loss"]
        self._first = {name: tensor.to(self._steps.batch_device) for name, tensor in tensors.items()}
