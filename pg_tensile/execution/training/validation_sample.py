"""Outputs and targets of the first validation rows of an epoch; being in hash order, they are a random sample.

Calibration and intervals (uncertainty.py) are derived from those of the epoch whose weights are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MOST_ROWS = 100_000
MOST_OUTPUTS = 1 << 22  # a checkpoint contains them, and a classifier may have thousands for each row


class ValidationSample:
    """At most MOST_ROWS rows with at most MOST_OUTPUTS outputs."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Create the sample from what `tensors` returned, or an empty one."""
        self._batches = [(tensors["outputs"], tensors["target"])] if tensors else []
        self._rows = sum(len(target) for _, target in self._batches)

    def add(self, outputs: Tensor, target: Tensor) -> None:
        """Add a batch: outputs [rows, outputs], target [rows]."""
        most = min(MOST_ROWS, MOST_OUTPUTS // max(outputs[0].numel(), 1)) if len(outputs) else 0
        rows = min(len(target), most - self._rows)
        if rows > 0:
            self._batches.append((outputs[:rows].cpu(), target[:rows].cpu()))
            self._rows += rows

    def tensors(self) -> dict[str, Tensor]:
        """Return outputs [rows, outputs] and target [rows], or nothing if there are no rows."""
        if not self._batches:
            return {}
        outputs, target = (torch.cat(parts) for parts in zip(*self._batches, strict=True))
        return {"outputs": outputs, "target": target}
