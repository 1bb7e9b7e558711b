"""Ensemble for tables: embedded numbers, and members that share most of their weights (TabM, Gorishniy et al. 2025).

Numbers come twice: robustly scaled, and as ranks, which get piecewise linear embeddings (Gorishniy et al. 2022). All
features are projected once for all members; behind that, each member has scales and biases of its own in layers with
common weights, and an output layer of its own. In training the outputs are those of the members [rows, members,
outputs], each of which has its own loss; in evaluation they are their mean [rows, outputs].

`few_rows` is the same function in numpy, for single rows (see mlp.py).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.preprocessing import Features, ModelInputs

PART = 512  # rows that are predicted at once


@dataclass(frozen=True)
class TabularArchitecture:
    """Architecture `tabular`; rules.json describes its keys."""

    members: int = 8
    projection: int = 128
    hidden: int = 128
    layers: int = 2
    dropout: float = 0.0
    embedding: int = 8

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return Tabular(self, inputs, outputs)


class Tabular(nn.Module):
    """Model of the architecture `tabular`. Arrays join as numbers."""

    offsets: Tensor

    def __init__(self, architecture: TabularArchitecture, inputs: ModelInputs, outputs: int) -> None:
        tabm = _library("tabm")
        super().__init__()
        width, self.members = architecture.projection, architecture.members
        self.ranks = len(inputs.bins)
        self.plain = inputs.numeric - self.ranks
        self.embeddings = _embeddings(inputs.bins, architecture.embedding) if self.ranks else None
        numbers = self.plain + self.ranks * architecture.embedding + sum(array.length for array in inputs.arrays)
        self.project = nn.Linear(numbers, width) if numbers else None
        # The sum of these vectors is what a linear layer makes of one-hot codes, without their width.
        self.categories = nn.Embedding(sum(inputs.cardinalities), width) if inputs.cardinalities else None
        if self.categories is not None:
            nn.init.normal_(self.categories.weight, std=len(inputs.cardinalities) ** -0.5)
        starts = np.cumsum([0, *inputs.cardinalities])[:-1]
        self.register_buffer("offsets", torch.from_numpy(starts.astype(np.int64)), persistent=False)
        self.backbone = tabm.make_tabm_backbone(
            d_in=width,
            n_blocks=architecture.layers,
            d_block=architecture.hidden,
            dropout=architecture.dropout,
            k=architecture.members,
            arch_type="tabm",
            start_scaling_init="normal",
            start_scaling_init_chunks=[1] * width,
        )
        self.output = tabm.LinearEnsemble(architecture.hidden, outputs, k=architecture.members)

    def forward(self, features: Features) -> Tensor:
        x = self._projected(features)
        outputs: Tensor = self.output(self.backbone(x.unsqueeze(1).expand(-1, self.members, -1)))
        return outputs if self.training else outputs.mean(1)

    def _projected(self, features: Features) -> Tensor:
        """Return all features as vectors [rows, projection]."""
        parts = [features.numeric[:, : self.plain]] if self.plain else []
        if self.embeddings is not None:
            parts.append(self.embeddings(features.numeric[:, self.plain :]).flatten(1))
        parts.extend(array.to(torch.float32) for array in features.arrays)
        terms = []
        if self.project is not None:
            terms.append(self.project(torch.cat(parts, 1) if len(parts) > 1 else parts[0]))
        if self.categories is not None:
            terms.append(self.categories(features.categories + self.offsets).sum(1))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _library(name: str) -> Any:
    """Import tabm or rtdl_num_embeddings, for models of this architecture only.

    The latter imports scikit-learn, if there is one, for a function that is not used here: that takes most of a second,
    and changes the state of Python's random numbers."""
    if name in sys.modules or "sklearn" in sys.modules:
        return importlib.import_module(name)
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["sklearn"]


def _embeddings(bins: tuple[tuple[float, ...], ...], width: int) -> nn.Module:
    embeddings = _library("rtdl_num_embeddings").PiecewiseLinearEmbeddings
    # warnings: of numbers with two values, which have one bin; the device: it looks at the edges' values, also where a
    # model is built on the device "meta"
    with warnings.catch_warnings(action="ignore"), torch.device("cpu"):
        edges = [torch.tensor(edges, dtype=torch.float32) for edges in bins]
        module: nn.Module = embeddings(edges, width, activation=False, version="B")
        return module


class FusedTabular(nn.Module):
    """A trained model in the form that predicts fastest, equal to it but for float32 rounding.

    The scales of the members are folded into weights of their own, so that every layer of a member is one product of
    matrices. Rows are taken in parts whose values stay in the processor's cache from layer to layer."""

    def __init__(self, model: Tabular) -> None:
        super().__init__()
        self.model = model
        *hidden, (last, self.bias) = folded(model)
        self.members = [
            ([(weight[k].T.contiguous(), bias[k]) for weight, bias in hidden], last[k]) for k in range(model.members)
        ]

    def forward(self, features: Features) -> Tensor:
        flat = features.flat()
        parts = [
            self._part(Features.from_flat(tensors)) for tensors in zip(*(t.split(PART) for t in flat), strict=True)
        ]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def _part(self, features: Features) -> Tensor:
        projected = self.model._projected(features)
        outputs = self.bias
        for hidden, last in self.members:
            x = projected
            for weight, bias in hidden:
                x = _linear_relu(x, weight, bias)
            outputs = torch.addmm(outputs, x, last)
        return outputs


def folded(model: Tabular) -> list[tuple[Tensor, Tensor]]:
    """Return the weights [members, in, out] and biases [members, out] of the layers behind the projection.

    They include the scales of the members. The last layer's are those of the mean: its bias is [out]."""
    layers = [block[0] for block in model.backbone.blocks]
    hidden = [(layer.r.unsqueeze(2) * layer.weight.T * layer.s.unsqueeze(1), layer.bias) for layer in layers]
    return [*hidden, (model.output.weight / model.members, model.output.bias.mean(0))]


# Chosen by the compiler of PyTorch, too: unlike MKL, oneDNN uses the widest vectors of every maker's processors.
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the linear layer's result [rows, out], negative values as 0, for its `weight` [out, in]."""
    if ONEDNN:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "relu", [], "")
        return result
    return nn.functional.linear(x, weight, bias).relu_()


def few_rows(model: Tabular) -> Callable[[Features], NDArray[np.float32]]:
    """Return the trained model as a function of numpy features, equal to it but for float32 rounding.

    Features [n, 1, …] are n single rows: each output [1, outputs] has the bits that its row has alone."""
    plain, members = model.plain, model.members
    embed, categories = _embed(model.embeddings), model.categories
    project = None if model.project is None else (_array(model.project.weight.T), _array(model.project.bias))
    table = None if categories is None else _array(categories.weight)
    offsets = model.offsets.numpy()
    (weight, bias), *others, (last_weight, last_bias) = [(_array(w), _array(b)) for w, b in folded(model)]
    first_weight = np.concatenate(weight, axis=1)  # of all members, [projection, members · hidden]
    first_bias = bias.ravel()
    others = [(weight, bias[:, None, :]) for weight, bias in others]
    last_weight = last_weight.reshape(-1, last_weight.shape[2])

    def forward(features: Features) -> NDArray[np.float32]:
        numeric = features.numeric
        parts = [numeric[..., :plain]]
        if embed is not None:
            parts.append(embed(numeric[..., plain:]))
        parts.extend(features.arrays)
        x: Any = 0.0
        if project is not None:
            x = np.concatenate(parts, axis=-1, dtype=np.float32) @ project[0] + project[1]
        if table is not None:
            x = x + table[features.categories + offsets].sum(axis=-2)
        x = x @ first_weight
        x += first_bias
        np.maximum(x, 0.0, out=x)
        x = x.reshape(*x.shape[:-1], members, -1).swapaxes(-3, -2)
        for weight, bias in others:
            x = x @ weight
            x += bias
            np.maximum(x, 0.0, out=x)
        x = x.swapaxes(-3, -2).reshape(*numeric.shape[:-1], -1)
        outputs: NDArray[np.float32] = x @ last_weight + last_bias
        return outputs

    return forward


def _embed(layer: Any) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """Return the embedding [rows, numbers · width] of ranks [rows, numbers], as a function; None without a layer."""
    if layer is None:
        return None
    scales, shifts = _array(layer.impl.weight), _array(layer.impl.bias)
    low, high = np.zeros_like(scales), np.ones_like(scales)  # of each bin; the outermost bins are open
    low[:, 0], high[:, -1] = -np.inf, np.inf
    if layer.impl.single_bin_mask is not None:
        low[layer.impl.single_bin_mask.numpy(), -1] = -np.inf
    weight, linear, bias = _array(layer.linear.weight), _array(layer.linear0.weight), _array(layer.linear0.bias)

    def embed(x: NDArray[Any]) -> NDArray[Any]:
        x = x[..., None]
        encoded = x * scales
        encoded += shifts
        np.minimum(np.maximum(encoded, low, out=encoded), high, out=encoded)
        result = np.matmul(encoded[..., None, :], weight)[..., 0, :]
        result += x * linear
        result += bias
        return result.reshape(*x.shape[:-2], -1)

    return embed


def _array(tensor: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(tensor.detach().numpy())
