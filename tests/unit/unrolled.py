"""An unrolled recurrent network, written operator by operator: each layer's weights are used at each time step."""

from __future__ import annotations

from collections import defaultdict

from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE


def unrolled(
    layers: int, steps: int, weight_bytes: int = 1 << 20, hidden_bytes: int = 1 << 12, us: float = 100.0
) -> Trace:
    """Build a training step as frameworks capture it: all layers for each time step; gradients are accumulated. The
    loss is of the last output."""
    network = _Network(weight_bytes, hidden_bytes, us)
    return network.training_step(layers, steps)


class _Network:
    def __init__(self, weight_bytes: int, hidden_bytes: int, us: float) -> None:
        self.weight, self.hidden, self.us = weight_bytes, hidden_bytes, us
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []

    def tensor(self, kind: Kind, size: int) -> int:
        self.tensors.append(Tensor(size, kind))
        return len(self.tensors) - 1

    def run(self, target: str, phase: Phase, us: float, reads=(), makes=(), writes=()) -> None:
        modes = ((reads, READ), (makes, CREATE), (writes, WRITE))
        accesses = tuple(Access(tensor, mode) for tensors, mode in modes for tensor in dict.fromkeys(tensors))
        self.operators.append(Operator(target, phase, accesses, latency_us=us))

    def training_step(self, layers: int, steps: int) -> Trace:
        x = [self.tensor(Kind.INPUT, self.hidden) for _ in range(steps)]
        weights = [self.tensor(Kind.PARAMETER, self.weight) for _ in range(layers)]
        self.run("placeholder", Phase.FORWARD, 0.0, makes=x)
        gates: dict[tuple[int, int], int] = {}
        hidden: dict[tuple[int, int], int] = {}
        for step in range(steps):
            for layer, weight in enumerate(weights):
                below = hidden[layer - 1, step] if layer else x[step]
                before = [hidden[layer, step - 1]] if step else []
                gates[layer, step] = self.tensor(Kind.ACTIVATION, 4 * self.hidden)
                self.run("gates", Phase.FORWARD, self.us, [below, *before, weight], [gates[layer, step]])
                hidden[layer, step] = self.tensor(Kind.ACTIVATION, self.hidden)
                self.run("cell", Phase.FORWARD, self.us / 10, [gates[layer, step]], [hidden[layer, step]])
        loss, outgoing = self.tensor(Kind.TEMPORARY, 64), self.tensor(Kind.TEMPORARY, self.hidden)
        self.run("loss", Phase.FORWARD, self.us / 10, [hidden[layers - 1, steps - 1]], [loss, outgoing])
        gradients = self.backward(outgoing, weights, x, gates, hidden)
        for layer, weight in enumerate(weights):
            self.run("sgd", Phase.OPTIMIZER, self.us / 2, [gradients[layer]], writes=[weight])
        self.run("output", Phase.OPTIMIZER, 0.0, [loss])
        return Trace.build(self.operators, self.tensors)

    def backward(self, outgoing: int, weights, x, gates, hidden) -> dict[int, int]:
        """Return the gradient of each layer's weights."""
        layers, steps = len(weights), len(x)
        coming: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        coming[layers - 1, steps - 1].append(outgoing)
        gradients: dict[int, int] = {}
        for step in reversed(range(steps)):
            for layer in reversed(range(layers)):
                gradient = self.tensor(Kind.TEMPORARY, 4 * self.hidden)
                reads = [*coming[layer, step], gates[layer, step]]
                self.run("cell_backward", Phase.BACKWARD, self.us / 10, reads, [gradient])
                goes_to = [cell for cell in ((layer - 1, step), (layer, step - 1)) if min(cell) >= 0]
                passed = [self.tensor(Kind.TEMPORARY, self.hidden) for _ in goes_to]
                for cell, tensor in zip(goes_to, passed, strict=True):
                    coming[cell].append(tensor)
                if passed:
                    self.run("gates_backward", Phase.BACKWARD, self.us, [gradient, weights[layer]], passed)
                below = hidden[layer - 1, step] if layer else x[step]
                if layer in gradients:
                    self.run("accumulate", Phase.BACKWARD, self.us, [gradient, below], writes=[gradients[layer]])
                else:
                    gradients[layer] = self.tensor(Kind.GRADIENT, self.weight)
                    self.run("weights_backward", Phase.BACKWARD, self.us, [gradient, below], [gradients[layer]])
        return gradients
