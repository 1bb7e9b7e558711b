"""Conversion of recorded calls to operators, tensors and accesses.

Unused calls are dropped, views are folded into the operators that create their tensors, and tensors are classified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pg_tensile.execution.capture.captured import Call, Captured, CapturedOperator, Persistent, Slot, Value
from pg_tensile.execution.capture.fakes import UNKNOWN_SIZES
from pg_tensile.execution.capture.recorder import Record
from pg_tensile.execution.capture.schema import is_random, modes, mutates
from pg_tensile.execution.capture.spec import StepSpec
from pg_tensile.planning.trace.rows import OUTPUT, PLACEHOLDER
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

aten = torch.ops.aten


@dataclass
class Recording:
    """A recorded step. Slots and tensors are numbered in the order in which they were first seen."""

    records: list[Record]
    values: list[Value]
    tensor_bytes: list[int]
    persistents: list[Persistent]
    inputs: tuple[int, ...]  # slots
    input_names: tuple[str, ...]
    learning_rate: int | None  # slot; None for an evaluation
    share: int | None  # slot; None unless the step has ranks
    loss: int | None  # slot
    outputs: tuple[int, ...]  # slots
    gradients: dict[int, str]  # slot → name of the parameter
    device: torch.device

    def given(self) -> tuple[int, ...]:
        return (*self.inputs, *(slot for slot in (self.share, self.learning_rate) if slot is not None))

    def results(self) -> tuple[int, ...]:
        return self.outputs if self.loss is None else (self.loss, *self.outputs)


def build(recording: Recording, spec: StepSpec) -> Captured:
    """Return the captured iteration. The recording is modified and must not be used afterwards."""
    _drop_dead(recording)
    _accumulate_in_place(recording)
    return _Builder(recording, spec).captured()


def slots_in(template: Any) -> Iterator[int]:
    """Yield the slots in the arguments of a call."""
    if isinstance(template, Slot):
        yield template.index
    elif isinstance(template, (tuple, list)):
        for item in template:
            yield from slots_in(item)


def operands(call: Call) -> Iterator[int]:
    """Yield the slots that a call reads or changes."""
    yield from slots_in(call.args)
    yield from slots_in(tuple(call.kwargs.values()))


# ---- passes over the records ----


def _drop_dead(recording: Recording) -> None:
    """Drop calls whose results are unused, and assertions on metadata.

    All other calls that change an argument, draw random numbers or return nothing are kept."""
    needed = {*recording.results(), *recording.gradients}
    kept = []
    for record in reversed(recording.records):
        call = record.call
        if not record.is_view and (mutates(call.target) or is_random(call.target) or not call.results):
            alive = call.target != aten._assert_tensor_metadata.default
        else:
            alive = any(slot in needed for slot in call.results)
        if alive:
            kept.append(record)
            needed.update(operands(call))
    recording.records = kept[::-1]


def _accumulate_in_place(recording: Recording) -> None:
    """Compute sums of the backward pass in place of a term that is not used again, with the same bits.

    Autograd does the same with its sums of gradients, unless a dispatch mode observes them."""
    values = recording.values
    last_use = {values[slot].tensor: len(recording.records) for slot in recording.results()}
    for index in reversed(range(len(recording.records))):
        for slot in operands(recording.records[index].call):
            last_use.setdefault(values[slot].tensor, index)
    created: set[int] = set()  # tensors that the backward pass has created
    slots_of: dict[int, list[int]] = {}
    for slot, value in enumerate(values):
        slots_of.setdefault(value.tensor, []).append(slot)
    renamed: dict[int, int] = {}

    def is_free(term: Value, total: Value, index: int) -> bool:
        size = math.prod(total.shape) * total.dtype.itemsize
        sizes = {recording.tensor_bytes[term.tensor], recording.tensor_bytes[total.tensor]}
        fits = term._replace(tensor=0) == total._replace(tensor=0) and sizes == {size}
        return fits and term.tensor in created and last_use[term.tensor] == index

    records = []
    for index, record in enumerate(recording.records):
        call = _rename(record.call, renamed)
        if record.phase == Phase.BACKWARD and not record.is_view:
            if call.target == aten.add.Tensor and not call.kwargs and all(isinstance(term, Slot) for term in call.args):
                (total,) = call.results
                first, second = (term.index for term in call.args)
                if total is not None and values[first].tensor != values[second].tensor:
                    for term, added in ((first, second), (second, first)):
                        if is_free(values[term], values[total], index):
                            call = Call(aten.add_.Tensor, (Slot(term), Slot(added)), {}, (None,))
                            kept, replaced = values[term].tensor, values[total].tensor
                            last_use[kept] = last_use.get(replaced, index)
                            renamed[total] = term
                            for slot in slots_of[replaced]:
                                values[slot] = values[slot]._replace(tensor=kept)
                            slots_of[kept] += slots_of.pop(replaced)
                            break
            created.update(values[slot].tensor for slot in call.results if slot is not None)
        records.append(record._replace(call=call))
    recording.records = records
    recording.gradients = {renamed.get(slot, slot): name for slot, name in recording.gradients.items()}


def _rename(call: Call, renamed: dict[int, int]) -> Call:
    """Return the call with its slots renamed; slots that `renamed` lacks stay."""

    def rename(template: Any) -> Any:
        if isinstance(template, Slot):
            return Slot(renamed.get(template.index, template.index))
        if isinstance(template, (tuple, list)):
            return type(template)(map(rename, template))
        return template

    if not renamed:
        return call
    results = tuple(None if slot is None else renamed.get(slot, slot) for slot in call.results)
    kwargs = {name: rename(value) for name, value in call.kwargs.items()}
    return Call(call.target, rename(call.args), kwargs, results)


# ---- operators and tensors ----


class _Builder:
    """Builder of operators from a recording's calls, and tensors from the storages that they access."""

    def __init__(self, recording: Recording, spec: StepSpec) -> None:
        self.recording = recording
        self.spec = spec
        self.values = recording.values
        self.operators: list[Operator] = []  # their accesses use the recording's indices of tensors
        self.calls: list[Call | None] = []
        self.views: list[list[Call]] = []
        self.persistent_views: list[Call] = []
        self.persistents = {entry.tensor: entry for entry in recording.persistents}
        self.creators: dict[int, int] = {}  # tensor → operator
        self.base = {entry.tensor: entry.slot for entry in recording.persistents}  # tensor → its first slot
        self.unknown_sizes: set[int] = set()

    def captured(self) -> Captured:
        recording = self.recording
        self._add_ends(PLACEHOLDER, Phase.FORWARD, Mode.CREATE, recording.given())
        for record in recording.records:
            if record.is_view:
                self._add_view(record.call)
            else:
                self._add_operator(record)
        last = Phase.FORWARD if recording.learning_rate is None else Phase.OPTIMIZER
        self._add_ends(OUTPUT, last, Mode.READ, recording.results())
        used = {access.tensor for operator in self.operators for access in operator.accesses}
        order = [*(tensor for tensor in self.persistents if tensor in used), *self.creators]
        tensors = {tensor: number for number, tensor in enumerate(order)}
        slots = self._used_slots(used)
        rows = [operator._replace(accesses=_renumbered(operator, tensors)) for operator in self.operators]
        persistents = [self.persistents[tensor] for tensor in order if tensor in self.persistents]
        return Captured(
            trace=Trace.build(rows, self._tensors(order), recording.device.type),
            operators=tuple(
                CapturedOperator(call and _rename(call, slots), tuple(_rename(view, slots) for view in views))
                for call, views in zip(self.calls, self.views, strict=True)
            ),
            values=tuple(self.values[slot]._replace(tensor=tensors[self.values[slot].tensor]) for slot in slots),
            persistents=tuple(
                entry._replace(tensor=tensors[entry.tensor], slot=slots[entry.slot]) for entry in persistents
            ),
            persistent_views=tuple(_rename(view, slots) for view in self.persistent_views),
            inputs=tuple(slots[slot] for slot in recording.inputs),
            learning_rate=None if recording.learning_rate is None else slots[recording.learning_rate],
            loss=None if recording.loss is None else slots[recording.loss],
            outputs=tuple(slots[slot] for slot in recording.outputs),
            unknown_sizes=frozenset(tensors[tensor] for tensor in self.unknown_sizes),
            spec=self.spec,
            share=None if recording.share is None else slots[recording.share],
        )

    def _add_ends(self, target: str, phase: Phase, mode: Mode, slots: tuple[int, ...]) -> None:
        tensors = dict.fromkeys(self.values[slot].tensor for slot in slots)
        if mode == Mode.CREATE:
            for slot in slots:
                self._create(slot)
        self._append(Operator(target, phase, tuple(Access(tensor, mode) for tensor in tensors)), None)

    def _append(self, operator: Operator, call: Call | None) -> None:
        self.operators.append(operator)
        self.calls.append(call)
        self.views.append([])

    def _create(self, slot: int) -> bool:
        tensor = self.values[slot].tensor
        if tensor in self.base:
            return False
        self.creators[tensor], self.base[tensor] = len(self.operators), slot
        return True

    def _add_view(self, call: Call) -> None:
        tensor = next(self.values[slot].tensor for slot in call.results if slot is not None)
        views = self.persistent_views if tensor in self.persistents else self.views[self.creators[tensor]]
        views.append(call)

    def _add_operator(self, record: Record) -> None:
        call = record.call
        accesses: dict[int, Mode] = {}
        moved = 0
        for argument, mode in modes(call.target, call.args, call.kwargs):
            for slot in slots_in(argument):
                tensor = self.values[slot].tensor
                accesses[tensor] = max(mode, accesses.get(tensor, mode))
                moved += self._bytes(slot) * (1 if mode == Mode.READ else 2)
        unknown = UNKNOWN_SIZES.get(call.target, ())
        for index, result in enumerate(call.results):
            if result is not None:
                tensor = self.values[result].tensor
                if self._create(result):
                    accesses[tensor] = Mode.CREATE
                if index in unknown:
                    self.unknown_sizes.add(tensor)
                moved += self._bytes(result)
        operator = Operator(
            target=str(call.target),
            phase=record.phase,
            accesses=tuple(Access(tensor, mode) for tensor, mode in accesses.items()),
            random=is_random(call.target),
            flops=record.flops,
            bytes=moved,
            signature=self._signature(call),
            module=record.module,
            source=record.source,
        )
        self._append(operator, call)

    def _bytes(self, slot: int) -> int:
        value = self.values[slot]
        return math.prod(value.shape) * value.dtype.itemsize

    def _signature(self, call: Call) -> str:
        parts = [self._describe(argument) for argument in call.args]
        parts += [f"{name}={self._describe(argument)}" for name, argument in call.kwargs.items()]
        return ", ".join(parts)

    def _describe(self, argument: Any) -> str:
        """Return the text of an argument in a signature: type, shape, and strides unless it is contiguous."""
        if isinstance(argument, Slot):
            value = self.values[argument.index]
            text = f"{_abbreviation(value.dtype)}[{','.join(map(str, value.shape))}]"
            return text if _is_contiguous(value) else f"{text}@{','.join(map(str, value.stride))}"
        if isinstance(argument, (tuple, list)):
            return f"[{','.join(map(self._describe, argument))}]"
        return str(argument)

    def _used_slots(self, used: set[int]) -> dict[int, int]:
        """Return the new index of each slot that is defined, in the order of definition."""
        slots = [entry.slot for entry in self.recording.persistents if entry.tensor in used]
        slots += self.recording.given()
        operators = ((call, *views) for call, views in zip(self.calls, self.views, strict=True))
        for call in itertools.chain(self.persistent_views, *operators):
            slots += [] if call is None else [slot for slot in call.results if slot is not None]
        return {slot: number for number, slot in enumerate(slots)}

    # ---- tensors ----

    def _tensors(self, order: Sequence[int]) -> list[Tensor]:
        names = self._names()
        later = {  # accessed after the forward pass by an operator other than the output
            access.tensor
            for operator in self.operators[:-1]
            if operator.phase != Phase.FORWARD
            for access in operator.accesses
        }
        gradients = {self.values[slot].tensor for slot in self.recording.gradients}
        rows = []
        for tensor in order:
            value = self.values[self.base[tensor]]
            creator = self.creators.get(tensor, -1)
            if creator < 0:
                kind = self.persistents[tensor].kind
            elif creator == 0:
                kind = Kind.INPUT
            elif tensor in gradients:
                kind = Kind.GRADIENT
            else:
                forward = self.operators[creator].phase == Phase.FORWARD
                kind = Kind.ACTIVATION if forward and tensor in later else Kind.TEMPORARY
            name = names.get(tensor) or (self.operators[creator].module if creator > 0 else "")
            on_device = value.device.type == self.recording.device.type
            size = self.recording.tensor_bytes[tensor] if on_device else 0
            rows.append(Tensor(size, kind, name, _abbreviation(value.dtype), value.shape))
        return rows

    def _names(self) -> dict[int, str]:
        recording, names = self.recording, {}
        for number, entry in enumerate(recording.persistents):
            name = f"{entry.name}.{entry.key}" if entry.key else entry.name
            names[entry.tensor] = name or f"constant{number}"
        for slot, name in zip(recording.inputs, recording.input_names, strict=True):
            names[self.values[slot].tensor] = name
        if recording.learning_rate is not None:
            names[self.values[recording.learning_rate].tensor] = "learning_rate"
        if recording.share is not None:
            names[self.values[recording.share].tensor] = "share"
        for slot, name in recording.gradients.items():
            names[self.values[slot].tensor] = f"{name}.grad"
        if recording.loss is not None:
            names.setdefault(self.values[recording.loss].tensor, "loss")
        return names


def _renumbered(operator: Operator, tensors: dict[int, int]) -> tuple[Access, ...]:
    return tuple(Access(tensors[access.tensor], access.mode) for access in operator.accesses)


def _abbreviation(dtype: torch.dtype) -> str:
    """Return the short name of a type: f32, bf16, i64, c64, bool."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def _is_contiguous(value: Value) -> bool:
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != expected:
            return math.prod(value.shape) == 0
        expected *= size
    return True
