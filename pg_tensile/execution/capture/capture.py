"""`capture`, `capture_evaluation` and `capture_inference`: a model's step as a static graph.

The step runs twice on fake tensors. A model that would silently give wrong results as a static graph is refused.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import checks, optimizers, training_step
from pg_tensile.execution.capture.build import Recording, build
from pg_tensile.execution.capture.captured import Captured, Persistent
from pg_tensile.execution.capture.recorder import PLAIN, Recorder
from pg_tensile.execution.capture.sources import failing_line
from pg_tensile.execution.capture.spec import StepSpec
from pg_tensile.execution.capture.state import ModelState, checkpoints_bypassed, generators_kept, logs_silenced
from pg_tensile.execution.measuring.device import choose_device
from pg_tensile.planning.trace.trace import Kind, Mode, Trace

Run = Callable[[nn.Module, training_step.StepTensors, StepSpec, Recorder], training_step.StepResult]
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
    to where their gradients are final. The model is captured in training mode.

    Raises CaptureError, with the line of the model if it is known, if the step cannot be captured or would silently be
    trained wrongly, and DeviceError if the device is not available."""
    captured = _capture(model, inputs, targets, spec, device, training=True, run=training_step.run)
    if early_update:
        from pg_tensile.execution.capture.early_update import (
            early_update as move_updates,  # imported here because it imports this package
        )

        return move_updates(captured)
    return captured


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


class Session:
    """Records steps of one model; attributes set by one call are kept for the next, as in training."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        spec: StepSpec,
        device: torch.device | str | None,
        state: ModelState,
        run: Run,
        trains: bool,
    ) -> None:
        self.run, self.trains = run, trains
        self.model, self.inputs, self.targets, self.spec, self.state = model, inputs, targets, spec, state
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        # PyTorch would end the process if the device did not exist.
        self.device = choose_device(str(next(iter(self.parameters.values())).device if device is None else device))
        self.module_names = {id(module): name for name, module in model.named_modules()}
        self.places = [  # (registry, key, tensor, qualified name) of each registered tensor
            (registry, key, tensor, f"{name}.{key}".lstrip("."))
            for name, module in model.named_modules()
            for registry in (module._parameters, module._buffers)
            for key, tensor in registry.items()
            if tensor is not None
        ]
        self.previous: dict[str, Tensor] = {}

    def record(self, seed: int) -> Recording:
        """Record one step, with the generators of Python and NumPy seeded by `seed`."""
        random.seed(seed)
        np.random.seed(seed)
        registered = {
            tensor.untyped_storage()._cdata: name for name, tensor in {**self.buffers, **self.parameters}.items()
        }
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        recorder = Recorder(fake_mode, registered)
        with _surroundings(self.device.type), fake_mode:
            tensors, buffers = self._fakes()
            persistents = _persistents(tensors, buffers, self.spec, recorder)
            inputs = [recorder.slot(tensor) for tensor in (*tensors.inputs, *tensors.targets)]
            learning_rate = None if tensors.learning_rate is None else recorder.slot(tensors.learning_rate)
            recorder.started = len(recorder.storages)
            fakes = {**tensors.parameters, **buffers}
            slots = {name: recorder.slot(fake) for name, fake in fakes.items()}
            self._substitute(fakes)
            with _errors_explained(), _modules_followed(recorder, self.module_names), recorder:
                result = self.run(self.model, tensors, self.spec, recorder)
                self._keep_buffers(fakes, buffers, slots, recorder)
            recorder.check_end()
            if self.state.draws():
                hint = f"Draw them with PyTorch, torch.rand for example. {PLAIN}"
                raise CaptureError("the model draws random numbers from a generator of its own", hint)
        for constant in recorder.constants.values():
            entry = Persistent(
                recorder.values[constant.slot].tensor, constant.slot, Kind.CONSTANT, constant=constant.value
            )
            persistents.append(entry)
        names = [f"input{place}" for place in range(len(self.inputs))]
        names += [f"target{place}" for place in range(len(self.targets))]
        return Recording(
            records=recorder.records,
            values=recorder.values,
            tensor_bytes=[storage.nbytes() for storage in recorder.storages],
            persistents=persistents,
            inputs=tuple(inputs),
            input_names=tuple(names),
            learning_rate=learning_rate,
            loss=None if result.loss is None else recorder.slot(result.loss),
            outputs=tuple(recorder.slot(output) for output in result.outputs),
            gradients={recorder.slot(gradient): name for name, gradient in result.gradients.items()},
            device=self.device,
        )

    def _fakes(self) -> tuple[training_step.StepTensors, dict[str, Tensor]]:
        """Return fake tensors for everything with which the step starts, and those of the buffers by name."""
        parameters = {name: self._fake_parameter(real) for name, real in self.parameters.items()}
        kept = optimizers.states(self.spec.optimizer)
        tensors = training_step.StepTensors(
            parameters=parameters,
            states={
                name: {spec.key: optimizers.make_state(spec, parameter) for spec in kept}
                for name, parameter in parameters.items()
                if parameter.requires_grad and self.trains
            },
            inputs=tuple(self._fake(real) for real in self.inputs),
            targets=tuple(self._fake(real) for real in self.targets),
            learning_rate=torch.empty((), dtype=torch.float64, device="cpu") if self.trains else None,
        )
        return tensors, {name: self._fake(real) for name, real in self.buffers.items()}

    def _fake(self, real: Tensor) -> Tensor:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=self.device)

    def _fake_parameter(self, real: nn.Parameter) -> nn.Parameter:
        fake = nn.Parameter(self._fake(real), requires_grad=real.requires_grad)
        for name, value in vars(real).items():
            setattr(fake, name, value)
        for hook in (real._backward_hooks or {}).values():
            fake.register_hook(hook)
        return fake

    def _substitute(self, fakes: dict[str, Tensor]) -> None:
        """Replace the model's own tensors, or those of the last recording, by fake tensors."""
        named = {id(real): name for name, real in {**self.buffers, **self.parameters}.items()}
        by_id = {number: fakes[name] for number, name in named.items()}
        by_id |= {id(fake): fakes[name] for name, fake in self.previous.items()}
        self.state.substitute(by_id)
        for registry, key, real, _ in self.places:
            registry[key] = by_id[id(real)]
        self.previous = fakes

    def _keep_buffers(
        self, fakes: dict[str, Tensor], buffers: dict[str, Tensor], slots: dict[str, int], recorder: Recorder
    ) -> None:
        """Copy the new value of each buffer that the model has reassigned into the buffer, at the end of the step.

        Raises CaptureError if a parameter was reassigned, or a buffer for which the copy would not be equivalent."""
        named = {id(real): name for name, real in {**self.buffers, **self.parameters}.items()}
        now: dict[str, list[Any]] = {}
        for registry, key, real, _ in self.places:
            now.setdefault(named[id(real)], []).append(registry.get(key))
        for name, fake in fakes.items():
            slot = slots[name]
            new = now[name][0]
            if name not in buffers and (new is not fake or recorder.slot(fake) != slot):
                hint = f"Change parameters in place, under torch.no_grad(). {PLAIN}"
                raise CaptureError(f'the model replaces its parameter "{name}" in forward', hint)
            if recorder.slot(fake) != slot or any(other is not new for other in now[name]):
                raise _buffer_error(name)
            if new is not fake:
                self._keep_buffer(name, fake, new, recorder)

    def _keep_buffer(self, name: str, buffer: Tensor, new: Any, recorder: Recorder) -> None:
        if not isinstance(new, Tensor) or new.requires_grad:
            raise _buffer_error(name)
        if (new.shape, new.dtype, new.device) != (buffer.shape, buffer.dtype, buffer.device):
            raise _buffer_error(name)
        if recorder.knows(new) and recorder.tensor(new) < recorder.started:
            if recorder.slot(new) != recorder.slot(buffer):
                raise _buffer_error(name)
        else:
            with torch.no_grad():
                buffer.copy_(new)


def _buffer_error(name: str) -> CaptureError:
    hint = f"Give it a detached tensor of the same shape and type, or change it in place with copy_(). {PLAIN}"
    return CaptureError(f'the model assigns its buffer "{name}" in a way that cannot be captured', hint)


def _persistents(
    tensors: training_step.StepTensors, buffers: dict[str, Tensor], spec: StepSpec, recorder: Recorder
) -> list[Persistent]:
    """Enter a step's persistent tensors into the recorder and return them: parameters, buffers, optimizer state."""
    initial = {state.key: state.initial for state in optimizers.states(spec.optimizer)}
    entries = []

    def add(tensor: Tensor, kind: Kind, name: str, key: str = "") -> None:
        slot = recorder.slot(tensor)
        entries.append(Persistent(recorder.values[slot].tensor, slot, kind, name, key, initial.get(key, 0.0)))

    for name, parameter in tensors.parameters.items():
        add(parameter, Kind.PARAMETER, name)
    for name, buffer in buffers.items():
        add(buffer, Kind.BUFFER, name)
    for name, state in tensors.states.items():
        for key, tensor in state.items():
            add(tensor, Kind.OPTIMIZER_STATE, name, key)
    return entries


@contextmanager
def _surroundings(device_type: str) -> Iterator[None]:
    """Make a step independent of the caller's gradient mode, autocast, anomaly detection and compiler."""
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
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _modules_followed(recorder: Recorder, names: dict[int, str]) -> Iterator[None]:
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
def _errors_explained() -> Iterator[None]:
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


def _compare(first: Recording, second: Recording) -> None:
    """Raise CaptureError unless the recordings of two calls of the model are the same."""
    for one, two in zip(first.records, second.records, strict=False):
        if repr(one.call) != repr(two.call):
            raise _difference(one.source or two.source)
    if len(first.records) != len(second.records):
        longer = max(first.records, second.records, key=len)
        raise _difference(longer[min(len(first.records), len(second.records))].source)
    parts = ("values", "tensor_bytes", "inputs", "learning_rate", "loss", "outputs", "gradients")
    if any(getattr(first, part) != getattr(second, part) for part in parts):
        raise _difference("")
    for a, b in zip(first.persistents, second.persistents, strict=True):
        if a.constant is not None and b.constant is not None and not _same_bytes(a.constant, b.constant):
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
    return CaptureError("the model does something else each time it is called", hint, source=source or None)


def _same_bytes(one: Tensor, two: Tensor) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)

    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(raw(one), raw(two))
