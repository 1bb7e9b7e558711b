"""Speed of a model's matrix products alone, as a bound of the speed of its predictions.

The matrices are those of the stored version, in the form that takes the fewest products: members of an ensemble that
share an input are one matrix. Inputs are random, PART rows at once, and all are float32. There are no activations,
biases and embeddings. One thread multiplies, in a process that does nothing else:

    python -m benchmarks.server.products FILE SECONDS    # FILE: the matrices, as safetensors
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.command import ROOT
from pg_tensile.execution.models.mlp import MLP
from pg_tensile.execution.models.tabular import PART, Tabular, folded
from pg_tensile.execution.training.checkpoint import from_bytes, to_bytes

WARM_S = 0.2


def matrices(module: nn.Module) -> dict[str, Tensor]:
    """Return the matrices [count, in, out] of a model by layer, in order; `count` of them have inputs of their own."""
    if isinstance(module, MLP):
        layers = [layer.weight.T[None] for layer in module.dense if isinstance(layer, nn.Linear)]
    elif isinstance(module, Tabular):
        (first, _), *others, (last, _) = folded(module)
        layers = [first.transpose(0, 1).flatten(1)[None], *(weight for weight, _ in others), last.flatten(0, 1)[None]]
        if module.project is not None:
            layers.insert(0, module.project.weight.T[None])
    else:
        raise TypeError(f"{type(module).__name__} is not made of matrices alone")
    return {f"{number:03}": layer.detach().contiguous() for number, layer in enumerate(layers)}


def operations(layers: Mapping[str, Tensor]) -> int:
    """Return the multiplications and additions of a row."""
    return 2 * sum(layer.numel() for layer in layers.values())


def rate_alone(layers: Mapping[str, Tensor], seconds: float) -> float:
    """Return the rows per second of a process that multiplies for so many seconds."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(to_bytes(layers))
        command = [sys.executable, "-m", "benchmarks.server.products", file.name, str(seconds)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


@torch.inference_mode()
def rate(layers: Mapping[str, Tensor], seconds: float) -> float:
    """Return the rows per second of the products in this process, on one thread."""
    torch.set_num_threads(1)
    stacks = [layers[name] for name in sorted(layers)]
    products = [
        (torch.randn(PART, matrix.shape[0]), matrix, torch.empty(PART, matrix.shape[1]))
        for stack in stacks
        for matrix in stack
    ]

    def multiply(until: float) -> int:
        batches = 0
        while time.perf_counter() < until:
            for x, matrix, y in products:
                torch.mm(x, matrix, out=y)
            batches += 1
        return batches

    multiply(time.perf_counter() + WARM_S)
    began = time.perf_counter()
    batches = multiply(began + seconds)
    return PART * batches / (time.perf_counter() - began)


if __name__ == "__main__":
    print(rate(from_bytes(Path(sys.argv[1]).read_bytes()), float(sys.argv[2])))
