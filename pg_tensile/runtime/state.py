"""The persistent tensors of a job: parameters, buffers, optimizer state, constants, wherever they are at the moment.

They are loaded straight into the state that the plan starts from, read from their host copies where they are off the
device, and go back into the model when the executor is closed. Nothing here reads a storage that has been emptied
(design.md section 6, "Saving while state is out").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from pg_tensile.capture.captured import Captured, Persistent, copy_into, value_of
from pg_tensile.capture.spec import StepSpec
from pg_tensile.eager import make_optimizer
from pg_tensile.errors import CheckpointError
from pg_tensile.plan import Boundary
from pg_tensile.runtime.base import Device
from pg_tensile.runtime.held import Bound, bind
from pg_tensile.runtime.program import Functions, Values
from pg_tensile.runtime.registry import Registry
from pg_tensile.runtime.swapper import Swapper, bytes_of
from pg_tensile.trace import Kind


class TrainingState(NamedTuple):
    """What a job is made of between two steps, in memory of its own on the CPU.

    `model`: as `Module.state_dict()` gives it. `optimizer`: by the parameter's name and the state's key (exp_avg, …),
    as torch.optim keeps it for that parameter."""

    model: dict[str, Any]
    optimizer: dict[str, dict[str, torch.Tensor]]


class State:
    """The persistent tensors of one executor. The caller sees to it that no iteration is under way, and that what
    touches device memory happens in the executor's context."""

    def __init__(
        self, captured: Captured, model: nn.Module, device: Device, swapper: Swapper, registry: Registry, values: Values
    ) -> None:
        self._captured = captured
        self._model = model
        self._device = device
        self._swapper = swapper
        self._registry = registry
        self._values = values
        self._bound: tuple[Bound, ...] = bind(captured, model)
        self._loaded: list[Bound] = []
        self._brought: list[int] = []  # by `lend`

    # ---- loading ----

    def load(self, functions: Functions, wanted: Boundary, places: Mapping[int, torch.Tensor]) -> None:
        """Makes every tensor and puts it where `wanted` has it; `places`: the host copies'. From here on the model's
        tensors are held. Raises OutOfDeviceMemoryError."""
        bound = {one.persistent.tensor: one for one in self._bound}
        for persistent in self._captured.persistents:
            tensor = persistent.tensor
            value = value_of(persistent, self._captured, self._model)
            self._values[persistent.slot] = value
            functions.make_persistent_views(tensor, self._values)
            size = self._size(persistent)
            if tensor in wanted.device:
                self._registry.add(tensor, size, partial("loading {}".format, persistent.name))
            if tensor in wanted.host:
                self._swapper.copies[tensor] = places[tensor]
                places[tensor].copy_(bytes_of(value.untyped_storage()))
            if tensor in bound:
                self._loaded.append(bound[tensor])
                bound[tensor].tensor.data = value
                bound[tensor].hold()
            if tensor not in wanted.device:
                self._swapper.empty(tensor)

    def _size(self, persistent: Persistent) -> int:
        return int(self._captured.trace.tensor_bytes[persistent.tensor])

    # ---- reading and writing ----

    def _read(self, persistent: Persistent) -> torch.Tensor:
        """A copy on the CPU, in the layout of the value."""
        tensor, value = persistent.tensor, self._captured.values[persistent.slot]
        if tensor not in self._swapper.shells:
            here = self._values[persistent.slot]
            copy = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
            copy_into(copy, here)
            return copy
        storage = self._swapper.copies[tensor].clone().untyped_storage()
        return torch.empty(0, dtype=value.dtype, device="cpu").set_(storage, value.offset, value.shape, value.stride)

    def _write(self, persistent: Persistent, source: torch.Tensor) -> None:
        """Sets the tensor on the device, its host copy, or both."""
        tensor, value = persistent.tensor, self._captured.values[persistent.slot]
        if tensor not in self._swapper.shells:
            copy_into(self._values[persistent.slot], source.to(self._values[persistent.slot].device))
            self._refresh_copy(tensor)
        else:
            staged = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
            copy_into(staged, source)
            self._swapper.copies[tensor].copy_(bytes_of(staged.untyped_storage()))

    def _refresh_copy(self, tensor: int) -> None:
        if tensor in self._swapper.copies:
            self._swapper.copies[tensor].copy_(bytes_of(self._swapper.storage(tensor)))

    def read(self) -> TrainingState:
        copies = {one.persistent.tensor: self._read(one.persistent) for one in self._bound}
        with self._lent(copies):
            model = dict(self._model.state_dict())
        own = {copy.untyped_storage()._cdata for copy in copies.values()}
        for name, value in model.items():  # what the iteration does not use is still the model's
            if not (isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in own):
                model[name] = _copied(value)
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for persistent in self._captured.persistents:
            if persistent.kind == Kind.OPTIMIZER_STATE:
                optimizer.setdefault(persistent.name, {})[persistent.key] = self._read(persistent)
        return TrainingState(model, optimizer)

    def write(self, state: TrainingState) -> None:
        """Raises CheckpointError, having changed nothing that the iteration uses, if the state is not this job's."""
        states = [p for p in self._captured.persistents if p.kind == Kind.OPTIMIZER_STATE]
        self._check_optimizer(states, state.optimizer)
        copies = {one.persistent.tensor: self._read(one.persistent) for one in self._bound}
        with self._lent(copies):
            try:
                self._model.load_state_dict(state.model)
            except (RuntimeError, TypeError, AttributeError) as error:
                raise CheckpointError(f"the state does not fit the model: {error}") from None
        for one in self._bound:
            self._write(one.persistent, copies[one.persistent.tensor])
        for persistent in states:
            saved = state.optimizer.get(persistent.name, {}).get(persistent.key)
            value = self._captured.values[persistent.slot]
            fresh = torch.full(value.shape, persistent.initial, dtype=value.dtype, device="cpu")
            self._write(persistent, fresh if saved is None else saved)

    def _check_optimizer(self, states: list[Persistent], saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """A parameter without any state starts anew, as in torch.optim; half a state is an error."""
        expected = {(persistent.name, persistent.key): persistent for persistent in states}
        for name, keys in saved.items():
            for key, tensor in keys.items():
                persistent = expected.get((name, key))
                if persistent is None:
                    raise CheckpointError(f'the optimizer keeps no "{key}" of a parameter "{name}"')
                shape = self._captured.values[persistent.slot].shape
                if tuple(tensor.shape) != shape:
                    raise CheckpointError(f'"{key}" of "{name}" has shape {list(tensor.shape)}, not {list(shape)}')
        for name, key in expected:
            if name in saved and saved[name] and key not in saved[name]:
                raise CheckpointError(f'the state of the optimizer lacks "{key}" of "{name}"')

    # ---- lending the model ----

    @contextlib.contextmanager
    def _lent(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """The model is usable, with these tensors (by number in the trace) in the places of its own."""
        try:
            for one in self._bound:
                one.release()
                one.tensor.data = tensors[one.persistent.tensor]
            yield
        finally:
            for one in self._bound:
                one.release()
                one.tensor.data = self._own(one.persistent)
                one.hold()

    def _own(self, persistent: Persistent) -> torch.Tensor:
        """The value that the iteration works on; empty while it is away."""
        shell = self._swapper.shells.get(persistent.tensor)
        return self._values[persistent.slot] if shell is None else shell.values[0]

    def lend(self) -> None:
        """Brings the model's tensors in and makes the model usable. Raises OutOfDeviceMemoryError, nothing done."""
        self._brought.clear()
        try:
            for tensor in [one.persistent.tensor for one in self._bound]:
                if tensor in self._swapper.shells:
                    self._swapper.bring_in(tensor, lambda: "resident()")
                    self._brought.append(tensor)
        except BaseException:
            self._send_away()
            raise
        for one in self._bound:
            one.release()

    def take_back(self) -> None:
        """The end of `lend`: what was changed in the model meanwhile is kept."""
        for one in self._bound:
            own = self._values[one.persistent.slot]
            one.release()
            if one.tensor.data_ptr() != own.data_ptr():
                copy_into(own, one.tensor.detach().to(own.device))
                one.tensor.data = own
            one.hold()
            self._refresh_copy(one.persistent.tensor)
        self._send_away()

    def _send_away(self) -> None:
        while self._brought:
            self._swapper.empty(self._brought.pop())

    def give_back(self) -> None:
        """Everything goes back into the model, to the devices where it was."""
        while self._loaded:
            one = self._loaded[-1]
            tensor = one.persistent.tensor
            if tensor in self._swapper.shells:
                value = self._read(one.persistent).to(one.device)
            else:
                value = self._values[one.persistent.slot].to(one.device)
            one.release()
            one.tensor.data = value
            self._loaded.pop()


# ---- to and from torch.optim -----------------------------------------------------------------------------------------


def optimizer_state_dict(state: TrainingState, model: nn.Module, spec: StepSpec) -> dict[str, Any]:
    """The optimizer's state as `state_dict()` of eager.py's optimizer for `model` has it."""
    result = make_optimizer(model, spec.optimizer).state_dict()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    result["state"] = {place: state.optimizer[name] for place, name in enumerate(names) if name in state.optimizer}
    return result


def training_state(model: nn.Module, optimizer: Optimizer) -> TrainingState:
    """The state of a job that eager.py has trained, in memory of its own on the CPU."""
    weights = {name: _copied(value) for name, value in model.state_dict().items()}
    states = {
        name: {key: _copied(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if optimizer.state.get(parameter)
    }
    return TrainingState(weights, states)


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
