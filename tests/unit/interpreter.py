"""A slow and simple interpreter of captured steps: it executes call after call and checks everything.

It compares the trace with the execution: layouts, sizes, values that share memory, tensors that operators change, and
that no tensor is used before its creation or after its last access, when it is deleted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pg_tensile.execution.capture import Call, Captured, copy_into, empty_like_value, fill, flat_results, value_of
from pg_tensile.planning.trace.trace import Kind, Mode


class Interpreter:
    """Execute a captured step with a copy of the weights of `model`. `watch`: compare the bytes of every tensor
    around every operator."""

    def __init__(self, captured: Captured, model: nn.Module, watch: bool = True) -> None:
        self.captured = captured
        self.trace = captured.trace
        self.watch = watch
        self.values: list[Tensor | None] = [None] * len(captured.values)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.owners: dict[int, int] = {}  # address of a storage → tensor
        self.slots: dict[int, list[int]] = {}
        for slot, value in enumerate(captured.values):
            self.slots.setdefault(value.tensor, []).append(slot)
        for entry in captured.persistents:
            self._define(entry.slot, value_of(entry, captured, model))
        for view in captured.persistent_views:
            self._evaluate(view)

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        entries = (entry for entry in self.captured.persistents if entry.kind in (Kind.PARAMETER, Kind.BUFFER))
        return {entry.name: self._value(entry.slot) for entry in entries}

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], learning_rate: float | None = None) -> Tensor:
        """Execute an iteration and return the loss."""
        captured, trace = self.captured, self.trace
        assert captured.loss is not None and captured.learning_rate is not None
        if learning_rate is None:
            learning_rate = captured.spec.optimizer.learning_rate
        sources = [*inputs, *targets, torch.tensor(learning_rate, dtype=torch.float64)]
        for slot, source in zip((*captured.inputs, captured.learning_rate), sources, strict=True):
            self._define(slot, empty_like_value(captured.values[slot]))
            copy_into(self._value(slot), source)
        result: Tensor | None = None
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            for index, operator in enumerate(captured.operators):
                if index == trace.operator_count - 1:
                    result = self._value(captured.loss).clone()
                if operator.call is not None:
                    self._run(index, operator.call)
                for view in operator.views:
                    self._evaluate(view)
                self._throw_away(index)
        assert result is not None
        return result

    def _value(self, slot: int) -> Tensor:
        value = self.values[slot]
        assert value is not None, f"slot {slot} is used before it is made or after its last access"
        return value

    def _run(self, index: int, call: Call) -> None:
        operator = self.trace.operators[index]
        label = self.trace.operator_label(index)
        modes = dict(operator.accesses)
        before = {tensor: self._bytes(tensor) for tensor in modes if tensor in self.storages} if self.watch else {}
        self._evaluate(call)
        for tensor, mode in modes.items():
            assert tensor in self.storages, f"{label} does not make tensor {tensor}"
            if mode == Mode.CREATE and tensor not in self.captured.unknown_sizes:
                assert self.storages[tensor].nbytes() == self.trace.tensor_bytes[tensor], label
        for tensor, data in before.items():
            if modes.get(tensor, Mode.READ) == Mode.READ:
                assert data == self._bytes(tensor), f"{label} changes {self.trace.tensor_label(tensor)}"

    def _bytes(self, tensor: int) -> bytes:
        storage = self.storages[tensor]
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).numpy().tobytes()

    def _evaluate(self, call: Call) -> None:
        """Execute a call and enter its results as values."""
        args, kwargs = (
            fill(call.args, self.values),
            {name: fill(item, self.values) for name, item in call.kwargs.items()},
        )
        returned = call.target(*args, **kwargs)
        items = flat_results(returned)
        assert len(items) == len(call.results), call.target
        for slot, item in zip(call.results, items, strict=True):
            if slot is not None:
                self._define(slot, item, str(call.target))

    def _define(self, slot: int, tensor: Tensor, label: str = "") -> None:
        """Enter a value and check that it has the captured type, shape and storage."""
        value = self.captured.values[slot]
        if value.tensor not in self.captured.unknown_sizes:
            strides = [
                new if size != 1 else old
                for new, old, size in zip(tensor.stride(), value.stride, value.shape, strict=True)
            ]
            layout = (tensor.dtype, tuple(tensor.shape), tuple(strides), tensor.storage_offset(), tensor.device)
            assert layout == value[1:], (label, value, layout)
        storage = tensor.untyped_storage()
        entered = self.storages.setdefault(value.tensor, storage)
        assert entered._cdata == storage._cdata, f"slot {slot} is not a view of tensor {value.tensor}"
        owner = self.owners.setdefault(storage._cdata, value.tensor)
        assert owner == value.tensor, f"slot {slot} is a view of tensor {owner}, not of {value.tensor}"
        self.values[slot] = tensor

    def _throw_away(self, index: int) -> None:
        for tensor in list(self.storages):
            if self.trace.tensor_last[tensor] <= index and not self.trace.persistent[tensor]:
                del self.owners[self.storages.pop(tensor)._cdata]
                for slot in self.slots[tensor]:
                    self.values[slot] = None
