"""Result of capturing: a trace, and the calls that realise its operators.

Every tensor *value* of the iteration has a slot, numbered from 0. A value is a view onto one storage, and two values of
the same storage and layout share a slot, so:

- an operator that changes a tensor in place defines no slot: the slots of a tensor are defined by the operator that
  creates it and by the views attached to that operator, once per iteration (only once for persistent tensors);
- a view takes no memory and reads no data; it may be evaluated whenever the storage object exists, filled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from pg_tensile.execution.capture.spec import StepSpec
from pg_tensile.planning.trace.trace import Kind, Trace


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder, in the arguments of a call, for the value with that index."""

    index: int


class Value(NamedTuple):
    """Layout of a slot's value on the storage of one tensor; `offset` counts elements of `dtype`."""

    tensor: int  # index in the trace
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device  # a CUDA trace may hold CPU scalars (the learning rate), whose trace.tensor_bytes are 0


class Call(NamedTuple):
    """One call of a PyTorch operator: `target(*args, **kwargs)`, with every Slot in them replaced by its value.

    `results[i]` is the slot that the i-th item of `flat_results(returned)` defines, or None if that item is not a
    tensor or has a slot already, as the result of an in-place operator has."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]


class CapturedOperator(NamedTuple):
    """Realisation of one operator of the trace.

    `call` is None for the placeholder (which defines the slots `Captured.given`) and for the output (which reads
    `Captured.returned`). `views` are evaluated after the call, in this order; each is a view of a tensor that this
    operator creates."""

    call: Call | None
    views: tuple[Call, ...] = ()


class Persistent(NamedTuple):
    """Identity and initial value of a persistent tensor; `value_of` creates that value.

    `name` is the qualified name of the parameter or buffer. For optimizer state it is that of its parameter, and `key`
    is the name of the state (exp_avg, exp_avg_sq, max_exp_avg_sq, step, momentum_buffer), which is filled with
    `initial` at the start. Constants have a value and no name."""

    tensor: int
    slot: int
    kind: Kind
    name: str = ""
    key: str = ""
    initial: float = (
        0.0  # −0.0 for momentum buffers: −0.0 × momentum + g equals g to the last bit, as in PyTorch's first step
    )
    constant: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Captured:
    """One iteration (a training step, an evaluation or a prediction) to plan and execute. Holds no weights."""

    trace: Trace
    operators: tuple[CapturedOperator, ...]  # as trace.operators
    values: tuple[Value, ...]  # by slot
    persistents: tuple[Persistent, ...]  # one for each persistent tensor of the trace, in its order
    persistent_views: tuple[Call, ...]  # views of persistent tensors, in order: evaluated once
    inputs: tuple[int, ...]  # slots: the inputs and then the targets, as given to `capture`
    learning_rate: int | None  # slot of the learning rate: float64, no dimensions, on the CPU; None for an evaluation
    loss: int | None  # slot; None for an evaluation that returns no loss
    # slots: for a training step, the picked output of each micro-batch if spec.returns_outputs, else empty; for an
    # evaluation, all tensors in the picked output
    outputs: tuple[int, ...]
    unknown_sizes: frozenset[int]  # tensors whose size is only known once the operator runs: see `with_tensor_bytes`
    spec: StepSpec
    share: int | None = None  # slot, if the spec has ranks: the rank's part of the rows; like the learning rate

    @property
    def trains(self) -> bool:
        """True if this is a training step, not an evaluation."""
        return self.learning_rate is not None

    @property
    def given(self) -> tuple[int, ...]:
        """Slots that the placeholder defines: the inputs, the share if there are ranks, and the learning rate."""
        scalars = (slot for slot in (self.share, self.learning_rate) if slot is not None)
        return (*self.inputs, *scalars)

    @property
    def returned(self) -> tuple[int, ...]:
        """Slots that the output operator reads: the loss, if any, and the outputs."""
        return self.outputs if self.loss is None else (self.loss, *self.outputs)

    def with_tensor_bytes(self, sizes: Mapping[int, int]) -> Captured:
        """Return a copy with other sizes (tensor → bytes) for tensors of `unknown_sizes`."""
        tensor_bytes = self.trace.tensor_bytes.copy()
        for tensor, size in sizes.items():
            tensor_bytes[tensor] = size
        return replace(self, trace=replace(self.trace, tensor_bytes=tensor_bytes))


def fill(template: Any, values: Sequence[Any]) -> Any:
    """Return the arguments of a call (nested tuples and lists) with every Slot replaced by `values[slot.index]`."""
    if isinstance(template, Slot):
        return values[template.index]
    if isinstance(template, (tuple, list)):
        return type(template)(fill(item, values) for item in template)
    return template


def flat_results(returned: Any) -> list[Any]:
    """Return the result of a call with nested tuples and lists flattened."""
    if isinstance(returned, (tuple, list)):
        return [leaf for item in returned for leaf in flat_results(item)]
    return [returned]


def empty_like_value(value: Value, device: torch.device | None = None) -> torch.Tensor:
    """Return an uninitialised tensor in the layout of a value with offset 0; its storage has the bytes of the trace."""
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device or value.device)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values between equal shapes; the target may be expanded (several elements at one address)."""
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    target.copy_(source)


def value_of(persistent: Persistent, captured: Captured, model: nn.Module) -> torch.Tensor:
    """Return a new tensor with the value that a persistent tensor has before the first step.

    It has the layout that the calls expect. Parameters and buffers are copied from `model`."""
    tensor = empty_like_value(captured.values[persistent.slot])
    with torch.no_grad():
        if persistent.kind == Kind.OPTIMIZER_STATE:
            return tensor.fill_(persistent.initial)
        if persistent.kind == Kind.CONSTANT:
            assert persistent.constant is not None
            source = persistent.constant
        elif persistent.kind == Kind.PARAMETER:
            source = model.get_parameter(persistent.name)
        else:
            source = model.get_buffer(persistent.name)
        copy_into(tensor, source.detach())
    return tensor
