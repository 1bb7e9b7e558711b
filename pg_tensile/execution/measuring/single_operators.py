"""Execution of single operators of a captured iteration on operands made for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pg_tensile.execution.capture.captured import Captured, Slot
from pg_tensile.execution.distributed.all_reduce import COLLECTIVES
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.functions import Functions, Values
from pg_tensile.execution.runtime.measure import Meter
from pg_tensile.planning.trace.trace import Mode

# Indices of the arguments that are the elements of all bags, and where each bag begins.
BAGS = {torch.ops.aten._embedding_bag.default: (1, 2), torch.ops.aten._embedding_bag_backward.default: (1, 2)}
ERRORS = (RuntimeError, ValueError, IndexError, TypeError)  # of an operator that does not accept random numbers


@contextlib.contextmanager
def executing(device: Device) -> Iterator[None]:
    """Execute calls as the executor does, and restore the caller's random number generators at the end."""
    state = device.generator_state()
    try:
        with (
            torch.inference_mode(False),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableAutocast(),
            torch.enable_grad(),
        ):
            yield
    finally:
        device.set_generator_state(state)


class Alone:
    """Execution of each distinct call of an iteration once, on operands made for it.

    `failed` holds the targets of calls that do not fit into `limit_bytes` or cannot be executed on random numbers, and
    of collectives: by itself, one would wait for other ranks.
    """

    def __init__(self, captured: Captured, device: Device, limit_bytes: int) -> None:
        self.failed: set[str] = set()
        self._captured, self._device, self._limit_bytes = captured, device, limit_bytes
        self._functions = Functions(captured, device)
        self._values: Values = [None] * self._functions.size
        self._creators = creators_of(captured)
        trace = captured.trace
        first = {(trace.target[row], trace.signature[row]): row for row in reversed(range(1, trace.operator_count - 1))}
        self._operators = sorted(row for row in first.values() if self.is_possible(row))

    def is_possible(self, operator: int) -> bool:
        """Return whether the operands fit into memory; if not, add the target to `failed`."""
        trace = self._captured.trace
        tensors = trace.access_tensor[slice(*trace.access_start[operator : operator + 2])]
        needed = trace.tensor_bytes[tensors].sum() + trace.workspace_bytes[operator]
        possible = needed <= self._limit_bytes and trace.target[operator] not in COLLECTIVES
        if not possible:
            self.failed.add(trace.target[operator])
        return possible

    def iteration(self, meter: Meter) -> np.ndarray:
        """Execute the calls; return the meter's readings, float64[operators], NaN for operators not executed."""
        reading = np.full(self._captured.trace.operator_count, np.nan)
        with meter:
            worked = [self._execute(operator, meter) for operator in self._operators]
        reading[self._operators] = np.where(worked, meter.read(), np.nan)
        failed = [operator for operator, did in zip(self._operators, worked, strict=True) if not did]
        self.failed |= {self._captured.trace.target[operator] for operator in failed}
        self._operators = [operator for operator in self._operators if operator not in failed]
        return reading

    def _execute(self, operator: int, meter: Meter) -> bool:
        try:
            operands = self._operands(operator)
        except ERRORS:  # of an operator that makes one of them
            operands = None
        for slot, operand in (operands or {}).items():
            self._values[slot] = operand
        function = self._functions.plain(operator)
        meter.start()
        try:
            if operands is not None:
                function(self._values)
            return operands is not None
        except ERRORS:  # it does not accept random numbers
            return False
        finally:
            meter.stop()
            self._clear(operator, operands or {})

    def results(self, operator: int) -> dict[int, torch.Tensor]:
        """Execute a call and return its results by slot. Raises what the operator raises."""
        operands = self._operands(operator)
        for slot, operand in operands.items():
            self._values[slot] = operand
        try:
            self._functions.plain(operator)(self._values)
            return {slot: self._values[slot] for slot in self._result_slots(operator)}
        finally:
            self._clear(operator, operands)

    def _operands(self, operator: int) -> dict[int, torch.Tensor]:
        """Return the operands by slot: random numbers, or what another operator has made of such.

        The latter are those whose size, and so the contents, only the operator's library knows."""
        call = self._captured.operators[operator].call
        assert call is not None
        slots = set(_slots((call.args, tuple(call.kwargs.values()))))
        values = self._captured.values
        made = {slot for slot in slots if values[slot].tensor in self._creators}
        operands = make_operands(self._captured, slots - made)
        if call.target in BAGS:
            _share_out(*(operands[call.args[index].index] for index in BAGS[call.target]))
        for creator in {self._creators[values[slot].tensor] for slot in made}:
            results = self.results(creator)
            operands |= {slot: results[slot] for slot in made if slot in results}
        return operands

    def _result_slots(self, operator: int) -> list[int]:
        realised = self._captured.operators[operator]
        calls = [call for call in (realised.call, *realised.views) if call is not None]
        return [slot for call in calls for slot in call.results if slot is not None]

    def _clear(self, operator: int, operands: dict[int, torch.Tensor]) -> None:
        for slot in (*operands, *self._result_slots(operator)):
            self._values[slot] = None


def creators_of(captured: Captured) -> dict[int, int]:
    """Return the operator that creates each tensor of unknown size, by tensor."""
    trace = captured.trace
    operators = np.repeat(np.arange(trace.operator_count), np.diff(trace.access_start))
    creates = np.flatnonzero(trace.access_mode == Mode.CREATE)
    created = zip(trace.access_tensor[creates].tolist(), operators[creates].tolist(), strict=True)
    return {tensor: operator for tensor, operator in created if tensor in captured.unknown_sizes}


def with_real_sizes(captured: Captured, device: Device, limit_bytes: int) -> Captured:
    """Return the graph with the sizes that its operators give tensors of unknown size; call it inside `executing`.

    A size stays if the operator does not fit into `limit_bytes` without it, or cannot be executed on random numbers.
    """
    alone = Alone(captured, device, limit_bytes)
    trace, sizes = captured.trace, {}
    of_call: dict[tuple[str, str], list[int]] = {}  # sizes of all results of a distinct call, by result
    for operator in sorted(set(creators_of(captured).values())):
        key = trace.target[operator], trace.signature[operator]
        call = captured.operators[operator].call
        assert call is not None
        if key not in of_call and alone.is_possible(operator):
            with contextlib.suppress(*ERRORS):
                results = alone.results(operator)
                of_call[key] = [0 if slot is None else _bytes(results[slot], device) for slot in call.results]
        for slot, size in zip(call.results, of_call.get(key, ()), strict=False):
            if slot is not None and captured.values[slot].tensor in captured.unknown_sizes:
                sizes[captured.values[slot].tensor] = size
    return captured.with_tensor_bytes(sizes) if sizes else captured


def _bytes(tensor: torch.Tensor, device: Device) -> int:
    """Return the bytes of the device that a result takes."""
    return tensor.untyped_storage().nbytes() if tensor.device == device.torch_device else 0


def _slots(template: Any) -> Iterator[int]:
    if isinstance(template, Slot):
        yield template.index
    elif isinstance(template, (tuple, list)):
        for item in template:
            yield from _slots(item)


def make_operands(captured: Captured, slots: set[int]) -> dict[int, torch.Tensor]:
    """Allocate memory for these slots; slots of one tensor share it."""
    storages: dict[int, torch.UntypedStorage] = {}
    operands = {}
    for slot in slots:
        value = captured.values[slot]
        if value.tensor not in storages:
            end = (
                value.offset + 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
            )
            size = max(int(captured.trace.tensor_bytes[value.tensor]), end * value.dtype.itemsize)
            flat = torch.empty(-(-size // value.dtype.itemsize), dtype=value.dtype, device=value.device)
            storages[value.tensor] = randomised(flat).untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        operands[slot] = empty.set_(storages[value.tensor], value.offset, value.shape, value.stride)
    return operands


def _share_out(elements: torch.Tensor, starts: torch.Tensor) -> None:
    """Give all bags as many elements: with zeros for `starts`, one would have all of them, and the others none."""
    part = len(elements) // max(1, len(starts))
    starts.copy_(part * torch.arange(len(starts), dtype=starts.dtype, device=starts.device))


def randomised(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that no operator fails on or is slow with.

    Floating point numbers are uniform in 0 … 1; integers are 0, which is a valid index everywhere.
    """
    return tensor.uniform_() if tensor.is_floating_point() else tensor.zero_()
