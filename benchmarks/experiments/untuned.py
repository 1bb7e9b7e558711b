"""Networks that the planner was not made with: other shapes of graphs than those of the papers' tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VisionTransformer(nn.Module):
    """Patches of 16 pixels, encoder layers, and the mean of their outputs."""

    def __init__(self, layers: int = 8, width: int = 384, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.randn(1, 196, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2) + self.positions).mean(1))


class DilatedConvolutions(nn.Module):
    """Gated convolutions over a series with dilations 1, 2, 4 …, whose skips are summed (as in WaveNet)."""

    def __init__(self, blocks: int = 3, depth: int = 8, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        dilations = [2**power for _ in range(blocks) for power in range(depth)]
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d, padding=d) for d in dilations)
        self.mixed = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in dilations)
        self.head = nn.Linear(width, classes)

    def forward(self, series: Tensor) -> Tensor:
        x, skips = self.first(series), torch.zeros(())
        for gated, mixed in zip(self.gated, self.mixed, strict=True):
            content, gate = gated(x)[..., : series.shape[-1]].chunk(2, 1)
            skip, residual = mixed(content.tanh() * gate.sigmoid()).chunk(2, 1)
            x, skips = x + residual, skips + skip
        return self.head(F.relu(skips).mean(-1))


class UnrolledGRU(nn.Module):
    """A recurrent cell, step by step, with the embedding's weights as those of the head."""

    def __init__(self, vocabulary: int = 2000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.input = nn.Linear(width, 3 * width)
        self.hidden = nn.Linear(width, 3 * width)

    def forward(self, words: Tensor) -> Tensor:
        inputs = self.input(self.embedding(words))
        state, states = inputs.new_zeros(words.shape[0], inputs.shape[-1] // 3), []
        for step in range(words.shape[1]):
            reset, update, new = inputs[:, step].chunk(3, -1)
            own_reset, own_update, own_new = self.hidden(state).chunk(3, -1)
            keep = torch.sigmoid(update + own_update)
            candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
            state = candidate + keep * (state - candidate)
            states.append(state)
        return torch.stack(states, 1) @ self.embedding.weight.T


class Mixer(nn.Module):
    """Perceptrons across patches and across channels in turn (MLP-Mixer)."""

    def __init__(self, layers: int = 8, width: int = 256, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.across = nn.ModuleList(self._perceptron(196, 392) for _ in range(layers))
        self.along = nn.ModuleList(self._perceptron(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    @staticmethod
    def _perceptron(width: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for index, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            x = x + across(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + along(self.norms[2 * index + 1](x))
        return self.head(x.mean(1))


class UNet(nn.Module):
    """Convolutions at ever smaller sizes and back, with a skip at each size, and the mean of the output."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(sizes[:-1]))
        self.merged = nn.ModuleList(self._block(2 * a, a) for a in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        layers = []
        for size in (inputs, outputs):
            layers += [nn.Conv2d(size, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for up, merged, skip in zip(self.up, self.merged, reversed(skips[:-1]), strict=True):
            x = merged(torch.cat([up(x), skip], 1))
        return self.head(x).mean((2, 3))
