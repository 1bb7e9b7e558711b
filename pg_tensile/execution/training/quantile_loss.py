"""Loss of a regression that learns quantiles of its target besides the mean (the pinball loss)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Loss = Callable[..., Tensor]


def with_quantiles(mean_loss: Loss, quantiles: Sequence[float]) -> Loss:
    """Return the loss of outputs [rows, …, 1 + quantiles]: that of the first, plus the mean pinball loss of the others.

    The loss takes outputs, target [rows] and weights [rows], if there are any. Its minimum for the output of quantile q
    is a number below which the target lies with probability q."""

    def loss(outputs: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        total = mean_loss(outputs[..., :1], target, *weight)
        members = [1] * (outputs.dim() - 2)
        for number, quantile in enumerate(quantiles, 1):
            error = target.view(-1, *members) - outputs[..., number]
            pinball = torch.maximum(quantile * error, (quantile - 1.0) * error)
            for rows in weight:
                pinball = pinball * rows.view(-1, *members)
            total = total + pinball.mean() / len(quantiles)
        return total

    return loss
