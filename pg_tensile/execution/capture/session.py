"""Session of a capture: recordings of steps of one model on fake tensors, which take the places of the model's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import optimizers, training_step
from pg_tensile.execution.capture.build import Recording
from pg_tensile.execution.capture.captured import Persistent
from pg_tensile.execution.capture.contexts import errors_explained, modules_followed, surroundings
from pg_tensile.execution.capture.fake_results import new_fake
from pg_tensile.execution.capture.recorder import PLAIN, Recorder
from pg_tensile.execution.capture.spec import StepSpec
from pg_tensile.execution.capture.state import ModelState
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.planning.trace.trace import Kind

Run = Callable[[nn.Module, training_step.StepTensors, StepSpec, Recorder], training_step.StepResult]


class Session:
    """Recorder of steps of one model; attributes set by one call are kept for the next, as in training."""

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
        first = next(iter((self.parameters or self.buffers).values()))
        self.device = choose_device(str(first.device if device is None else device))
        self.module_names = {id(module): name for name, module in model.named_modules()}
        self.registered = [  # (registry, key, tensor, qualified name) of each registered tensor
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
        names_by_storage = {
            tensor.untyped_storage()._cdata: name for name, tensor in {**self.buffers, **self.parameters}.items()
        }
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        recorder = Recorder(fake_mode, names_by_storage)
        with surroundings(self.device.type), fake_mode:
            tensors, buffers = self._fakes(fake_mode)
            persistents = _persistents(tensors, buffers, self.spec, recorder)
            inputs = [recorder.slot(tensor) for tensor in (*tensors.inputs, *tensors.targets)]
            learning_rate = None if tensors.learning_rate is None else recorder.slot(tensors.learning_rate)
            share = None if tensors.share is None else recorder.slot(tensors.share)
            recorder.started = len(recorder.storages)
            fakes = {**tensors.parameters, **buffers}
            slots = {name: recorder.slot(fake) for name, fake in fakes.items()}
            self._substitute(fakes)
            with errors_explained(), modules_followed(recorder, self.module_names), recorder:
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
        names = [f"input{number}" for number in range(len(self.inputs))]
        names += [f"target{number}" for number in range(len(self.targets))]
        return Recording(
            records=recorder.records,
            values=recorder.values,
            tensor_bytes=[storage.nbytes() for storage in recorder.storages],
            persistents=persistents,
            inputs=tuple(inputs),
            input_names=tuple(names),
            learning_rate=learning_rate,
            share=share,
            loss=None if result.loss is None else recorder.slot(result.loss),
            outputs=tuple(recorder.slot(output) for output in result.outputs),
            gradients={recorder.slot(gradient): name for name, gradient in result.gradients.items()},
            device=self.device,
        )

    def _fakes(self, mode: FakeTensorMode) -> tuple[training_step.StepTensors, dict[str, Tensor]]:
        """Return fake tensors for everything with which the step starts, and those of the buffers by name."""
        parameters = {name: self._fake_parameter(real, mode) for name, real in self.parameters.items()}
        kept = optimizers.states(self.spec.optimizer)
        tensors = training_step.StepTensors(
            parameters=parameters,
            states={
                name: {spec.key: _fake_state(spec, parameter, mode) for spec in kept}
                for name, parameter in parameters.items()
                if parameter.requires_grad and self.trains
            },
            inputs=tuple(self._fake(real, mode) for real in self.inputs),
            targets=tuple(self._fake(real, mode) for real in self.targets),
            learning_rate=_host_scalar(mode) if self.trains else None,
            share=_host_scalar(mode) if self.trains and self.spec.ranks is not None else None,
        )
        return tensors, {name: self._fake(real, mode) for name, real in self.buffers.items()}

    def _fake(self, real: Tensor, mode: FakeTensorMode) -> Tensor:
        return new_fake(mode, real.shape, real.stride(), real.dtype, self.device)

    def _fake_parameter(self, real: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
        fake: Any = self._fake(real, mode).requires_grad_(real.requires_grad)
        fake._is_param = True  # as nn.Parameter does with tensors of other types, but without a copy
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
        for registry, key, real, _ in self.registered:
            registry[key] = by_id[id(real)]
        self.previous = fakes

    def _keep_buffers(
        self, fakes: dict[str, Tensor], buffers: dict[str, Tensor], slots: dict[str, int], recorder: Recorder
    ) -> None:
        """Copy the new value of each buffer that the model has reassigned into the buffer, at the end of the step.

        Raises CaptureError if a parameter was reassigned, or a buffer for which the copy would not be equivalent."""
        named = {id(real): name for name, real in {**self.buffers, **self.parameters}.items()}
        now: dict[str, list[Any]] = {}
        for registry, key, real, _ in self.registered:
            now.setdefault(named[id(real)], []).append(registry.get(key))
        for name, fake in fakes.items():
            slot = slots[name]
            new = now[name][0]
            if name not in buffers and (new is not fake or recorder.slot(fake) != slot):
                hint = f"Change parameters in place, under torch.no_grad(). {PLAIN}"
                raise CaptureError(f'the model replaces its parameter "{name}" in forward', hint)
            if recorder.slot(fake) != slot or any(tensor is not new for tensor in now[name]):
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


def _host_scalar(mode: FakeTensorMode) -> Tensor:
    """Return a fake float64 without dimensions on the CPU, which kernels read on the host."""
    return new_fake(mode, (), (), torch.float64, torch.device("cpu"))


def _fake_state(spec: optimizers.StateSpec, parameter: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor for one entry of a parameter's optimizer state, like that of `optimizers.make_state`."""
    if spec.is_scalar:
        return new_fake(mode, (), (), torch.float32, parameter.device)
    if parameter.is_contiguous():
        return new_fake(mode, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
    return optimizers.make_state(spec, parameter)


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
