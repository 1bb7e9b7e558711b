"""Outputs, targets and weights of the first validation rows of an epoch: a random sample, as they are in hash order.

Calibration and intervals (uncertainty.py) are derived from those of the epoch whose weights are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pg_tensile.execution.data.dataset import SAMPLED_ROWS
from pg_tensile.execution.distributed.group import Group

MOST_OUTPUTS = 1 << 22  # a checkpoint contains them, and a classifier may have thousands for each row


class ValidationSample:
    """At most SAMPLED_ROWS rows with at most MOST_OUTPUTS outputs."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Create the sample from what `tensors` returned, or an empty one."""
        self._batches: list[dict[str, Tensor]] = [dict(tensors)] if tensors else []
        self._rows = sum(len(batch["target"]) for batch in self._batches)

    def add(self, outputs: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Add a batch: outputs [rows, outputs], target [rows], weight [rows]; None means that rows have no weights."""
        rows = min(len(target), _most_rows(outputs) - self._rows)
        if rows > 0:
            tensors = {"outputs": outputs, "target": target} | ({} if weight is None else {"weight": weight})
            self._batches.append({name: tensor[:rows].cpu() for name, tensor in tensors.items()})
            self._rows += rows

    def over_ranks(self, group: Group) -> ValidationSample:
        """Return the sample of all ranks' rows, which is the same on each."""
        tensors = group.gathered(self.tensors())
        most = _most_rows(tensors["outputs"]) if tensors else 0
        return ValidationSample({name: tensor[:most] for name, tensor in tensors.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return outputs [rows, outputs], target [rows] and weight [rows], if any, or nothing if there are no rows."""
        names = self._batches[0] if self._batches else ()
        return {name: torch.cat([batch[name] for batch in self._batches]) for name in names}


def _most_rows(outputs: Tensor) -> int:
    return min(SAMPLED_ROWS, MOST_OUTPUTS // max(outputs[0].numel(), 1)) if len(outputs) else 0
