"""Loss and metrics of an epoch, summed up batch by batch."""

from __future__ import annotations

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
        self.loss_sum = 0.0
        self._sums = sums
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._pending = 0

    def add(self, outputs: Tensor, target: Tensor, loss: float) -> None:
        """Add a batch: outputs [rows, outputs], target [rows], mean loss."""
        rows = len(target)
        self.samples += rows
        self.loss_sum += loss * rows
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
        return self.loss_sum / self.samples if self.samples else None

    def result(self) -> Metrics:
        self._count()
        return self._sums.result(self.samples, self.loss_sum)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for `restore`, without `samples` and `loss_sum`."""
        tensors = {name: torch.from_numpy(array) for name, array in self._sums.arrays.items()}
        if self._outputs:
            tensors |= {"outputs": torch.cat(self._outputs), "targets": torch.cat(self._targets)}
        return tensors

    def restore(self, tensors: dict[str, Tensor], samples: int, loss_sum: float, device: torch.device) -> None:
        self.samples, self.loss_sum = samples, loss_sum
        if "outputs" in tensors:
            self._outputs = [tensors.pop("outputs").to(device)]
            self._targets = [tensors.pop("targets").to(device)]
            self._pending = self._outputs[0].numel()
        self._sums.arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
