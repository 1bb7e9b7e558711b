"""Gradient-boosted trees as a model that predicts; boosting.py of the package training grows them.

The model has one buffer, the JSON of its trees, so that its weights are a safetensors file like those of others. Rows
are evaluated in numpy (trees.py). `forward` is the same function in PyTorch, level by level, for a model that is
captured or exported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.preprocessing import Features, ModelInputs
from pg_tensile.execution.models.trees import NODES, Forest, Scorer


@dataclass(frozen=True)
class BoostedArchitecture:
    """Architecture `boosted`; rules.json describes its keys."""

    rounds: int = 2000
    leaves: int | None = None
    least_rows: int = 20

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return Boosted(inputs, outputs)


class TreeColumns(NamedTuple):
    """Columns of the matrix that trees compare: numbers, codes of categories, elements of arrays, all float32.

    Ranks of numbers are left out: trees would split by them in the same way. `cardinalities`: numbers of codes, by
    column of codes."""

    plain: int
    cardinalities: dict[int, int]
    width: int

    @staticmethod
    def of(inputs: ModelInputs) -> TreeColumns:
        plain = inputs.numeric - len(inputs.bins)
        cardinalities = {plain + place: codes for place, codes in enumerate(inputs.cardinalities)}
        elements = sum(array.length for array in inputs.arrays)
        return TreeColumns(plain, cardinalities, plain + len(cardinalities) + elements)

    def matrix(self, features: Features) -> NDArray[np.float32]:
        """Return the columns [rows, columns] of numpy features [rows, …]."""
        parts = [features.numeric[..., : self.plain], features.categories, *features.arrays]
        flat = [part.reshape(len(part), -1) for part in parts]
        return np.concatenate(flat, axis=1, dtype=np.float32, casting="unsafe")


class Boosted(nn.Module):
    """Model of the architecture `boosted`: without trees until they are given, or loaded as weights."""

    trees: Tensor

    def __init__(self, inputs: ModelInputs, outputs: int, forest: Forest | None = None) -> None:
        super().__init__()
        self.columns = TreeColumns.of(inputs)
        self.outputs = outputs
        self.register_buffer("trees", torch.empty(0, dtype=torch.uint8))
        if forest is not None:
            self._grow(forest, torch.frombuffer(bytearray(forest.to_json()), dtype=torch.uint8))

    def _grow(self, forest: Forest, trees: Tensor) -> None:
        """Take over the trees. Raises ValueError if they are for other features or outputs."""
        if (forest.columns, forest.outputs) != (self.columns.width, self.outputs):
            raise ValueError(f"the trees are for {forest.columns} columns and {forest.outputs} outputs")
        self.trees = trees
        self.scorer = Scorer(forest, self.columns.cardinalities)
        self.depth = forest.depth
        for name, array in forest.nodes(max([0, *self.columns.cardinalities.values()])).items():
            self.register_buffer(f"node_{name}", torch.from_numpy(array), persistent=False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        trees = state_dict.get(f"{prefix}trees")
        errors: list[str] = others[-1]
        if trees is None:
            errors.append("there are no trees")
            return
        try:
            self._grow(Forest.from_json(trees.numpy().tobytes()), trees)
        except ValueError as error:
            errors.append(str(error))

    def forward(self, features: Features) -> Tensor:
        parts = [features.numeric[:, : self.columns.plain], features.categories, *features.arrays]
        x = torch.cat([part.to(torch.float32) for part in parts], 1)
        of = {name: self.get_buffer(f"node_{name}") for name in NODES}
        node = of["root"].expand(x.shape[0], -1)
        for _ in range(self.depth):
            value = x.gather(1, of["feature"][node])
            goes_left = value <= of["threshold"][node]
            if self.columns.cardinalities:
                code, number = value.to(torch.int64).clamp(0, of["sets"].shape[1] - 1), of["set"][node]
                goes_left = of["sets"][number, code] | ((number == 0) & goes_left)  # row 0 has no code
            node = torch.where(goes_left, of["left"][node], of["right"][node])
        return of["value"][node].unflatten(1, (-1, self.outputs)).sum(1).to(torch.float32)


def few_rows(model: Boosted) -> Callable[[Features], NDArray[np.float32]]:
    """Return the model as a function of numpy features [n, 1, …]; its outputs are [n, 1, outputs]."""

    def forward(features: Features) -> NDArray[np.float32]:
        return model.scorer(model.columns.matrix(features)).astype(np.float32)[:, None]

    return forward


class FusedBoosted(nn.Module):
    """A trained model that is evaluated in numpy."""

    def __init__(self, model: Boosted) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Features) -> Tensor:
        rows = self.model.columns.matrix(Features.from_flat([tensor.numpy() for tensor in features.flat()]))
        return torch.from_numpy(self.model.scorer(rows).astype(np.float32))
