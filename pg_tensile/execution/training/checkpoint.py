"""Checkpoints: the complete state of a training run, as one safetensors file (never pickle) and a small JSON `meta`.

Tensors: `model.*` (parameters and buffers), `optimizer.<parameter>.<name>`, `best.*` (the best epoch's model, with
early stopping), `validation.*` (outputs of validation rows), `rng.*` (states of the global generators of torch, the
device, numpy and Python) and those that the trainer adds. Meta: the position of the run, and the values that have to
agree for it to be resumed. The weights of a version have the same encoding, without prefixes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pg_tensile.errors import ArchitectureError, CheckpointError
from pg_tensile.execution.backends import module_of


@dataclass
class Checkpoint:
    """State of a run; `meta` is JSON."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def put(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        self.tensors.update((f"{prefix}.{name}", tensor) for name, tensor in tensors.items())

    def get(self, prefix: str) -> dict[str, Tensor]:
        start = prefix + "."
        return {name.removeprefix(start): tensor for name, tensor in self.tensors.items() if name.startswith(start)}

    def to_bytes(self) -> bytes:
        """Return the tensors as bytes; `meta` has to be stored separately."""
        return to_bytes(self.tensors)

    @staticmethod
    def from_bytes(data: bytes, meta: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint with these tensors. Raises CheckpointError if `data` is not a safetensors file."""
        return Checkpoint(meta, from_bytes(data))


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as one safetensors file. Tied tensors are stored once for each name."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in copies.items():
        if tensor.data_ptr() in seen:
            copies[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return safetensors.torch.save(copies)


def from_bytes(data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"the stored tensors are damaged: {error}") from error


@contextmanager
def from_chunks(chunks: list[memoryview]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a safetensors file that came in pieces; they are gone at the end, and `chunks` is emptied.

    They are in a file in memory: while many bytes are joined, decoded or freed, no other thread could continue. Raises
    CheckpointError."""
    with open(os.memfd_create("weights"), "wb", buffering=0) as file:
        while chunks:
            rest = chunks.pop(0)
            while rest.nbytes:
                rest = rest[file.write(rest) :]
        try:
            yield safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")
        except (safetensors.SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(f"the stored tensors are damaged: {error}") from error
        finally:
            file.truncate(0)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name. Raises ArchitectureError if the model has other state."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            hint = "Keep all state in parameters and buffers; get_extra_state is not supported."
            raise ArchitectureError(f'the model\'s state "{name}" is not a tensor', hint=hint)
    return state


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the weights into the model. Raises CheckpointError if names or shapes are not the model's."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError("the stored weights do not fit the model", detail=str(error)) from error


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state, with keys "number.name": the number of the parameter and the name of the state."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, CUDA, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def generator_states(checkpoint: Checkpoint, device: torch.device) -> None:
    """Store the states of all global generators in the checkpoint, that of the device among them."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, python_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if device.type != "cpu":
        tensors["device"] = module_of(device).get_rng_state(device)
    checkpoint.put("rng", tensors)
    checkpoint.meta["rng"] = {
        "numpy": [int(position), int(has_gauss), float(gauss)],
        "python": [version, python_gauss],
    }


def restore_generators(checkpoint: Checkpoint, device: torch.device) -> None:
    """Restore all global generators to their states in the checkpoint, the device's if it had one."""
    tensors, meta = checkpoint.get("rng"), checkpoint.meta["rng"]
    position, has_gauss, gauss = meta["numpy"]
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, python_gauss = meta["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors and device.type != "cpu":
        module_of(device).set_rng_state(tensors["device"], device)
