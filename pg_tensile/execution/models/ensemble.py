"""Weighted average of the outputs of several models, which take the same features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.preprocessing import Features

Rows = Callable[[Features], NDArray[np.float32]]


class Ensemble(nn.Module):
    """Models and their weights; the outputs are the weighted sum of the models' outputs [rows, outputs]."""

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = tuple(weights)

    def forward(self, features: Features) -> Tensor:
        first, *others = (weight * member(features) for member, weight in zip(self.members, self.weights, strict=True))
        outputs: Tensor = sum(others, first)
        return outputs


def few_rows(members: Sequence[Rows], weights: Sequence[float]) -> Rows:
    """Return the average of members that are functions of numpy features."""
    factors = [np.float32(weight) for weight in weights]

    def forward(features: Features) -> NDArray[np.float32]:
        outputs: NDArray[np.float32] = factors[0] * members[0](features)
        for factor, member in zip(factors[1:], members[1:], strict=True):
            outputs = outputs + factor * member(features)
        return outputs

    return forward
