"""One training step and one evaluation on tensors substituted for those of the model.

A training step is forward, loss, backward, clipping and update; an evaluation is forward and loss. The eager reference
(pg_tensile/execution/capture/eager.py) uses `forward_loss` and `micro_batches`, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import optimizers
from pg_tensile.execution.capture.recorder import Recorder
from pg_tensile.execution.capture.spec import StepSpec
from pg_tensile.execution.distributed.all_reduce import ALL_REDUCE, WAIT, arrivals, bucket_of, buckets, pipelined
from pg_tensile.planning.trace.trace import Phase


class StepTensors(NamedTuple):
    """Fake tensors with which a step starts, apart from the buffers."""

    parameters: dict[str, nn.Parameter]  # by name, trainable or not
    states: dict[str, dict[str, Tensor]]  # by name of the parameter and key
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    learning_rate: Tensor | None  # None for an evaluation
    share: Tensor | None = None  # of the batch's rows; None unless the step has ranks


class StepResult(NamedTuple):
    """Result of a step: the loss, the picked output of each micro-batch, and the gradients by name of the parameter.

    For an evaluation: the loss (None if not requested) and all tensors in the picked output. `outputs` of a training
    step is empty unless the spec returns outputs."""

    loss: Tensor | None
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


def micro_batches(
    inputs: Sequence[Tensor], targets: Sequence[Tensor], count: int
) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Return inputs and targets of each of `count` equal parts of the batch, cut along dimension 0."""
    if count == 1:
        return [(tuple(inputs), tuple(targets))]
    cut = [[_cut(tensor, count) for tensor in tensors] for tensors in (inputs, targets)]
    return [(tuple(part[i] for part in cut[0]), tuple(part[i] for part in cut[1])) for i in range(count)]


def _cut(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    if tensor.dim() == 0 or tensor.shape[0] % count:
        message = f"a batch of shape {tuple(tensor.shape)} cannot be cut into {count} equal parts"
        raise CaptureError(message, hint="Use a batch size that is a multiple of the accumulation.")
    return tensor.tensor_split(count)


def forward_loss(
    model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], spec: StepSpec
) -> tuple[Any, Tensor]:
    """Return the picked outputs of one micro-batch and its share of the loss."""
    with autocast(model, spec):
        outputs = spec.pick(model(*inputs))
        loss = spec.loss(outputs, *targets)
    _check_loss(loss)
    if not loss.requires_grad:
        hint = "Look for detach(), no_grad() or operators without a gradient on the way from the parameters."
        raise CaptureError("the loss does not depend on any parameter that is trained", hint)
    return outputs, loss / spec.accumulation if spec.accumulation > 1 else loss


def autocast(model: nn.Module, spec: StepSpec) -> torch.autocast:
    """Return the context in which forward and loss are computed."""
    device = next(itertools.chain(model.parameters(), model.buffers())).device
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=spec.autocast == "bf16")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        hint = "Let the loss return a tensor; output_key picks what it gets from the model's outputs."
        raise CaptureError(f"the loss is of type {type(loss).__name__}, not a tensor", hint)
    if loss.numel() != 1:
        raise CaptureError(f"the loss has the shape {tuple(loss.shape)}, not one element", "Return its mean or sum.")
    if not loss.is_floating_point():
        raise CaptureError(f"the loss is of type {loss.dtype}, not a real number", "Return a real number.")


def run(model: nn.Module, tensors: StepTensors, spec: StepSpec, recorder: Recorder) -> StepResult:
    """Execute one training step; `tensors.parameters` must have been substituted for the model's parameters."""
    trainable = {name: parameter for name, parameter in tensors.parameters.items() if parameter.requires_grad}
    gradients = Gradients(recorder)
    assert tensors.learning_rate is not None
    losses: list[Tensor] = []
    outputs: list[Tensor] = []
    order: list[str] = []
    turn = None if spec.ranks is None else torch.zeros((), dtype=torch.int64, device="cpu")
    for inputs, targets in micro_batches(tensors.inputs, tensors.targets, spec.accumulation):
        recorder.phase = Phase.FORWARD
        picked, loss = forward_loss(model, inputs, targets, spec)
        losses.append(loss.detach())
        if spec.returns_outputs:
            outputs.append(output_of(picked))
        recorder.phase = Phase.BACKWARD
        with arrivals(trainable) as arrived:
            new = torch.autograd.grad(loss, tuple(trainable.values()), allow_unused=True)
        order += (name for name in arrived if name not in order)
        gradients.taken |= {recorder.tensor(tensor) for tensor in (*losses, *outputs)}
        with torch.no_grad():
            for (name, parameter), gradient in zip(trainable.items(), new, strict=True):
                if gradient is not None:
                    gradients.add(name, parameter, gradient)
        del loss, picked, new
    recorder.phase = Phase.OPTIMIZER
    if not gradients.kept:
        hint = "Look for detach() or no_grad() on the way from the parameters to the loss."
        raise CaptureError("no parameter has a gradient", hint)
    with torch.no_grad():
        total = losses[0]
        for later in losses[1:]:
            total = total + later
        computed = dict(gradients.kept)
        if spec.ranks is not None:
            names = buckets(trainable, order, spec.ranks.bucket_bytes)
            exchanged = []
            for begins, number in pipelined(len(names)):
                if begins:
                    bucket, views = bucket_of([computed[name] for name in names[number]])
                    exchanged.append(bucket)
                    gradients.kept |= zip(names[number], views, strict=True)
                    ALL_REDUCE(bucket, turn, tensors.share, spec.ranks.size)
                else:
                    WAIT(exchanged[number], turn)
            computed |= {f"bucket{number}": bucket for number, bucket in enumerate(exchanged) if len(names[number]) > 1}
        _clip(trainable, gradients.kept, spec)
        for name, gradient in gradients.kept.items():
            optimizers.update(spec.optimizer, trainable[name], gradient, tensors.states[name], tensors.learning_rate)
    return StepResult(total, tuple(outputs), computed)


def evaluate(model: nn.Module, tensors: StepTensors, spec: StepSpec, recorder: Recorder, with_loss: bool) -> StepResult:
    """Evaluate the whole batch at once, whatever the accumulation, without gradients."""
    with torch.no_grad(), autocast(model, spec):
        picked = spec.pick(model(*tensors.inputs))
        loss = spec.loss(picked, *tensors.targets) if with_loss else None
    if with_loss:
        _check_loss(loss)
    outputs = tuple(leaf.detach() for leaf in tree_leaves(picked) if isinstance(leaf, Tensor))
    if not outputs:
        message = f"the model's output to return is of type {type(picked).__name__} and has no tensor in it"
        raise CaptureError(message, hint="Pick a tensor with output_key.")
    return StepResult(loss, outputs, {})


class Gradients:
    """Gradients of a step, stored as autograd's AccumulateGrad does: each in its own memory, in its parameter's layout.

    The gradients of later micro-batches are added in place."""

    def __init__(self, recorder: Recorder) -> None:
        self.kept: dict[str, Tensor] = {}
        self.taken = set(range(recorder.started))  # tensors that a gradient must not change
        self._recorder = recorder

    def add(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        if name in self.kept:
            self.kept[name].add_(gradient)
            return
        constants = {self._recorder.values[constant.slot].tensor for constant in self._recorder.constants.values()}
        if self._recorder.tensor(gradient) in self.taken | constants or not _has_layout(gradient, parameter):
            gradient = _copy(gradient, parameter)
        self.kept[name] = gradient
        self.taken.add(self._recorder.tensor(gradient))


def _has_layout(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether a gradient has the layout that AccumulateGrad requires.

    That is the strides of the parameter if it is dense, else contiguous."""
    if not _is_dense(parameter):
        return gradient.is_contiguous()
    return all(
        size == 1 or have == want
        for size, have, want in zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    )


def _copy(gradient: Tensor, parameter: Tensor) -> Tensor:
    if not _is_dense(parameter):
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device).copy_(
        gradient
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether no two elements share an address and no address between them is unused."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True


def clip_gradients(parameters: Iterable[Tensor], most: float) -> None:
    """Scale the gradients of the parameters down to a norm of `most`, one after the other as captured steps have to."""
    nn.utils.clip_grad_norm_(parameters, most, foreach=False)


def _clip(trainable: dict[str, nn.Parameter], gradients: dict[str, Tensor], spec: StepSpec) -> None:
    if spec.clip is None:
        return
    parameters = [trainable[name] for name in gradients]
    try:
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            parameter.grad = gradient
        clip_gradients(parameters, spec.clip)
    finally:
        for parameter in parameters:
            parameter.grad = None


def output_of(picked: Any) -> Tensor:
    if not isinstance(picked, Tensor):
        message = f"the model's output to return is of type {type(picked).__name__}, not a tensor"
        raise CaptureError(message, hint="Pick a tensor with output_key.")
    return picked.detach()
