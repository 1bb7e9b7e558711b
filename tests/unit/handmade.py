"""Small traces written operator by operator, for tests with answers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace


def trace_of(*operators: tuple[float, dict[int, Mode]], sizes: tuple[int, ...], persistent: int = 0) -> Trace:
    """Build an iteration of operators (µs, accesses) between placeholder and output, which take no time. Tensor 0 is
    the batch, the next `persistent` ones are parameters."""
    kinds = [Kind.INPUT] + [Kind.PARAMETER] * persistent + [Kind.TEMPORARY] * (len(sizes) - 1 - persistent)
    rows = [Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),))]
    for latency_us, accesses in operators:
        modes = tuple(Access(tensor, mode) for tensor, mode in accesses.items())
        rows.append(Operator("op", Phase.FORWARD, modes, latency_us=latency_us))
    rows.append(Operator("output", Phase.OPTIMIZER, ()))
    return Trace.build(rows, [Tensor(size, kind) for size, kind in zip(sizes, kinds, strict=True)])


def network(layers: int, activation_bytes: int | Sequence[int] = 1 << 20, latency_us: float = 100.0) -> Trace:
    """Build a training step of a chain of layers, every second with an in-place operator: 3.5 operators a layer.
    The backward operator of a layer reads its input and its output; the updates stand at the end. `activation_bytes`
    is one size for all layers, or the output of each layer."""
    outputs = [activation_bytes] * layers if isinstance(activation_bytes, int) else list(activation_bytes)
    tensors: list[Tensor] = []
    operators: list[Operator] = []

    def tensor(kind: Kind, size: int) -> int:
        tensors.append(Tensor(size, kind))
        return len(tensors) - 1

    def operator(target: str, phase: Phase, microseconds: float, accesses: dict[int, Mode]) -> None:
        modes = tuple(Access(accessed, mode) for accessed, mode in accesses.items())
        operators.append(Operator(target, phase, modes, latency_us=microseconds))

    activations = [tensor(Kind.INPUT, outputs[0])]
    weights = [tensor(Kind.PARAMETER, size // 4) for size in outputs]
    moments = [tensor(Kind.OPTIMIZER_STATE, size // 4) for size in outputs]
    operator("placeholder", Phase.FORWARD, 0.0, {activations[0]: Mode.CREATE})
    for layer, weight in enumerate(weights):
        output = tensor(Kind.ACTIVATION, outputs[layer])
        reads = {activations[-1]: Mode.READ, weight: Mode.READ}
        operator("layer", Phase.FORWARD, latency_us, {**reads, output: Mode.CREATE})
        if layer % 2:
            operator("relu_", Phase.FORWARD, latency_us / 10, {output: Mode.WRITE})
        activations.append(output)
    incoming = tensor(Kind.TEMPORARY, outputs[-1])
    operator("loss", Phase.FORWARD, latency_us, {activations[-1]: Mode.READ, incoming: Mode.CREATE})
    gradients = []
    for layer in reversed(range(layers)):
        gradients.append((layer, tensor(Kind.GRADIENT, outputs[layer] // 4)))
        outgoing = tensor(Kind.TEMPORARY, outputs[max(0, layer - 1)])
        reads = dict.fromkeys([incoming, activations[layer], activations[layer + 1], weights[layer]], Mode.READ)
        makes = {gradients[-1][1]: Mode.CREATE, outgoing: Mode.CREATE}
        operator("backward", Phase.BACKWARD, 2 * latency_us, {**reads, **makes})
        incoming = outgoing
    for layer, gradient in gradients:
        changes = {weights[layer]: Mode.WRITE, moments[layer]: Mode.WRITE, gradient: Mode.READ}
        operator("adam", Phase.OPTIMIZER, latency_us / 10, changes)
    operator("output", Phase.OPTIMIZER, 0.0, {incoming: Mode.READ})
    return Trace.build(operators, tensors)
