"""Check of the first real execution against the trace.

The trace was captured with fake tensors. If real sizes or aliasing differed, every plan would be wrong, so the first
iteration checks the tensors that each operator creates. A difference raises an error that names the operator, except
for sizes that capturing has marked as unknown: those are collected, and the trace is corrected by them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pg_tensile.errors import CaptureError
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.swapper import Swapper


class Verifier:
    """Check of one iteration of a graph. `sizes`: real bytes of the tensors in `captured.unknown_sizes` that differ."""

    def __init__(self, graph: Graph, device: torch.device, registry: Registry, swapper: Swapper) -> None:
        self.sizes: dict[int, int] = {}
        self._captured = graph.captured
        self._device = device
        self._slots = graph.functions.slots
        self._values = graph.values
        self._keys, self._numbers = graph.keys, graph.numbers
        self._registry = registry
        persistents = [persistent.tensor for persistent in graph.captured.persistents]
        self._addresses = {tensor: swapper.storage(graph.keys[tensor])._cdata for tensor in persistents}
        self._owners = {address: tensor for tensor, address in self._addresses.items()}  # storage object → tensor

    def check(self, operator: int, created: Iterable[int]) -> int:
        """Check the tensors (keys) that an operator has created, and register corrected sizes.

        Returns by how many bytes they are larger than in the trace (negative if smaller). Raises CaptureError if they
        differ otherwise."""
        more = 0
        for tensor in map(self._numbers.__getitem__, created):
            storages = {self._check_slot(operator, slot).untyped_storage()._cdata for slot in self._slots[tensor]}
            if len(storages) != 1:
                raise self._error(operator, f"the views of tensor {tensor} show {len(storages)} storages")
            (address,) = storages
            owner = self._owners.get(address, tensor)
            is_there = self._keys[owner] in self._registry.resident and self._addresses.get(owner) == address
            if owner != tensor and is_there:
                raise self._error(operator, f"tensor {tensor} shares the storage of tensor {owner}")
            self._owners[address], self._addresses[tensor] = tensor, address
            more += self._check_size(operator, tensor)
        return more

    def _check_slot(self, operator: int, slot: int) -> torch.Tensor:
        value, expected = self._values[slot], self._captured.values[slot]
        if not isinstance(value, torch.Tensor):
            raise self._error(operator, f"value {slot} is of type {type(value).__name__}")
        if expected.tensor in self._captured.unknown_sizes:
            return value
        layout = (value.dtype, tuple(value.shape), value.storage_offset())
        if layout != (expected.dtype, expected.shape, expected.offset) or not _same_strides(value, expected.stride):
            raise self._error(operator, f"value {slot} is {layout}, strides {value.stride()}, not {expected}")
        return value

    def _check_size(self, operator: int, tensor: int) -> int:
        value = self._values[self._slots[tensor][0]]
        if value.device != self._device:
            return 0  # a scalar that the host reads, not in device memory
        real, traced = value.untyped_storage().nbytes(), int(self._captured.trace.tensor_bytes[tensor])
        if real == traced:
            return 0
        if tensor not in self._captured.unknown_sizes:
            raise self._error(operator, f"tensor {tensor} has {real:,} bytes, not {traced:,}")
        self.sizes[tensor] = self._registry.resident[self._keys[tensor]] = real
        return real - traced

    def _error(self, operator: int, detail: str) -> CaptureError:
        trace = self._captured.trace
        message = f"{trace.operator_label(operator)} does not make what its captured trace says"
        hint = "Train the model with the policy none, and report the operator."
        return CaptureError(message, hint, detail, trace.source[operator] or None)


def _same_strides(value: torch.Tensor, expected: tuple[int, ...]) -> bool:
    """Compare strides, except for dimensions of size 1 and empty tensors, where they have no meaning."""
    return value.numel() == 0 or all(
        size == 1 or stride == expected_stride
        for size, stride, expected_stride in zip(value.shape, value.stride(), expected, strict=True)
    )
