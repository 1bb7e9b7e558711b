"""Recorder of every call of a PyTorch operator that a step makes on fake tensors, below autograd.

Tensors are identified by storage and layout, not by their Python object: whichever objects autograd, hooks or `.data`
create, two tensors are the same value if they view the same memory with the same layout. PyTorch's make_fx would not
do: it tells no storages, phases, modules and lines of the model, and cannot refuse a call at the place of its cause.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import rnn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture.captured import Call, Slot, Value, flat_results
from pg_tensile.execution.capture.fake_results import Arguments, Layout, layout_number, new_fake
from pg_tensile.execution.capture.fakes import fake_call
from pg_tensile.execution.capture.schema import is_random, mutates
from pg_tensile.execution.capture.sources import is_running, running_line
from pg_tensile.planning.trace.trace import Phase

aten = torch.ops.aten
PLAIN = "Or train it with the policy none, which runs the model as it is."
DISABLED = torch.Tensor.__torch_dispatch__  # attribute of a class without a dispatcher of its own
LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
# in-place operators on the layout → operators with the same result that leave their argument unchanged
AS_VIEWS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.swapaxes_.default: aten.transpose.int,
    aten.swapdims_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
}


class Record(NamedTuple):
    """One call with its source and floating point operations. `is_view`: its result is a view of existing memory."""

    call: Call
    is_view: bool
    phase: Phase
    module: str
    source: str
    flops: int


class Constant(NamedTuple):
    """A real tensor that the step reads (kept alive), a copy of its value, its slot and the fake tensor for it."""

    tensor: torch.Tensor
    value: torch.Tensor
    slot: int
    fake: torch.Tensor
    source: str


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operators; to be entered inside `fake_mode`.

    `registered`: names of the model's real parameters and buffers by the address of their storage."""

    def __init__(self, fake_mode: FakeTensorMode, registered: dict[int, str]) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._caches = fake_mode.cache_enabled
        self.records: list[Record] = []
        self.values: list[Value] = []
        self._layout_numbers: list[int] = []  # by slot
        self.storages: list[torch.UntypedStorage] = []  # by tensor; kept alive, so that no address is reused
        self.constants: dict[int, Constant] = {}  # by id of the real tensor
        self.started = 0  # number of tensors when the step starts
        self.phase = Phase.FORWARD
        self.modules: list[str] = []  # names of the modules that run now, the innermost last
        self._registered = registered
        self._tensors: dict[int, int] = {}  # by address of the storage
        self._slots: dict[tuple[Any, ...], int] = {}  # by layout
        self._made_by: dict[int, tuple[str, str]] = {}  # autograd's sequence number → module and source of the forward
        self._composite: dict[Any, bool] = {}
        self._drawn_states = drawn_states()
        self._torch_state = _torch_state()

    # ---- values ----

    def slot(self, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor, a new one for a value not seen before."""
        layout = _layout(tensor)
        slot = self._slots.get(layout)
        if slot is None:
            storage = tensor.untyped_storage()
            index = self._tensors.setdefault(storage._cdata, len(self.storages))
            if index == len(self.storages):
                self.storages.append(storage)
            _, dtype, shape, stride, offset, *_ = layout
            device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
            self.values.append(Value(index, dtype, tuple(shape), tuple(stride), int(offset), device))
            self._layout_numbers.append(layout_number(Layout(storage.nbytes(), device, *layout[1:])))
            slot = self._slots[layout] = len(self.values) - 1
        return slot

    def tensor(self, tensor: torch.Tensor) -> int:
        """Return the index of the tensor, i.e. the storage, that a value views."""
        return self.values[self.slot(tensor)].tensor

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a value of this step."""
        return _layout(tensor) in self._slots

    def _operand(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return the slot of an argument, and the tensor with which to call the operator."""
        _check_tensor(tensor)
        if not isinstance(tensor, FakeTensor):
            constant = self.constants.get(id(tensor)) or self._add_constant(tensor)
            return constant.slot, constant.fake
        slot = self._slots.get(_layout(tensor))
        if slot is None:
            hint = f"Keep what lasts from step to step in a registered buffer and change that in place. {PLAIN}"
            raise self._error("the model uses a tensor that its last call has left behind", hint)
        return slot, tensor

    def _add_constant(self, tensor: torch.Tensor) -> Constant:
        name = self._registered.get(tensor.untyped_storage()._cdata)
        if name is not None:
            hint = "Reach parameters and buffers through the modules that they are registered with."
            raise self._error(f'"{name}" is used in another way than as a registered tensor', hint)
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            hint = "Make it an attribute of a module, or put it into a ParameterList or ParameterDict."
            raise self._error("the model trains a tensor that is not one of its registered parameters", hint)
        with no_dispatch():
            value = tensor.detach().clone()
        fake = new_fake(self._fake_mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        constant = self.constants[id(tensor)] = Constant(tensor, value, self.slot(fake), fake, running_line())
        return constant

    def _error(self, message: str, hint: str) -> CaptureError:
        return CaptureError(message, hint, source=running_line() or None)

    def _recurrent_error(self) -> CaptureError:
        """Return the error for dropout that `recurrent.stacks_split` has not replaced, in a scripted module perhaps."""
        hint = f"Set its dropout to 0 and put dropout layers between one-layer networks. {PLAIN}"
        return self._error("dropout inside a recurrent network on CUDA cannot be captured", hint)

    # ---- calls ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
                return args[0].fake_device  # asked again and again
            return func(*args, **kwargs)
        if self._is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func in AS_VIEWS:
            return self._change_layout(func, args, kwargs)
        if func is aten.set_.source_Storage and is_running(rnn.__file__):
            return args[0]  # asked on CUDA whether the weights are one piece of memory; left empty, it means no
        slots: list[int] = []
        given = Arguments()
        template_args, call_args = self._operands(args, slots, given)
        template_kwargs, call_kwargs = {}, {}
        for name, argument in kwargs.items():
            given.add(name)
            template_kwargs[name], call_kwargs[name] = self._operands(argument, slots, given)
        if func in LIFTS:  # of a new tensor, which the fake mode converts; a copy, because it may be changed later
            func, call_args = aten.lift_fresh_copy.default, args
        self._check_call(func)
        returned = self._fake_call(func, call_args, call_kwargs, given)
        results = self._results(func, returned)
        if results is not None:
            flops = _flops(func, call_args, call_kwargs, returned)
            self._record(Call(func, template_args, template_kwargs, results), slots, flops)
        return returned

    def _fake_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments) -> Any:
        """Return the results of an operator on fake tensors."""
        key = given.key(func)
        if key is not None and (cached := given.cached(key, self._fake_mode)) is not None:
            return cached[0]
        # the fake mode's cache forgets that an operator may return one tensor twice
        self._fake_mode.cache_enabled = self._caches and len(func._schema.returns) == 1
        returned = fake_call(func, args, kwargs)
        if key is not None:
            given.remember(key, returned)
        return returned

    def _operands(self, argument: Any, slots: list[int], given: Arguments) -> tuple[Any, Any]:
        """Return an argument as a template and as passed to the operator; enter it into `slots` and `given`."""
        if isinstance(argument, torch.Tensor):
            slot, tensor = self._operand(argument)
            slots.append(slot)
            given.add_tensor(tensor, self._layout_numbers[slot], self.values[slot].tensor)
            return Slot(slot), tensor
        if isinstance(argument, (tuple, list)):
            given.add(len(argument))
            pairs = [self._operands(item, slots, given) for item in argument]
            kind = type(argument) if type(argument) in (tuple, list) else tuple
            return kind(pair[0] for pair in pairs), kind(pair[1] for pair in pairs)
        if isinstance(argument, torch.Generator):
            if is_running(rnn.__file__):  # cuDNN's code, for the seed of its dropout
                raise self._recurrent_error()
            hint = f"Use PyTorch's default generator, which is part of what a run saves. {PLAIN}"
            raise self._error("the model draws random numbers from a generator of its own", hint)
        given.add(argument)
        return argument, argument

    def _results(self, func: Any, returned: Any) -> tuple[int | None, ...] | None:
        """Return the slots that the call defines; None for a query that returns no tensor, whose answer is constant."""
        results: list[int | None] = []
        tensors = 0
        for item in flat_results(returned):
            if isinstance(item, torch.Tensor):
                _check_tensor(item)
                tensors += 1
            new = isinstance(item, torch.Tensor) and not self.knows(item)
            results.append(self.slot(item) if new else None)
        if not tensors and func._schema.returns and not mutates(func):
            return None
        return tuple(results)

    def _record(self, call: Call, slots: list[int], flops: int) -> None:
        old = {self.values[slot].tensor for slot in slots}
        new = [slot for slot in call.results if slot is not None]
        is_view = not mutates(call.target) and len(old) == 1 and bool(call.results)
        is_view = is_view and all(self.values[slot].tensor in old for slot in new)
        if is_view and not new:
            return  # a view that has a slot already
        module, source = self._place()
        if self.phase == Phase.FORWARD:
            self._check_draws(source)
        self.records.append(Record(call, is_view, self.phase, module, source, flops))

    def _change_layout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that changes only the layout of its argument as a view of the old layout."""
        slots: list[int] = []
        template_args, call_args = self._operands(args, slots, Arguments())
        returned = func(*call_args, **kwargs)
        results = tuple(self.slot(item) if not self.knows(item) else None for item in (returned,))
        self._record(Call(AS_VIEWS[func], template_args, kwargs, results), slots, 0)
        return returned

    def _is_composite(self, func: Any) -> bool:
        """Return whether the operator has no kernel but is composed of others, which are recorded instead."""
        composite = self._composite.get(func)
        if composite is None:
            has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
            composite = has_kernel("CompositeImplicitAutograd") and not (has_kernel("CPU") or has_kernel("CUDA"))
            self._composite[func] = composite
        return composite

    def _check_call(self, func: Any) -> None:
        if torch.Tag.inplace_view in func.tags:
            raise self._error(f"{func} changes the memory behind a tensor", f"Make a new tensor instead. {PLAIN}")
        if func is aten._cudnn_init_dropout_state.default:
            raise self._recurrent_error()
        if not is_random(func):
            return
        if _torch_state() != self._torch_state:
            raise self._error("the model seeds PyTorch's generator", f"Seed it once, before training. {PLAIN}")
        if self.phase == Phase.BACKWARD and (torch.is_grad_enabled() or self.modules):
            hint = f"Use torch.utils.checkpoint, or no recomputation at all: plans decide what is recomputed. {PLAIN}"
            raise self._error("the model repeats random operators of its forward in its backward", hint)

    def _check_draws(self, source: str) -> None:
        """Raise CaptureError if the model drew from Python or NumPy: the numbers would be the same in every step."""
        if drawn_states() != self._drawn_states:
            hint = f"Draw them with PyTorch, torch.rand for example. {PLAIN}"
            raise CaptureError("the model draws random numbers with Python or NumPy", hint, source=source or None)

    def check_end(self) -> None:
        """Raise CaptureError if a global generator is not in its state at the start."""
        self._check_draws("")
        if _torch_state() != self._torch_state:
            raise CaptureError("the model seeds PyTorch's generator", f"Seed it once, before training. {PLAIN}")

    # ---- source of a call ----

    def _place(self) -> tuple[str, str]:
        """Return module and line of the model that make the call; for a backward operator those of its forward."""
        source = running_line()
        node = _autograd_node()
        if node is not None:
            module, origin_source = self._made_by.get(node._sequence_nr(), ("", ""))
            return module, source or origin_source
        origin = self.modules[-1] if self.modules else "", source
        self._made_by.setdefault(_sequence_number() - 1, origin)
        return origin


def drawn_states() -> Any:
    """Return the states of the generators of Python and NumPy, whose draws PyTorch's dispatcher does not see."""
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[0], state[1].tobytes(), state[2:]


def _torch_state() -> bytes:
    with no_dispatch():
        return bytes(torch.default_generator.get_state().numpy())


def _autograd_node() -> Any:
    """Return the node of autograd's graph that runs now; None if there is none or this PyTorch cannot provide it."""
    current = getattr(torch._C, "_current_autograd_node", None)
    return current() if current else None


def _sequence_number() -> int:
    """Return the sequence number that autograd assigns to the next node; 0 if this PyTorch cannot provide it."""
    number = getattr(torch.autograd, "_get_sequence_nr", None)
    return number() if number else 0


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _check_tensor(tensor: torch.Tensor) -> None:
    kind = None
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.is_nested:
        kind = "nested"
    elif not isinstance(tensor, FakeTensor) and type(tensor).__torch_dispatch__ is not DISABLED:
        kind = type(tensor).__name__
    if kind:
        hint = f"Use ordinary dense tensors. {PLAIN}"
        raise CaptureError(f"tensors of type {kind} cannot be captured", hint, source=running_line() or None)


def _flops(func: Any, args: Any, kwargs: Any, returned: Any) -> int:
    """Return the floating point operations of a call, 0 if they are unknown."""
    count = FLOPS.get(func) or flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=returned))
    except (TypeError, ValueError, AssertionError, AttributeError, IndexError, RuntimeError):
        return 0  # shapes that the formula does not support


def _recurrent_flops(x: torch.Tensor, *weights: Any, times: int = 1, **kwargs: Any) -> int:
    """Return two operations for each weight of one layer and each step of each sequence, multiplied by `times`."""
    return 2 * times * x.shape[0] * x.shape[1] * (weights[0].numel() + weights[1].numel())


FLOPS: dict[Any, Callable[..., int]] = {  # formulas that PyTorch's registry lacks
    aten.mkldnn_rnn_layer.default: _recurrent_flops,
    aten.mkldnn_rnn_layer_backward.default: partial(_recurrent_flops, times=2),
}
