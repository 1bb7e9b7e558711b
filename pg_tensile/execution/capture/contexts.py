"""Contexts in which a step is recorded: independent of the caller's, with its modules followed and errors explained."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import compiler
from pg_tensile.execution.capture.recorder import PLAIN, Recorder
from pg_tensile.execution.capture.recurrent import stacks_split
from pg_tensile.execution.capture.sources import failing_line
from pg_tensile.execution.capture.state import checkpoints_bypassed, logs_silenced


@contextmanager
def surroundings(device_type: str) -> Iterator[None]:
    """Make a step independent of the caller's gradient mode, autocast, anomaly detection and compiler.

    On an accelerator, recurrent layers are split where they drop out."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(logs_silenced())
        stack.enter_context(checkpoints_bypassed())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(traceable_encoder_layers())
        if device_type != "cpu":
            stack.enter_context(stacks_split())
        if compiler.is_loaded():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def traceable_encoder_layers() -> Iterator[None]:
    """Let PyTorch's encoder layers predict by their single operators where that for a whole layer cannot be traced.

    That is so before PyTorch 2.12. Results differ by rounding."""
    if torch.ops.aten._transformer_encoder_layer_fwd.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
        yield
        return
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def modules_followed(recorder: Recorder, names: dict[int, str]) -> Iterator[None]:
    """Keep `recorder.modules`, the stack of the modules that run in this thread."""
    thread = threading.get_ident()

    def enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            recorder.modules.append(names.get(id(module), ""))

    def leave(module: nn.Module, args: Any, outputs: Any) -> None:
        if threading.get_ident() == thread:
            recorder.modules.pop()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def errors_explained() -> Iterator[None]:
    """Convert every error in a step to a CaptureError that names the line of the model, if it is known."""
    try:
        yield
    except CaptureError as error:
        if error.source is None and (source := failing_line(error.__traceback__)):
            raise CaptureError(error.message, error.hint, error.detail, source) from error
        raise
    except DataDependentOutputException as error:
        hint = "Replace .item(), float(), int(), bool() and if on tensors by operators such as torch.where."
        raise _explained("the model reads the value of a tensor in Python", "", error, hint) from error
    except DynamicOutputShapeException as error:
        hint = "Replace nonzero, unique and boolean masks by torch.where or sums with weights of zero and one."
        message = f"the shape of a tensor depends on the data: {error.func}"
        raise _explained(message, "", error, hint) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError) as error:
        raise _explained("the model uses something that PyTorch cannot trace", str(error), error, "") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}"
        raise _explained("the model failed while it was captured", reason, error, "") from error


def _explained(message: str, reason: str, error: Exception, hint: str) -> CaptureError:
    first_line = reason.partition("\n")[0][:200]
    hint = f"{hint} {PLAIN}" if hint else PLAIN.replace("Or train", "Train")
    message = f"{message}: {first_line}" if first_line else message
    return CaptureError(message, hint, f"{type(error).__name__}: {error}", failing_line(error.__traceback__))
