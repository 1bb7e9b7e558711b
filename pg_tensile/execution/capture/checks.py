"""Checks of model and inputs before capturing, without calling the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import optimizers
from pg_tensile.execution.capture.recorder import PLAIN
from pg_tensile.planning.device_types import DEVICE_TYPES


def check_inputs(inputs: Sequence[Any], targets: Sequence[Any]) -> None:
    """Raise CaptureError unless there is an input and all inputs and targets are dense tensors."""
    if not inputs:
        raise CaptureError("a training step needs at least one input")
    for what, tensors in (("input", inputs), ("target", targets)):
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                message = f"{what} {index} is of type {type(tensor).__name__}, not a tensor"
                raise CaptureError(message, hint="Pass tensors; bind other arguments in a module around the model.")
            _check_dense(f"{what} {index}", tensor)


def check_model(model: nn.Module, trains: bool) -> None:
    """Raise CaptureError if the model has parameters or modules that cannot be captured.

    If `trains`, the checks for a training step apply; otherwise those for an evaluation."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is of type {type(model).__name__}, not a module", "Wrap it in an nn.Module.")
    for name, module in model.named_modules():
        _check_module(name or type(model).__name__, module)
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            hint = "Call it once with a batch before it is trained, so that its lazy modules know their sizes."
            raise CaptureError(f'"{name}" of the model has no size yet', hint)
        _check_dense(f'"{name}" of the model', tensor)
    trainable = [pair for pair in model.named_parameters() if trains and pair[1].requires_grad]
    if trains and not trainable:
        raise CaptureError("the model has no parameters to train", "Set requires_grad on those to train.")
    if not named:
        raise CaptureError("the model has no parameters and no buffers", "Register what it computes with as a buffer.")
    for name, parameter in trainable:
        optimizers.check_parameter(name, parameter)
        if parameter._post_accumulate_grad_hooks:
            hint = f"Remove the hooks that run after its gradient is accumulated. {PLAIN}"
            raise CaptureError(f'the parameter "{name}" has hooks that cannot be captured', hint)
    _check_devices(named)
    _check_overlaps(named)


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats and module.momentum is None:
        hint = "Give it a momentum, 0.1 for example: None averages over a count that has to be read back each step."
        raise CaptureError(f'the normalisation "{name}" has momentum=None', hint)
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(f'the module "{name}" is a TorchScript module', f"Use the Python module itself. {PLAIN}")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise CaptureError(f'the module "{name}" is {type(module).__name__}', "Capture the module inside it.")
    if getattr(module, "_orig_mod", None) is not None or getattr(module, "_compiled_call_impl", None) is not None:
        raise CaptureError(f'the module "{name}" is compiled', "Capture the module as it was before torch.compile.")


def _check_dense(what: str, tensor: Tensor) -> None:
    kind = None
    if tensor.layout != torch.strided:
        kind = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested"
    elif tensor.is_conj() or tensor.is_neg():
        kind = "a conjugate or negative view"
    if kind:
        raise CaptureError(f"{what} is {kind}", hint="Use ordinary dense tensors.")


def _check_devices(named: list[tuple[str, Tensor]]) -> None:
    first, device = named[0][0], named[0][1].device
    if device.type not in DEVICE_TYPES:
        hint = "Give the model memory with to_empty() and initialise it." if device.type == "meta" else None
        raise CaptureError(f"the model is on the device {device}", hint or "Move it to the CPU or to a CUDA device.")
    for name, tensor in named:
        if tensor.device != device:
            message = f'"{name}" is on {tensor.device}, but "{first}" is on {device}'
            raise CaptureError(message, "Move the whole model to one device.")


def _check_overlaps(named: list[tuple[str, Tensor]]) -> None:
    """Raise CaptureError if different tensors share memory. Tied parameters are one tensor under several names."""
    spans = []
    for name, tensor in named:
        if tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            begin = tensor.data_ptr()
            spans.append((begin, begin + reach * tensor.element_size(), name))
    spans.sort()
    for (_, end, name), (begin, _, next_name) in pairwise(spans):
        if begin < end:
            raise CaptureError(
                f'"{name}" and "{next_name}" share memory but are different tensors',
                hint="Register one of them, and make the other from it in forward.",
            )
