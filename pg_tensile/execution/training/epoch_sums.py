"""Loss and metrics of an epoch, summed up batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pg_tensile.execution.data.metrics import Metrics, MetricSums
from pg_tensile.execution.distributed.group import Group
from pg_tensile.execution.training.checkpoint import Checkpoint

PENDING_OUTPUTS = 1 << 18  # output elements collected before they are added to the metrics


class EpochSums:
    """Loss and metrics of the current epoch.

    Outputs of many batches are collected and added to the metrics together, at steps that do not depend on where a run
    was interrupted, so that a resumed run has the same metrics."""

    def __init__(self, sums: MetricSums) -> None:
        self.samples = 0
        self.loss_sum = 0.0  # of losses times weights
        self.weight_sum = 0.0  # the samples, if they have no weights
        self._sums = sums
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._weights: list[Tensor] = []  # empty if rows have none
        self._pending = 0

    def add(self, outputs: Tensor, target: Tensor, loss: float, weight: Tensor | None = None) -> None:
        """Add a batch: outputs [rows, outputs], target [rows], mean of losses times weights, weight [rows].

        The mean may be that of all ranks' rows: then only the sums over all ranks are exact.

        Outputs of an ensemble in training are [rows, members, outputs]."""
        rows = len(target)
        self.samples += rows
        self.loss_sum += loss * rows
        self.weight_sum += rows if weight is None else float(weight.sum(dtype=torch.float64))
        self._outputs.append(outputs)
        self._targets.append(target)
        if weight is not None:
            self._weights.append(weight)
        self._pending += outputs.numel()
        if self._pending >= PENDING_OUTPUTS:
            self._count()

    def _count(self) -> None:
        if self._outputs:
            self._sums.add(*(tensor.cpu().numpy() for tensor in self._collected().values()))
            self._outputs, self._targets, self._weights, self._pending = [], [], [], 0

    def _collected(self) -> dict[str, Tensor]:
        """Return the outputs, targets and, if rows have them, weights that have not been added to the metrics."""
        parts = {"outputs": self._outputs, "targets": self._targets, "weights": self._weights}
        return {name: torch.cat(tensors) for name, tensors in parts.items() if tensors}

    def mean_loss(self) -> float | None:
        """Return the weighted mean loss so far, or None without weights above 0."""
        return self.loss_sum / self.weight_sum if self.weight_sum else None

    def result(self, group: Group) -> Metrics:
        """Return the metrics of the rows of all ranks, the same on each. The sums themselves stay this rank's."""
        self._count()
        if group.size == 1:
            return self._sums.result(self.samples, self.mean_loss())
        own = {name: array.tolist() for name, array in self._sums.arrays.items()}
        numbers = [self.samples, self.loss_sum, self.weight_sum, *itertools.chain(*own.values())]
        samples, loss, weight, *flat = group.summed(numbers)
        parts = iter(flat)
        arrays = {name: np.array([next(parts) for _ in numbers]) for name, numbers in own.items()}
        ranked = {name: torch.from_numpy(array) for name, array in self._sums.ranked.items()}
        rows = {name: tensor.numpy() for name, tensor in group.gathered(ranked).items()}
        metrics = self._sums.replaced(arrays, rows).result(round(samples), loss / weight if weight else None)
        return group.of_first(metrics)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the state for `restore`."""
        return {"samples": self.samples, "loss_sum": self.loss_sum, "weight_sum": self.weight_sum}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state for `restore`."""
        return {name: torch.from_numpy(array) for name, array in self._sums.arrays.items()} | self._collected()

    def restore(self, ranks: Sequence[Checkpoint], device: torch.device) -> None:
        """Continue from `numbers` and `tensors` ("sums") in checkpoints: from the sums over several ranks'."""
        self.samples = sum(rank.meta["samples"] for rank in ranks)
        self.loss_sum = sum(rank.meta["loss_sum"] for rank in ranks)
        self.weight_sum = sum(rank.meta.get("weight_sum", rank.meta["samples"]) for rank in ranks)
        states = [rank.get("sums") for rank in ranks]
        self._outputs, self._targets, self._weights = (
            [state.pop(name).to(device) for state in states if name in state]
            for name in ("outputs", "targets", "weights")
        )
        self._pending = sum(outputs.numel() for outputs in self._outputs)
        names = states[0]
        self._sums.restore({name: np.sum([state[name].numpy() for state in states], 0) for name in names})
