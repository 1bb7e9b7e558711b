"""Loss and metrics of an epoch, summed up batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pg_tensile.execution.data.metrics import Metrics, MetricSums

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
        self._pending = 0

    def add(self, outputs: Tensor, target: Tensor, loss: float, weight: Tensor | None = None) -> None:
        """Add a batch: outputs [rows, outputs], target [rows], mean of losses times weights, weight [rows]."""
        rows = len(target)
        self.samples += rows
        self.loss_sum += loss * rows
        self.weight_sum += rows if weight is None else float(weight.sum(dtype=torch.float64))
        self._outputs.append(outputs)
        self._targets.append(target)
        self._pending += outputs.numel()
        if self._pending >= PENDING_OUTPUTS:
            self._count()

    def _count(self) -> None:
        if self._outputs:
            self._sums.add(torch.cat(self._outputs).cpu().numpy(), torch.cat(self._targets).cpu().numpy())
            self._outputs, self._targets, self._pending = [], [], 0

    def mean_loss(self) -> float | None:
        """Return the weighted mean loss so far, or None without weights above 0."""
        return self.loss_sum / self.weight_sum if self.weight_sum else None

    def result(self) -> Metrics:
        self._count()
        scale = self.samples / self.weight_sum if self.weight_sum else 1.0  # 1 without weights
        return self._sums.result(self.samples, self.loss_sum * scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for `restore`, without `samples` and sums of losses and weights."""
        tensors = {name: torch.from_numpy(array) for name, array in self._sums.arrays.items()}
        if self._outputs:
            tensors |= {"outputs": torch.cat(self._outputs), "targets": torch.cat(self._targets)}
        return tensors

    def restore(self, tensors: dict[str, Tensor], meta: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `tensors`, and from the numbers in a checkpoint's meta."""
        self.samples, self.loss_sum = meta["samples"], meta["loss_sum"]
        self.weight_sum = meta.get("weight_sum", self.samples)
        if "outputs" in tensors:
            self._outputs = [tensors.pop("outputs").to(device)]
            self._targets = [tensors.pop("targets").to(device)]
            self._pending = self._outputs[0].numel()
        self._sums.arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
