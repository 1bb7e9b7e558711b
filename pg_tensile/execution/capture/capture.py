"""`capture`, `capture_evaluation` and `capture_inference`: a model's step as a static graph.

The step runs twice on fake tensors. A model that would silently give wrong results as a static graph is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import checks, training_step
from pg_tensile.execution.capture.build import Recording, build
from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.capture.recorder import PLAIN
from pg_tensile.execution.capture.session import Run, Session
from pg_tensile.execution.capture.spec import StepSpec
from pg_tensile.execution.capture.state import ModelState, generators_kept
from pg_tensile.execution.raw_bytes import raw_bytes
from pg_tensile.planning.trace.trace import Kind, Mode, Trace

_lock = threading.RLock()  # capturing replaces attributes of the model and of PyTorch


def capture(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    spec: StepSpec,
    early_update: bool = False,
    device: torch.device | str | None = None,
) -> Captured:
    """Capture one training step of `model`: forward, loss, backward, clipping and one fused update per parameter.

    Of `inputs` (of the model) and `targets` (of the loss) only shapes, strides and types matter; they may be fake. No
    memory is allocated for tensors and nothing is computed; model and generators are left unchanged. `device` is the
    device of the graph; None means that of the parameters. With `early_update` the optimizer's operators are moved up
    to where their gradients are final; the collectives of a step of several ranks always are. The model is captured in
    training mode.

    Raises CaptureError, with the line of the model if it is known, if the step cannot be captured or would silently be
    trained wrongly, and DeviceError if the device is not available."""
    from pg_tensile.execution.capture import early_update as moving  # imported here because it imports this package

    captured = _capture(model, inputs, targets, spec, device, training=True, run=training_step.run)
    if early_update:
        return moving.early_update(captured)
    return captured if spec.ranks is None else moving.early_collectives(captured)


def capture_evaluation(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    spec: StepSpec,
    device: torch.device | str | None = None,
    training: bool | None = False,
    with_loss: bool | None = None,
) -> Captured:
    """Capture one evaluation of the whole batch: forward without gradients, and `spec.loss` of its output.

    The spec's autocast applies; its optimizer, clipping and accumulation are ignored. The graph returns all tensors in
    the part of the outputs that `spec.pick` selects. `with_loss` None means that there is a loss if there are targets.
    `training` is the mode in which the model is captured; None keeps the current one. All operators are in the phase
    FORWARD. Everything else is as in `capture`. Raises CaptureError, DeviceError."""
    run = partial(training_step.evaluate, with_loss=bool(targets) if with_loss is None else with_loss)
    return _capture(model, inputs, targets, spec, device, training, run)


def capture_inference(model: nn.Module, inputs: Sequence[Tensor], device: torch.device | str | None = None) -> Captured:
    """Capture one prediction: the forward pass in eval mode without gradients.

    The graph returns all tensors in the model's output. Everything else is as in `capture_evaluation`. Raises
    CaptureError, DeviceError."""
    return capture_evaluation(model, inputs, (), StepSpec(_no_loss), device)


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("a prediction has no loss")


def _capture(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    spec: StepSpec,
    device: torch.device | str | None,
    training: bool | None,
    run: Run,
) -> Captured:
    trains = run is training_step.run
    checks.check_inputs(inputs, targets)
    checks.check_model(model, trains)
    with _lock, generators_kept():
        state = ModelState(model)
        try:
            if training is not None:
                model.train(training)
            session = Session(model, inputs, targets, spec, device, state, run, trains)
            recording = session.record(seed=1)
            _compare(recording, session.record(seed=2))
        finally:
            state.restore()
    captured = build(recording, spec)
    _refuse_changed_constants(captured.trace)
    return captured


def _compare(first: Recording, second: Recording) -> None:
    """Raise CaptureError unless the recordings of two calls of the model are the same."""
    for call, repeated in zip(first.records, second.records, strict=False):
        if repr(call.call) != repr(repeated.call):
            raise _difference(call.source or repeated.source)
    if len(first.records) != len(second.records):
        longer = max(first.records, second.records, key=len)
        raise _difference(longer[min(len(first.records), len(second.records))].source)
    parts = ("values", "tensor_bytes", "inputs", "learning_rate", "share", "loss", "outputs", "gradients")
    if any(getattr(first, part) != getattr(second, part) for part in parts):
        raise _difference("")
    for persistents in zip(first.persistents, second.persistents, strict=True):
        constant, repeated_constant = (persistent.constant for persistent in persistents)
        if constant is not None and repeated_constant is not None and not _same_bytes(constant, repeated_constant):
            raise _difference("")


def _refuse_changed_constants(trace: Trace) -> None:
    """Raise CaptureError if the step changes a tensor that no module has registered: checkpoints do not contain it."""
    for operator in trace.operators:
        for tensor, mode in operator.accesses:
            if mode != Mode.READ and trace.tensor_kind[tensor] == Kind.CONSTANT:
                hint = f"Register it with register_buffer(). {PLAIN}"
                message = "the model changes a tensor that is not one of its registered buffers"
                raise CaptureError(message, hint, source=operator.source or None)


def _difference(source: str) -> CaptureError:
    hint = f"Look for counters, flags, times and random numbers in Python that steer the model. {PLAIN}"
    return CaptureError("the model does something different each time it is called", hint, source=source or None)


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    same = first.shape == second.shape and first.dtype == second.dtype
    return same and torch.equal(raw_bytes(first), raw_bytes(second))
