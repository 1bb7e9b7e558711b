"""Compiler from a captured iteration and a plan to a program: a flat tuple of instructions.

The instructions are the actions of the plan's access sequence, one for one and in their order, with all lookups done
beforehand, so the executor's loop only steps through them. Each operator becomes one Python function over the list of
values, generated once per graph, so that executing it costs little more than the call itself.

A tensor has an index in the trace, and a key: its number among all tensors of an executor, whose graphs share the
persistent ones. Instructions refer to keys.

- `Functions`: the operators as functions, both plain and as executed again by a recompute event.
- `compile_program`: the sequence as instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from pg_tensile.errors import ExecutorError, OutOfDeviceMemoryError
from pg_tensile.execution.capture.captured import Call, Captured, Slot, copy_into, empty_like_value, flat_results
from pg_tensile.execution.runtime.delays import delayed_steps
from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.plan.actions import Action, ActionKind
from pg_tensile.planning.plan.codecs import staging_bytes
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.following import swapped_persistents
from pg_tensile.planning.plan.memory import Arena
from pg_tensile.planning.trace.trace import Int64s, Kind, Mode, Trace

Values = list[Any]  # by slot, None if not resident; after the slots: the inputs, then the copies returned
Function = Callable[[Values], None]


class Code(IntEnum):
    """Kind of an instruction. The first seven are those of `ActionKind`."""

    PASSIVE_IN = 0
    WAIT_IN = 1
    RUN = 2
    FREE = 3
    WAIT_OUT = 4
    COPY_OUT = 5
    COPY_IN = 6
    ALLOCATE = 7  # device memory for a COPY_IN that follows later


class Work(NamedTuple):
    """The operator call that a RUN executes."""

    function: Function
    operator: int  # index in the captured trace
    created: Mapping[int, int]  # key → bytes of the tensors resident from here on
    bytes: int  # of these and of `scratch`
    scratch: int  # bytes that are discarded after the footprint is sampled


class Instruction(NamedTuple):
    """One action of the program.

    `keeps` is set if the tensor freed here is swapped in again later: its emptied storage object and its values are
    kept then, and dropped otherwise. `event` is the index into the plan, −1 if none."""

    code: Code
    step: int
    tensor: int = -1  # key
    work: Work | None = None
    keeps: bool = False
    event: int = -1
    delay_us: int = 0
    codec: int = 0  # of a COPY_OUT


@dataclass(frozen=True, eq=False)
class Program:
    """One iteration of S steps under a plan, from the state that it was compiled for."""

    sequence: AccessSequence
    instructions: tuple[Instruction, ...]
    arena: Arena  # layout of the copies that have no home (host_memory.py)
    first_change: int  # the first step that changes a persistent tensor; S if none does
    keys: Sequence[int]  # [m]: key of each tensor of the trace

    def operator_label(self, step: int) -> str:
        return self.sequence.trace.operator_label(int(self.sequence.steps[step]))

    def work(self, step: int) -> Work:
        return next(each.work for each in self.instructions if each.work is not None and each.step == step)

    def check_budget(self, budget_bytes: int, workspace_bytes: Int64s) -> None:
        """Raise OutOfDeviceMemoryError for the first step above the budget. `workspace_bytes`: int64[operators]."""
        needed = self.sequence.footprint + workspace_bytes[self.sequence.operators] + self.staging_bytes
        over = np.flatnonzero(needed > budget_bytes)
        if over.size:
            step = int(over[0])
            requested = self.work(step).bytes + int(workspace_bytes[self.sequence.operators[step]])
            raise OutOfDeviceMemoryError(
                self.operator_label(step), requested, int(needed[step]) - requested, budget_bytes
            )

    def bytes_of(self, key: int) -> int:
        """Return the bytes of a tensor according to the trace."""
        return self._bytes[key]

    @cached_property
    def _bytes(self) -> Mapping[int, int]:
        return dict(zip(self.keys, self.sequence.trace.tensor_bytes.tolist(), strict=True))

    def device_peak_bytes(self, workspace_bytes: Int64s) -> int:
        return int(np.max(self.sequence.footprint + workspace_bytes[self.sequence.operators])) + self.staging_bytes

    @cached_property
    def staging_bytes(self) -> int:
        """Device memory for the staging of compressed copies."""
        return staging_bytes(self.sequence.trace, self.sequence.plan)

    def look_up(self) -> None:
        """Compute the cached properties now, so that none is computed between two iterations."""
        for each in ("device", "host", "away", "homes", "recomputes", "places", "staging_bytes", "_bytes"):
            getattr(self, each)
        self.sequence.footprint  # noqa: B018 - it keeps it, too

    @cached_property
    def device(self) -> frozenset[int]:
        """Keys of the persistent tensors that are on the device between two iterations."""
        return frozenset(self.keys[tensor] for tensor in self.sequence.boundary.device)

    @cached_property
    def host(self) -> frozenset[int]:
        """Keys of the persistent tensors that have a current host copy between two iterations."""
        return frozenset(self.keys[tensor] for tensor in self.sequence.boundary.host)

    @cached_property
    def away(self) -> frozenset[int]:
        """Keys of the persistent tensors that are off the device between two iterations."""
        return frozenset(self.keys[t] for t in np.flatnonzero(self.sequence.trace.persistent).tolist()) - self.device

    @cached_property
    def homes(self) -> Mapping[int, int]:
        """Bytes of the persistent tensors that the plan swaps, by key."""
        trace = self.sequence.trace
        return {self.keys[t]: int(trace.tensor_bytes[t]) for t in swapped_persistents(trace, self.sequence.plan)}

    @cached_property
    def recomputes(self) -> int:
        """Number of steps that belong to recompute events."""
        return int(np.count_nonzero(self.sequence.step_event >= 0))

    @cached_property
    def places(self) -> Mapping[tuple[int, int], int]:
        """Offset in the arena of each host copy, by key and the step after which the copy begins."""
        keys, rows = self.keys, self.arena.offsets.items()
        return {(keys[tensor], copy.first): copy.offset for tensor, row in rows for copy in row}


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
        self.taken = self.feed + len(captured.given)
        self.size = self.taken + len(captured.returned)
        self._generator_states: dict[int, torch.Tensor] = {}  # by random operator that the plan recomputes
        self._again: dict[tuple[int, int], Function] = {}
        source = _Source()
        for number, operator in enumerate(captured.operators):
            if operator.call is not None:
                source.define(f"operator_{number}", (operator.call, *operator.views))
        source.define("placeholder_views", captured.operators[0].views)
        for tensor, views in _views_by_tensor(captured).items():
            source.define(f"persistent_{tensor}", views)
        made = source.compile()
        last = len(captured.operators) - 1
        self._persistent_views: dict[int, Function] = {
            persistent.tensor: made[f"persistent_{persistent.tensor}"]
            for persistent in captured.persistents
            if f"persistent_{persistent.tensor}" in made
        }
        self._placeholder_views: Function = made["placeholder_views"]
        special: dict[int, Function] = {0: self._place, last: self._take}
        self._plain = [special.get(number) or made[f"operator_{number}"] for number in range(last + 1)]

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

    def again(self, operator: int, tensor: int) -> Function:
        """Return the function that recomputes `tensor` by an operator.

        Other outputs are discarded, statistics are changed on scratch copies, and random numbers are those of the first
        execution; the generator's state is restored afterwards."""
        key = (operator, tensor)
        if key not in self._again:
            self._again[key] = self._make_again(operator, tensor)
        return self._again[key]

    def _make_again(self, operator: int, tensor: int) -> Function:
        captured = self.captured
        realised, accessed = captured.operators[operator], captured.trace.operators[operator]
        assert realised.call is not None
        statistics = {access.tensor for access in accessed.accesses if access.mode == Mode.STATS} - {tensor}
        copied = {slot for changed in statistics for slot in self.slots[changed]}
        call, *views = (self._only(call, tensor) for call in (realised.call, *realised.views))
        source = _Source()
        source.define("again", (call, *(view for view in views if _defines(view))), frozenset(copied))
        function: Function = source.compile()["again"]
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

    def _place(self, values: Values) -> None:
        """Execute the placeholder: copy the caller's inputs into new tensors, in the layout of the trace."""
        captured = self.captured
        for place, slot in enumerate(captured.given, self.feed):
            value = captured.values[slot]
            target = empty_like_value(value)
            if value.device == self._device.torch_device and 0 not in value.stride:
                self._device.upload(values[place], target)
            else:
                copy_into(target, values[place])
            values[slot], values[place] = target, None
        self._placeholder_views(values)

    def _take(self, values: Values) -> None:
        """Execute the output operator: copy the tensors that the step returns, so that the caller may keep them."""
        for place, slot in enumerate(self.captured.returned, self.taken):
            values[place] = values[slot].clone()


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
) -> list[torch.Tensor]:
    """Return the tensors that the placeholder receives: inputs, targets and, for a training step, the learning rate.

    `learning_rate` None means the captured one. Raises ExecutorError if the inputs are not as captured."""
    if isinstance(inputs, torch.Tensor) or isinstance(targets, torch.Tensor):
        raise ExecutorError("inputs and targets are sequences of tensors", hint="Put a single tensor into a list.")
    feed = (*inputs, *targets)
    if len(feed) != len(captured.inputs):
        raise ExecutorError(f"the step takes {len(captured.inputs)} inputs and targets, but {len(feed)} are given")
    for place, (tensor, slot) in enumerate(zip(feed, captured.inputs, strict=True)):
        shape, dtype = captured.values[slot].shape, captured.values[slot].dtype
        if not isinstance(tensor, torch.Tensor):
            raise ExecutorError(f"input {place} is of type {type(tensor).__name__}, not a tensor")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            hint = "Capture a step for this shape as well, or pad the batch."
            raise ExecutorError(f"input {place} is {found}, but was captured as {dtype} {list(shape)}", hint)
    given = [tensor.detach() for tensor in feed]
    if not captured.trains:
        return given
    rate = captured.spec.optimizer.learning_rate if learning_rate is None else learning_rate
    return [*given, torch.tensor(float(rate), dtype=torch.float64, device="cpu")]


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
        defined = [(place, slot) for place, slot in enumerate(call.results) if slot is not None]
        return [f"r = {result}", *(f"v[{slot}] = r[{place}]" for place, slot in defined)]

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


# ---- instructions ----------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """An instruction before its lookups are done."""

    code: Code
    step: int
    tensor: int  # key
    event: int


def compile_program(functions: Functions, sequence: AccessSequence, arena: Arena, delays_in_program: bool) -> Program:
    """Compile an access sequence of `functions.captured.trace`.

    `arena` is the layout of the plan's host copies. With `delays_in_program`, for devices that ignore delays
    (`Device.runs_ahead`), delayed copies are moved to later gaps. Raises InvalidPlanError."""
    actions = sequence.actions()
    codes, keys = tuple(Code), functions.keys
    if delays_in_program:
        placed = _delayed(sequence, actions)
    else:
        placed = [Placed(codes[kind], step, tensor, event) for kind, step, tensor, event in actions]
    placed = [each if each.tensor < 0 else each._replace(tensor=keys[each.tensor]) for each in placed]
    delays = [0] * len(sequence.plan) if delays_in_program else sequence.plan.rows["delay_us"].tolist()
    codecs = sequence.plan.rows["codec"].tolist()
    works = _works(functions, sequence)
    instructions = [
        Instruction(code, step, tensor, works[step] if code is Code.RUN else None, keeps, event, delay_us, codec)
        for (code, step, tensor, event), keeps in zip(placed, _kept(sequence, keys, works, placed), strict=True)
        for delay_us, codec in ((delays[event], codecs[event]) if event >= 0 else (0, 0),)
    ]
    return Program(sequence, tuple(instructions), arena, _first_change(sequence), keys)


def _delayed(sequence: AccessSequence, actions: Sequence[Action]) -> list[Placed]:
    """Place delayed copies at the end of a later gap; a delayed swap-in still allocates where the plan has it."""
    delayed = delayed_steps(sequence, actions)
    placed: list[Placed] = []
    due: dict[int, list[Placed]] = {}
    step = 0
    for kind, at, tensor, event in actions:
        for passed in range(step, at):
            placed.extend(due.pop(passed, ()))
        step = at
        action = Placed(Code(kind), at, tensor, event)
        if event in delayed and kind in (ActionKind.COPY_OUT, ActionKind.COPY_IN):
            due.setdefault(delayed[event], []).append(action)
            if kind is ActionKind.COPY_IN:
                placed.append(action._replace(code=Code.ALLOCATE))
        else:
            placed.append(action)
    return placed


def _kept(sequence: AccessSequence, keys: Sequence[int], works: Sequence[Work], placed: Sequence[Placed]) -> list[bool]:
    """Return for each instruction whether its tensor is next restored by a swap-in, not by being created again."""
    comes_in = dict(zip(keys, sequence.trace.persistent.tolist(), strict=True))  # at the iteration's end
    kept = [False] * len(placed)
    for place in range(len(placed) - 1, -1, -1):
        code, step, tensor, _ = placed[place]
        if code is Code.RUN:
            for made in works[step].created:
                comes_in[made] = False
        elif code in (Code.PASSIVE_IN, Code.COPY_IN, Code.ALLOCATE):
            comes_in[tensor] = True
        else:
            kept[place] = comes_in[tensor]
    return kept


def _works(functions: Functions, sequence: AccessSequence) -> list[Work]:
    """Return the operator call of each step."""
    trace, sizes, made_by = sequence.trace, sequence.trace.tensor_bytes.tolist(), _created(sequence.trace)
    steps, events, scratch = sequence.steps.tolist(), sequence.step_event.tolist(), sequence.scratch_bytes.tolist()
    captured = trace.captured_operator.tolist()
    repeated = {place for place, event in zip(steps, events, strict=True) if event >= 0}
    works = []
    for step, (place, event) in enumerate(zip(steps, events, strict=True)):
        operator, made = captured[place], made_by[place]
        if event >= 0:
            tensor = int(sequence.plan.rows["tensor"][event])
            function, made = functions.again(operator, tensor), [tensor] if tensor in made else []
        elif place in repeated and trace.random[place]:
            function = functions.remembering(operator)
        else:
            function = functions.plain(operator)
        created = {functions.keys[tensor]: sizes[tensor] for tensor in made}
        works.append(Work(function, operator, created, sum(created.values()) + scratch[step], scratch[step]))
    return works


def _created(trace: Trace) -> list[list[int]]:
    """Return the tensors that each operator creates."""
    created: list[list[int]] = [[] for _ in range(trace.operator_count)]
    chosen = trace.access_mode == Mode.CREATE
    for operator, tensor in zip(
        trace.access_operator[chosen].tolist(), trace.access_tensor[chosen].tolist(), strict=True
    ):
        created[operator].append(tensor)
    return created


def _first_change(sequence: AccessSequence) -> int:
    trace = sequence.trace
    changes = np.isin(trace.access_mode, (Mode.WRITE, Mode.STATS)) & (
        trace.tensor_kind[trace.access_tensor] <= Kind.CONSTANT
    )
    changing = np.zeros(trace.operator_count, np.bool_)
    changing[trace.access_operator[changes]] = True
    steps = np.flatnonzero(changing[sequence.steps] & (sequence.step_event < 0))
    return int(steps[0]) if steps.size else len(sequence.steps)
