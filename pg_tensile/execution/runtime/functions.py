"""Operators of a captured iteration as Python functions over the list of values.

Each operator becomes one function, generated once per graph, so that executing it costs little more than the call
itself: as captured, and as executed again by a recompute event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pg_tensile.errors import ExecutorError
from pg_tensile.execution.capture.captured import Call, Captured, Slot, copy_into, empty_like_value, flat_results
from pg_tensile.execution.distributed.all_reduce import land
from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.trace.trace import Mode

Values = list[Any]  # by slot, None if not resident; after the slots: the inputs, then the copies returned
Function = Callable[[Values], None]


class Functions:
    """The operators of a captured iteration as functions over the list of values, and the layout of that list.

    `keys` is the key of each tensor; None means its index in the trace."""

    def __init__(self, captured: Captured, device: Device, keys: Sequence[int] | None = None) -> None:
        self.captured = captured
        self.keys = range(captured.trace.tensor_count) if keys is None else keys
        self._device = device
        self.slots = _slots_by_tensor(captured)
        # The inputs that the placeholder receives follow the slots, then the copies that the output operator makes.
        self.feed = len(captured.values)
        self.returned = self.feed + len(captured.given)
        self.size = self.returned + len(captured.returned)
        self._generator_states: dict[int, torch.Tensor] = {}  # by random operator that the plan recomputes
        self._recomputes: dict[tuple[int, int], Function] = {}
        source = _Source()
        for number, operator in enumerate(captured.operators):
            if operator.call is not None:
                source.define(f"operator_{number}", (operator.call, *operator.views))
        source.define("placeholder_views", captured.operators[0].views)
        for tensor, views in _views_by_tensor(captured).items():
            source.define(f"persistent_{tensor}", views)
        generated = source.compile()
        last = len(captured.operators) - 1
        self._persistent_views: dict[int, Function] = {
            persistent.tensor: generated[f"persistent_{persistent.tensor}"]
            for persistent in captured.persistents
            if f"persistent_{persistent.tensor}" in generated
        }
        self._placeholder_views: Function = generated["placeholder_views"]
        special: dict[int, Function] = {0: self._copy_inputs, last: self._copy_returned}
        self._plain = [special.get(number) or generated[f"operator_{number}"] for number in range(last + 1)]

    def make_persistent_views(self, tensor: int, values: Values) -> None:
        """Create all other values (views) on the storage of a persistent tensor from its first value."""
        if tensor in self._persistent_views:
            self._persistent_views[tensor](values)

    def plain(self, operator: int) -> Function:
        """Return the function of an operator as captured."""
        return self._plain[operator]

    def remembering(self, operator: int) -> Function:
        """Return the function of a random operator that is recomputed later; it saves the generator's state first."""
        function, device, states = self._plain[operator], self._device, self._generator_states

        def run(values: Values) -> None:
            states[operator] = device.generator_state()
            function(values)

        return run

    def landing(self, operator: int) -> Function:
        """Return the function of an operator that begins a collective, and waits for it: the plan moves the tensor."""
        function = self._plain[operator]

        def run(values: Values) -> None:
            function(values)
            land()

        return run

    def recompute(self, operator: int, tensor: int) -> Function:
        """Return the function that recomputes `tensor` by an operator.

        Other outputs are discarded, statistics are changed on scratch copies, and random numbers are those of the first
        execution; the generator's state is restored afterwards."""
        key = (operator, tensor)
        if key not in self._recomputes:
            self._recomputes[key] = self._make_recompute(operator, tensor)
        return self._recomputes[key]

    def _make_recompute(self, operator: int, tensor: int) -> Function:
        captured = self.captured
        realised, accessed = captured.operators[operator], captured.trace.operators[operator]
        assert realised.call is not None
        statistics = {access.tensor for access in accessed.accesses if access.mode == Mode.STATS} - {tensor}
        copied = {slot for changed in statistics for slot in self.slots[changed]}
        call, *views = (self._only(call, tensor) for call in (realised.call, *realised.views))
        source = _Source()
        source.define("recompute", (call, *(view for view in views if _defines(view))), frozenset(copied))
        function: Function = source.compile()["recompute"]
        if not accessed.random:
            return function
        device, states = self._device, self._generator_states

        def replay(values: Values) -> None:
            now = device.generator_state()
            device.set_generator_state(states[operator])
            try:
                function(values)
            finally:
                device.set_generator_state(now)

        return replay

    def _only(self, call: Call, tensor: int) -> Call:
        values = self.captured.values
        kept = [slot if slot is not None and values[slot].tensor == tensor else None for slot in call.results]
        return call._replace(results=tuple(kept))

    def _copy_inputs(self, values: Values) -> None:
        """Execute the placeholder: copy the caller's inputs into new tensors, in the layout of the trace."""
        captured = self.captured
        for index, slot in enumerate(captured.given, self.feed):
            target = empty_like_value(captured.values[slot])
            self.fill(target, values[index])
            values[slot], values[index] = target, None
        self._placeholder_views(values)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy an input into a tensor in the layout of the trace, as a part of the compute."""
        if target.device == self._device.torch_device and 0 not in target.stride():
            self._device.upload(source, target)
        else:
            copy_into(target, source)

    def _copy_returned(self, values: Values) -> None:
        """Execute the output operator: copy the tensors that the step returns, so that the caller may keep them."""
        for index, slot in enumerate(self.captured.returned, self.returned):
            values[index] = values[slot].clone()


def _slots_by_tensor(captured: Captured) -> tuple[tuple[int, ...], ...]:
    slots: list[list[int]] = [[] for _ in range(captured.trace.tensor_count)]
    for slot, value in enumerate(captured.values):
        slots[value.tensor].append(slot)
    for persistent in captured.persistents:  # the value that exists at the start comes first
        slots[persistent.tensor].sort(key=lambda slot: slot != persistent.slot)
    return tuple(map(tuple, slots))


def _views_by_tensor(captured: Captured) -> dict[int, list[Call]]:
    views: dict[int, list[Call]] = {}
    for call in captured.persistent_views:
        slot = next(slot for slot in call.results if slot is not None)
        views.setdefault(captured.values[slot].tensor, []).append(call)
    return views


def _defines(call: Call) -> bool:
    return any(slot is not None for slot in call.results)


def make_feed(
    captured: Captured,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    learning_rate: float | None,
    share: float | None = None,
) -> list[torch.Tensor]:
    """Return the tensors that the placeholder receives: inputs, targets and, for a training step, the learning rate.

    `learning_rate` None means the captured one. A step of several ranks also receives the `share` of this one; None
    means that all have as many rows. Raises ExecutorError if the inputs are not as captured."""
    if isinstance(inputs, torch.Tensor) or isinstance(targets, torch.Tensor):
        raise ExecutorError("inputs and targets are sequences of tensors", hint="Put a single tensor into a list.")
    feed = (*inputs, *targets)
    if len(feed) != len(captured.inputs):
        raise ExecutorError(f"the step takes {len(captured.inputs)} inputs and targets, but {len(feed)} are given")
    for index, (tensor, slot) in enumerate(zip(feed, captured.inputs, strict=True)):
        shape, dtype = captured.values[slot].shape, captured.values[slot].dtype
        if not isinstance(tensor, torch.Tensor):
            raise ExecutorError(f"input {index} is of type {type(tensor).__name__}, not a tensor")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            given = f"{tensor.dtype} {list(tensor.shape)}"
            hint = "Capture a step for this shape as well, or pad the batch."
            raise ExecutorError(f"input {index} is {given}, but was captured as {dtype} {list(shape)}", hint)
    detached = [tensor.detach() for tensor in feed]
    if not captured.trains:
        return detached
    rate = captured.spec.optimizer.learning_rate if learning_rate is None else learning_rate
    scalars = [rate]
    if captured.spec.ranks is not None:
        scalars = [1 / captured.spec.ranks.size if share is None else share, rate]
    return [*detached, *(torch.tensor(float(scalar), dtype=torch.float64, device="cpu") for scalar in scalars)]


def takes(captured: Captured, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Return whether inputs and targets have the shapes and types of those captured."""
    try:
        make_feed(captured, inputs, targets, None)
    except ExecutorError:
        return False
    return True


# ---- generated functions ---------------------------------------------------------------------------------------------


class _Source:
    """Python source of functions over the list of values, with the constants that they use."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {"flat_results": flat_results, "clone": torch.ops.aten.clone.default._op}
        self._names: dict[int, str] = {}  # by id of the constant, which the dictionary above keeps alive
        self._copied: frozenset[int] = frozenset()

    def define(self, name: str, calls: Sequence[Call], copied: frozenset[int] = frozenset()) -> None:
        """Add a function that makes these calls; values in the slots `copied` are cloned wherever they are used."""
        self._copied = copied
        self._lines.append(f"def {name}(v):")
        for call in calls:
            self._lines.extend(f"    {line}" for line in self._statements(call))
        if not calls:
            self._lines.append("    pass")

    def compile(self) -> dict[str, Any]:
        namespace = dict(self._constants)
        exec(compile("\n".join(self._lines), "<pg_tensile operators>", "exec"), namespace)
        return namespace

    def _statements(self, call: Call) -> list[str]:
        target = self._constant(_direct(call.target))
        arguments = [self._expression(argument) for argument in call.args]
        arguments += [f"**{{{name!r}: {self._expression(argument)}}}" for name, argument in call.kwargs.items()]
        expression = f"{target}({', '.join(arguments)})"
        if not _defines(call):
            return [expression]
        form = _returned_form(call)
        if form == "one":
            return [f"v[{call.results[0]}] = {expression}"]
        result = expression if form == "several" else f"flat_results({expression})"
        defined = [(index, slot) for index, slot in enumerate(call.results) if slot is not None]
        return [f"r = {result}", *(f"v[{slot}] = r[{index}]" for index, slot in defined)]

    def _expression(self, argument: Any) -> str:
        if isinstance(argument, Slot):
            value = f"v[{argument.index}]"
            return f"clone({value})" if argument.index in self._copied else value
        if isinstance(argument, (tuple, list)) and _has_slot(argument):
            items = "".join(f"{self._expression(item)}, " for item in argument)
            return f"[{items}]" if isinstance(argument, list) else f"({items})"
        if argument is None or isinstance(argument, (bool, int)):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"c{len(self._names)}"
            self._constants[name] = value
        return name


def _direct(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the built-in function that an OpOverload calls, which saves a call in Python."""
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def _returned_form(call: Call) -> str:
    """Return how results are read from the returned value.

    "one": it is the only result; "several": results by index; "nested": by index, after flattening."""
    if not isinstance(call.target, torch._ops.OpOverload):
        return "nested"
    types = [str(returned.type) for returned in call.target._schema.returns]
    if types == ["Tensor"]:
        return "one"
    return "several" if len(types) > 1 and set(types) == {"Tensor"} else "nested"


def _has_slot(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_has_slot, argument))
    return isinstance(argument, Slot)
