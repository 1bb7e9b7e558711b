"""Persistent tensors of a job: parameters, buffers, optimizer state and constants, on the device or on the host.

They are loaded directly into the state that the plan starts from, read from their host copies where they are off the
device, and returned to the model when the executor is closed. Nothing here reads a storage that has been emptied.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pg_tensile.errors import CheckpointError, ExecutorError
from pg_tensile.execution.capture.captured import Captured, Persistent, Value, copy_into, value_of
from pg_tensile.execution.raw_bytes import raw_bytes
from pg_tensile.execution.runtime.compressed_copies import HostCopy
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.lent_model import Bound, bind
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.swapper import Swapper, bytes_of
from pg_tensile.planning.plan.plan import Boundary
from pg_tensile.planning.trace.trace import Kind


class TrainingState(NamedTuple):
    """State of a job between two steps, copied to the CPU.

    `model` is as `Module.state_dict()` returns it. `optimizer` maps the parameter's name and the state's key (exp_avg,
    …) to the tensor that torch.optim keeps for that parameter."""

    model: dict[str, Any]
    optimizer: dict[str, dict[str, torch.Tensor]]


Identity = tuple[Kind, str, str, bytes, int]  # the last two for constants: digest, and count of earlier equals


class Layout(NamedTuple):
    """A persistent tensor's first value, without its index in the trace, and its bytes on the device."""

    value: Value
    bytes: int


class State:
    """The persistent tensors of one executor, by key: all that its graphs use, each once.

    The caller ensures that no iteration is running, and that methods that touch device memory are called in the
    executor's context."""

    def __init__(self, model: nn.Module, device: Device, swapper: Swapper, registry: Registry) -> None:
        self._model = model
        self._device = device
        self._swapper = swapper
        self._registry = registry
        self._persistents: dict[int, Persistent] = {}  # by key; the field `tensor` is the key as well
        self._layouts: dict[int, Layout] = {}
        self._keys: dict[Identity, int] = {}
        self._count = 0  # the first free key
        self.settled_for: Graph | None = None  # the graph in whose plan's boundary state all tensors are
        self._bound: list[Bound] = []
        self._brought: list[int] = []  # keys of the tensors that `lend` swapped in

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes on the device of each persistent tensor, by key."""
        return {key: size for key, (_, size) in self._layouts.items()}

    def knows(self, key: int) -> bool:
        """Return whether `key` is that of a persistent tensor."""
        return key in self._persistents

    # ---- loading ----

    def number(self, captured: Captured) -> list[int]:
        """Return the key of each tensor of a graph.

        Persistent tensors loaded for an earlier graph keep their keys, all other tensors receive new ones. Raises
        ExecutorError for a persistent tensor whose layout differs from the one loaded."""
        keys = list(range(self._count, self._count + captured.trace.tensor_count))
        for persistent, identity in zip(captured.persistents, _identities(captured), strict=True):
            key = self._keys.get(identity)
            if key is not None:
                keys[persistent.tensor] = key
                if self._layouts[key] != _layout(captured, persistent):
                    message = f'"{persistent.name}" was captured in another layout than in the first graph'
                    raise ExecutorError(message, hint="Capture all graphs of the same model for the same device.")
        return keys

    def load(self, graph: Graph, wanted: Boundary, memory: Mapping[int, torch.Tensor]) -> None:
        """Create a graph's persistent tensors that are not loaded yet, and put each where `wanted` (keys) has it.

        `memory` is the host memory for the copies, by key. From here on the model's tensors are held. Raises
        OutOfDeviceMemoryError, and ExecutorError as `bind` does."""
        captured, values, swapper = graph.captured, graph.values, self._swapper
        new = [entry for entry in captured.persistents if graph.keys[entry.tensor] not in self._persistents]
        bound = {entry.persistent.tensor: entry for entry in bind(captured, new, self._model)}
        self._count = max(self._count, *(key + 1 for key in graph.keys))
        for tensor in np.flatnonzero(~captured.trace.persistent).tolist():
            swapper.positions[graph.keys[tensor]] = [(values, slot) for slot in graph.functions.slots[tensor]]
        for persistent, identity in zip(captured.persistents, _identities(captured), strict=True):
            key, slots = graph.keys[persistent.tensor], graph.functions.slots[persistent.tensor]
            make_views = partial(graph.functions.make_persistent_views, persistent.tensor, values)
            if key in self._persistents:
                swapper.join(key, values, slots, make_views)
                continue
            swapper.positions[key] = [(values, slot) for slot in slots]
            values[persistent.slot] = value = value_of(persistent, captured, self._model)
            make_views()
            if key in wanted.device:
                size = int(captured.trace.tensor_bytes[persistent.tensor])
                self._registry.add(key, size, partial("loading {}".format, persistent.name))
            if key in wanted.host:
                swapper.copies[key] = HostCopy(memory[key])
                memory[key].copy_(bytes_of(value.untyped_storage()))
            keyed = persistent._replace(tensor=key)
            if persistent.tensor in bound:
                entry = bound[persistent.tensor]._replace(persistent=keyed)
                self._bound.append(entry)
                entry.tensor.data = value
                entry.hold()
            if key not in wanted.device:
                swapper.empty(key)
            self._persistents[key], self._layouts[key] = keyed, _layout(captured, persistent)
            self._keys[identity] = key

    # ---- reading and writing ----

    def read_tensor(self, tensor: int) -> torch.Tensor:
        """Return a copy of a tensor on the CPU, in the layout of its value."""
        value = self._layouts[tensor].value
        if tensor not in self._swapper.shells:
            copy = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
            copy_into(copy, self._swapper.value(tensor))
            return copy
        storage = self._swapper.copies[tensor].read().untyped_storage()
        return torch.empty(0, dtype=value.dtype, device="cpu").set_(storage, value.offset, value.shape, value.stride)

    def _write(self, persistent: Persistent, source: torch.Tensor) -> None:
        """Overwrite the tensor on the device, its host copy, or both."""
        tensor, value = persistent.tensor, self._layouts[persistent.tensor].value
        if tensor not in self._swapper.shells:
            own = self._swapper.value(tensor)
            copy_into(own, source.to(own.device))
            self._refresh_copy(tensor)
        else:
            staged = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
            copy_into(staged, source)
            self._set_copy(tensor, bytes_of(staged.untyped_storage()))

    def _refresh_copy(self, tensor: int) -> None:
        if tensor in self._swapper.copies:
            self._set_copy(tensor, bytes_of(self._swapper.storage(tensor)))

    def _set_copy(self, tensor: int, raw: torch.Tensor) -> None:
        """Overwrite the host copy; a compressed copy is replaced by a plain one."""
        memory = self._swapper.copies[tensor].memory
        memory.copy_(raw)
        self._swapper.copies[tensor] = HostCopy(memory)

    def read(self) -> TrainingState:
        copies = {bound.persistent.tensor: self.read_tensor(bound.persistent.tensor) for bound in self._bound}
        with self._lent(copies):
            model = dict(self._model.state_dict())
        own = {copy.untyped_storage()._cdata for copy in copies.values()}
        for name, value in model.items():  # tensors that no graph uses are still the model's own
            if not (isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in own):
                model[name] = _copied(value)
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for persistent in self._persistents.values():
            if persistent.kind == Kind.OPTIMIZER_STATE:
                optimizer.setdefault(persistent.name, {})[persistent.key] = self.read_tensor(persistent.tensor)
        return TrainingState(model, optimizer)

    def write(self, state: TrainingState) -> None:
        """Overwrite weights and optimizer state.

        Raises CheckpointError if the state does not fit this job; no tensor that the graphs use has changed then."""
        states = [p for p in self._persistents.values() if p.kind == Kind.OPTIMIZER_STATE]
        self._check_optimizer(states, state.optimizer)
        copies = {bound.persistent.tensor: self.read_tensor(bound.persistent.tensor) for bound in self._bound}
        with self._lent(copies):
            try:
                self._model.load_state_dict(state.model)
            except (RuntimeError, TypeError, AttributeError) as error:
                raise CheckpointError(f"the state does not fit the model: {error}") from None
        for bound in self._bound:
            self._write(bound.persistent, copies[bound.persistent.tensor])
        for persistent in states:
            saved = state.optimizer.get(persistent.name, {}).get(persistent.key)
            value = self._layouts[persistent.tensor].value
            fresh = torch.full(value.shape, persistent.initial, dtype=value.dtype, device="cpu")
            self._write(persistent, fresh if saved is None else saved)

    def _check_optimizer(self, states: list[Persistent], saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Check names, keys and shapes; raise CheckpointError if they do not fit.

        A parameter without any saved state starts afresh, as in torch.optim; an incomplete state is an error."""
        expected = {(persistent.name, persistent.key): persistent for persistent in states}
        for name, keys in saved.items():
            for key, tensor in keys.items():
                persistent = expected.get((name, key))
                if persistent is None:
                    raise CheckpointError(f'the optimizer keeps no "{key}" of a parameter "{name}"')
                shape = self._layouts[persistent.tensor].value.shape
                if tuple(tensor.shape) != shape:
                    raise CheckpointError(f'"{key}" of "{name}" has shape {list(tensor.shape)}, not {list(shape)}')
        for name, key in expected:
            if name in saved and saved[name] and key not in saved[name]:
                raise CheckpointError(f'the state of the optimizer lacks "{key}" of "{name}"')

    # ---- lending the model ----

    @contextlib.contextmanager
    def _lent(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Make the model usable inside, with `tensors` (by key) in place of its own."""
        try:
            for bound in self._bound:
                bound.release()
                bound.tensor.data = tensors[bound.persistent.tensor]
            yield
        finally:
            for bound in self._bound:
                bound.release()
                bound.tensor.data = self._swapper.value(bound.persistent.tensor)
                bound.hold()

    def lend(self) -> None:
        """Swap the model's tensors in and make the model usable. Raises OutOfDeviceMemoryError without any effect."""
        self._brought.clear()
        try:
            for tensor in [bound.persistent.tensor for bound in self._bound]:
                if tensor in self._swapper.shells:
                    self._swapper.bring_in(tensor, lambda: "resident()")
                    self._brought.append(tensor)
        except BaseException:
            self._send_away()
            raise
        for bound in self._bound:
            bound.release()

    def take_back(self) -> None:
        """End what `lend` began; changes made to the model's tensors meanwhile are kept."""
        for bound in self._bound:
            own = self._swapper.value(bound.persistent.tensor)
            bound.release()
            if bound.tensor.data_ptr() != own.data_ptr():
                copy_into(own, bound.tensor.detach().to(own.device))
                bound.tensor.data = own
            bound.hold()
            self._refresh_copy(bound.persistent.tensor)
        self._send_away()

    def _send_away(self) -> None:
        while self._brought:
            self._swapper.empty(self._brought.pop())

    def give_back(self) -> None:
        """Give all parameters and buffers back to the model, on the devices where they were."""
        while self._bound:
            bound = self._bound[-1]
            tensor = bound.persistent.tensor
            value = self.read_tensor(tensor) if tensor in self._swapper.shells else self._swapper.value(tensor)
            bound.release()
            bound.tensor.data = value.to(bound.device)
            self._bound.pop()


# ---- from torch.optim ------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizer: Optimizer) -> TrainingState:
    """Return the state of a job that eager.py has trained, copied to the CPU."""
    weights = {name: _copied(value) for name, value in model.state_dict().items()}
    states = {
        name: {key: _copied(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if optimizer.state.get(parameter)
    }
    return TrainingState(weights, states)


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _layout(captured: Captured, persistent: Persistent) -> Layout:
    value = captured.values[persistent.slot]._replace(tensor=-1)
    return Layout(value, int(captured.trace.tensor_bytes[persistent.tensor]))


def counterparts(first: Captured, other: Captured) -> dict[int, int]:
    """Return, by persistent tensor of `other`, the same tensor of `first`; those that only `other` has are absent."""
    numbers = {
        identity: persistent.tensor for persistent, identity in zip(first.persistents, _identities(first), strict=True)
    }
    return {
        persistent.tensor: numbers[identity]
        for persistent, identity in zip(other.persistents, _identities(other), strict=True)
        if identity in numbers
    }


def _identities(captured: Captured) -> list[Identity]:
    """Return the identity by which each persistent tensor is recognised in another graph.

    It consists of kind, name and key, and for a constant of a digest of its layout and bytes."""
    seen: Counter[Identity] = Counter()
    identities = []
    for persistent in captured.persistents:
        digest = b""
        if persistent.constant is not None:
            raw = raw_bytes(persistent.constant.cpu())
            layout = repr(_layout(captured, persistent))
            digest = hashlib.blake2b(raw.numpy().tobytes() + layout.encode()).digest()
        identity = (persistent.kind, persistent.name, persistent.key, digest, 0)
        identities.append((*identity[:4], seen[identity]))
        seen[identity] += 1
    return identities
