"""SwapAdvisor's recurrent networks (section 6.1): layers of LSTM cells, unrolled over a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UnrolledLSTM(nn.Module):
    """Layers of LSTM cells over a sequence, unrolled: for each time step all layers."""

    def __init__(self, width: int = 256, layers: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.hidden = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        state = [(torch.zeros_like(sequence[:, 0]), torch.zeros_like(sequence[:, 0])) for _ in self.inputs]
        for x in sequence.unbind(1):
            for layer, (into, over) in enumerate(zip(self.inputs, self.hidden, strict=True)):
                h, c = state[layer]
                x, c = cell(into(x) + over(h), c)
                state[layer] = x, c
        return self.head(x)


class BidirectionalLSTM(nn.Module):
    """Layers of LSTM cells over a sequence and over its reverse, unrolled.

    Each direction has weights of its own. The outputs of both are joined for the next layer, and those of their last
    steps for the classifier.
    """

    def __init__(self, width: int = 256, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        sizes = [size for layer in range(layers) for size in 2 * [width * (1 + (layer > 0))]]
        self.inputs = nn.ModuleList(nn.Linear(size, 4 * width) for size in sizes)
        self.hidden = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in sizes)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        ahead, back = self.both(0, list(sequence.unbind(1)))
        for layer in range(2, len(self.inputs), 2):
            ahead, back = self.both(layer, [torch.cat(pair, 1) for pair in zip(ahead, back[::-1], strict=True)])
        return self.head(torch.cat((ahead[-1], back[-1]), 1))

    def both(self, direction: int, steps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return self.outputs(direction, steps), self.outputs(direction + 1, steps[::-1])

    def outputs(self, direction: int, steps: list[Tensor]) -> list[Tensor]:
        """Return the outputs of one direction of a layer, in the order of `steps`."""
        into, over = self.inputs[direction], self.hidden[direction]
        h = c = steps[0].new_zeros(len(steps[0]), self.head.in_features // 2)
        outputs = []
        for x in steps:
            h, c = cell(into(x) + over(h), c)
            outputs.append(h)
        return outputs


def cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the new state of an LSTM cell. `c`: the state before."""
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
