"""Small convolutional network over one array feature, the image; all other features join after the convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.preprocessing import Features, ModelInputs
from pg_tensile.execution.models.layers import ACTIVATIONS, JoinedFeatures, dense, others

POOLED_SIDE = 4  # most positions in each direction that the dense layers see


@dataclass(frozen=True)
class CNNArchitecture:
    """Architecture `cnn`; rules.json describes its keys."""

    channels: tuple[int, ...] = (16, 32)
    kernel: int = 3
    shape: tuple[int, ...] | None = None
    hidden: tuple[int, ...] = (64,)
    activation: str = "relu"
    dropout: float = 0.0
    norm: str = "none"
    embedding: int = 16

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return CNN(self, inputs, outputs)

    def image_shape(self, length: int) -> tuple[int, int, int]:
        """Return channels, height and width of an image of `length` elements.

        Without a `shape` it is a square of one channel. Raises ArchitectureError if the length does not fit.
        """
        if self.shape is None:
            side = math.isqrt(length)
            if side * side != length:
                hint = 'Give the architecture a "shape": [height, width] or [channels, height, width].'
                raise ArchitectureError(f"an image of {length} elements is not a square", hint=hint)
            return 1, side, side
        channels, height, width = self.shape if len(self.shape) == 3 else (1, *self.shape)
        if channels * height * width != length:
            shape = "×".join(map(str, self.shape))
            raise ArchitectureError(
                f"the shape {shape} does not fit images of {length} elements", hint='Correct "shape".'
            )
        return channels, height, width


class CNN(nn.Module):
    """Convolutional network over the image; all other features join before the dense layers.

    Each entry of `channels` gives a convolution, normalisation, activation and 2×2 max pooling, the latter until a
    single position is left.
    """

    def __init__(self, architecture: CNNArchitecture, inputs: ModelInputs, outputs: int) -> None:
        super().__init__()
        self.image = _only_array(inputs)
        self.shape = architecture.image_shape(inputs.arrays[self.image].length)
        channels, height, width = self.shape
        layers: list[nn.Module] = []
        for size in architecture.channels:
            layers.append(nn.Conv2d(channels, size, architecture.kernel, padding=architecture.kernel // 2))
            if architecture.norm != "none":
                layers.append(nn.BatchNorm2d(size) if architecture.norm == "batch" else nn.GroupNorm(1, size))
            layers.append(ACTIVATIONS[architecture.activation]())
            pool = (min(height, 2), min(width, 2))
            if pool != (1, 1):
                layers.append(nn.MaxPool2d(pool))
            channels, height, width = size, height // pool[0], width // pool[1]
        last = (-(-height // POOLED_SIDE), -(-width // POOLED_SIDE))
        if last != (1, 1):
            layers.append(nn.AvgPool2d(last, ceil_mode=True))
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        self.join = JoinedFeatures(inputs, architecture.embedding, others(inputs.arrays, self.image))
        pooled = channels * -(-height // last[0]) * -(-width // last[1])
        self.dense = dense(
            pooled + self.join.width,
            architecture.hidden,
            outputs,
            architecture.activation,
            architecture.dropout,
            "none",
        )

    def forward(self, features: Features) -> Tensor:
        pooled = self.convolutions(features.arrays[self.image].view(-1, *self.shape))
        if self.join.width:
            pooled = torch.cat([pooled, self.join(features)], 1)
        return self.dense(pooled)


def _only_array(inputs: ModelInputs) -> int:
    count = len(inputs.arrays) - inputs.vectors
    if count != 1:
        hint = "Select the pixels of the image as one array (or bytea)."
        raise ArchitectureError(f"a cnn needs exactly one array feature, the query has {count}", hint=hint)
    return 0
