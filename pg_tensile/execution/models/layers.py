"""Layers shared by the built-in models: activations, normalisation, and the join of all features but the main one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pg_tensile.execution.data.preprocessing import ArrayInput, Features, ModelInputs

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
NORMS_1D: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class JoinedFeatures(nn.Module):
    """Numeric features, embedded categories and `arrays` (by index) side by side: float32 [rows, width].

    All categories share one embedding table, each with its own range of rows, so that one gather serves all of them.
    """

    offsets: Tensor

    def __init__(self, inputs: ModelInputs, embedding: int, arrays: Sequence[int]) -> None:
        super().__init__()
        cardinalities = inputs.cardinalities
        self.arrays = tuple(arrays)
        self.width = inputs.numeric + embedding * len(cardinalities) + sum(inputs.arrays[i].length for i in arrays)
        self.embedding = nn.Embedding(sum(cardinalities), embedding) if cardinalities else None
        offsets = torch.tensor([sum(cardinalities[:i]) for i in range(len(cardinalities))], dtype=torch.int64)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, features: Features) -> Tensor:
        parts = [features.numeric]
        if self.embedding is not None:
            parts.append(self.embedding(features.categories + self.offsets).flatten(1))
        parts.extend(features.arrays[i].to(torch.float32) for i in self.arrays)
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def dense(width: int, hidden: Sequence[int], outputs: int, activation: str, dropout: float, norm: str) -> nn.Sequential:
    """Return hidden layers, each with normalisation, activation and dropout, followed by the output layer."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers.append(nn.Linear(width, size))
        if norm != "none":
            layers.append(NORMS_1D[norm](size))
        layers.append(ACTIVATIONS[activation]())
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)


def others(arrays: Sequence[ArrayInput], main: int) -> list[int]:
    """Return the indices of the arrays other than the main one."""
    return [i for i in range(len(arrays)) if i != main]
