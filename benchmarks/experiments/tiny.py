"""Networks whose training step is small enough for the program that finds the best plan (optimum/)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def mlp(inputs: int = 256, hidden: int = 512, layers: int = 3, outputs: int = 10) -> nn.Module:
    sizes = [inputs, *[hidden] * layers]
    blocks = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in itertools.pairwise(sizes)]
    return nn.Sequential(*blocks, nn.Linear(hidden, outputs))


def cnn(channels: int = 16, layers: int = 4, norm: bool = False, outputs: int = 10) -> nn.Module:
    """Return a network with a convolution, a batch norm if `norm` is set, and ReLU in each layer."""
    blocks = []
    for narrow, wide in itertools.pairwise((3, *[channels] * layers)):
        normed = [nn.BatchNorm2d(wide)] if norm else []
        blocks.append(nn.Sequential(nn.Conv2d(narrow, wide, 3, padding=1), *normed, nn.ReLU()))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, outputs))


class Residual(nn.Module):
    """Blocks of two convolutions with a shortcut."""

    def __init__(self, channels: int = 16, blocks: int = 2, outputs: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.ones, self.others = (
            nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks)) for _ in range(2)
        )
        self.head = nn.Linear(channels, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.stem(images))
        for first, second in zip(self.ones, self.others, strict=True):
            x = torch.relu(x + second(torch.relu(first(x))))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """One head over a sequence, a dense layer, a mean over the sequence."""

    def __init__(self, width: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.head = nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, sequence: Tensor) -> Tensor:
        scores = self.query(sequence) @ self.key(sequence).transpose(1, 2) / sequence.shape[-1] ** 0.5
        mixed = torch.softmax(scores, -1) @ self.value(sequence)
        return self.head(torch.relu(self.dense(mixed)).mean(1))
