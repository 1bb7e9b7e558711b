"""Linear model: a weight for each number, for each code of a category and for each element of an array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.preprocessing import Features, ModelInputs


@dataclass(frozen=True)
class LinearArchitecture:
    """Architecture `linear`; rules.json describes its key."""

    penalty: float | None = None

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return Linear(inputs, outputs)


class Linear(nn.Module):
    """Model of the architecture `linear`; linear_fit.py of the package training fits its weights."""

    offsets: Tensor

    def __init__(self, inputs: ModelInputs, outputs: int) -> None:
        super().__init__()
        self.numbers = nn.Linear(inputs.numeric + sum(array.length for array in inputs.arrays), outputs)
        self.categories = nn.Embedding(sum(inputs.cardinalities), outputs) if inputs.cardinalities else None
        starts = np.cumsum([0, *inputs.cardinalities])[:-1]
        self.register_buffer("offsets", torch.from_numpy(starts.astype(np.int64)), persistent=False)

    def forward(self, features: Features) -> Tensor:
        parts = [features.numeric, *(array.to(torch.float32) for array in features.arrays)]
        outputs: Tensor = self.numbers(torch.cat(parts, 1))
        if self.categories is not None:
            outputs = outputs + self.categories(features.categories + self.offsets).sum(1)
        return outputs


def few_rows(model: Linear) -> Callable[[Features], NDArray[np.float32]]:
    """Return the model as a function of numpy features [n, 1, …]; its outputs are [n, 1, outputs]."""
    weight = np.ascontiguousarray(model.numbers.weight.detach().numpy().T)
    bias = model.numbers.bias.detach().numpy()
    table = None if model.categories is None else model.categories.weight.detach().numpy()
    offsets = model.offsets.numpy()

    def forward(features: Features) -> NDArray[np.float32]:
        numbers = np.concatenate([features.numeric, *features.arrays], axis=-1, dtype=np.float32)
        outputs: NDArray[np.float32] = numbers @ weight + bias
        if table is not None:
            outputs = outputs + table[features.categories + offsets].sum(axis=-2)
        return outputs

    return forward
