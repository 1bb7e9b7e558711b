"""Multi-layer perceptron over features of every kind.

`few_rows` is the same function in numpy: for a single row, torch spends more time dispatching ten operators than on the
arithmetic (57 µs against 14 µs for the demo's model).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.preprocessing import Features, ModelInputs
from pg_tensile.execution.models.layers import JoinedFeatures, dense


@dataclass(frozen=True)
class MLPArchitecture:
    """Architecture `mlp`; rules.json describes its keys."""

    hidden: tuple[int, ...] = (128, 64)
    activation: str = "relu"
    dropout: float = 0.0
    norm: str = "none"
    embedding: int = 16

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return MLP(self, inputs, outputs)


class MLP(nn.Module):
    def __init__(self, architecture: MLPArchitecture, inputs: ModelInputs, outputs: int) -> None:
        super().__init__()
        self.join = JoinedFeatures(inputs, architecture.embedding, range(len(inputs.arrays)))
        self.dense = dense(
            self.join.width,
            architecture.hidden,
            outputs,
            architecture.activation,
            architecture.dropout,
            architecture.norm,
        )

    def forward(self, features: Features) -> Tensor:
        return self.dense(self.join(features))


def few_rows(model: MLP) -> Callable[[Features], NDArray[np.float32]] | None:
    """Return the trained model as a function of numpy features, equal to it but for float32 rounding.

    Features [n, 1, …] are n single rows: each output [1, outputs] has the bits that its row has alone. None means that
    the model has a layer without an equivalent in numpy.
    """
    operators: list[Callable[[NDArray[Any]], NDArray[Any]]] = []
    for layer in model.dense:
        if isinstance(layer, nn.Linear):
            operators.append(_linear(layer))
        elif isinstance(layer, nn.BatchNorm1d):
            operators.append(_batch_norm(layer))
        elif isinstance(layer, nn.ReLU):
            operators.append(lambda x: np.maximum(x, 0.0, out=x))
        elif isinstance(layer, nn.Tanh):
            operators.append(lambda x: np.tanh(x, out=x))
        elif not isinstance(layer, nn.Dropout):
            return None
    join = _join(model.join)

    def forward(features: Features) -> NDArray[np.float32]:
        x = join(features)
        for operator in operators:
            x = operator(x)
        return x

    return forward


def _linear(layer: nn.Linear) -> Callable[[NDArray[Any]], NDArray[Any]]:
    weight = np.ascontiguousarray(layer.weight.detach().numpy().T)
    bias = layer.bias.detach().numpy()

    def linear(x: NDArray[Any]) -> NDArray[Any]:
        y = x @ weight
        y += bias
        return y

    return linear


def _batch_norm(layer: nn.BatchNorm1d) -> Callable[[NDArray[Any]], NDArray[Any]]:
    assert layer.running_mean is not None and layer.running_var is not None
    scale = (layer.weight.detach() / (layer.running_var + layer.eps).sqrt()).numpy()
    shift = layer.bias.detach().numpy() - layer.running_mean.numpy() * scale

    def batch_norm(x: NDArray[Any]) -> NDArray[Any]:
        x *= scale
        x += shift
        return x

    return batch_norm


def _join(layer: JoinedFeatures) -> Callable[[Features], NDArray[Any]]:
    table = None if layer.embedding is None else layer.embedding.weight.detach().numpy()
    offsets = layer.offsets.numpy()

    def join(features: Features) -> NDArray[Any]:
        parts = [features.numeric]
        if table is not None:
            embedded = table[features.categories + offsets]
            parts.append(embedded.reshape(*embedded.shape[:-2], table.shape[1] * len(offsets)))
        parts.extend(features.arrays)
        return np.concatenate(parts, axis=-1, dtype=np.float32) if len(parts) > 1 else parts[0]

    return join
