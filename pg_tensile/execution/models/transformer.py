"""Transformer encoder over one feature of token arrays; the mean over its tokens is joined with all other features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.preprocessing import PADDING, Features, ModelInputs, TokenLimits
from pg_tensile.execution.models.layers import JoinedFeatures, others


@dataclass(frozen=True)
class TransformerArchitecture:
    """Architecture `transformer`; rules.json describes its keys."""

    dim: int = 64
    heads: int = 4
    layers: int = 2
    feedforward: int | None = None
    length: int | None = None
    vocabulary: int = 50_000
    dropout: float = 0.0
    embedding: int = 16

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return Transformer(self, inputs, outputs)

    @property
    def token_limits(self) -> TokenLimits:
        return TokenLimits(self.length, self.vocabulary)


class Transformer(nn.Module):
    def __init__(self, architecture: TransformerArchitecture, inputs: ModelInputs, outputs: int) -> None:
        super().__init__()
        dim = architecture.dim
        tokens = [i for i, array in enumerate(inputs.arrays) if array.vocabulary]
        if len(tokens) != 1:
            hint = "Select the tokens as one array of integers; other arrays must not be of integers."
            raise ArchitectureError(
                f"a transformer needs exactly one array of tokens, the query has {len(tokens)}", hint=hint
            )
        self.tokens = tokens[0]
        array = inputs.arrays[self.tokens]
        self.token_embedding = nn.Embedding(array.vocabulary, dim, padding_idx=PADDING)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(array.length, dim))
        layer = nn.TransformerEncoderLayer(
            dim,
            architecture.heads,
            architecture.feedforward or 4 * dim,
            architecture.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, architecture.layers, norm=nn.LayerNorm(dim), enable_nested_tensor=False
        )
        self.join = JoinedFeatures(inputs, architecture.embedding, others(inputs.arrays, self.tokens))
        self.output = nn.Linear(dim + self.join.width, outputs)

    def forward(self, features: Features) -> Tensor:
        tokens = features.arrays[self.tokens]
        padding = tokens == PADDING
        encoded = self.encoder(self.token_embedding(tokens) + self.position_embedding, src_key_padding_mask=padding)
        weight = (~padding).unsqueeze(-1).to(encoded.dtype)
        pooled = (encoded * weight).sum(1) / weight.sum(1)
        if self.join.width:
            pooled = torch.cat([pooled, self.join(features)], 1)
        return self.output(pooled)
