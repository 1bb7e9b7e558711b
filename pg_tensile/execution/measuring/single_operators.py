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
        trace = captured.trace
        first = {(trace.target[row], trace.signature[row]): row for row in reversed(range(1, trace.operator_count - 1))}
        self._operators = sorted(row for row in first.values() if self._is_possible(row))

    def _is_possible(self, operator: int) -> bool:
        """Return whether the operands fit into memory and may have any contents; if not, add the target to `failed`."""
        trace = self._captured.trace
        tensors = trace.access_tensor[slice(*trace.access_start[operator : operator + 2])]
        needed = trace.tensor_bytes[tensors].sum() + trace.workspace_bytes[operator]
        possible = needed <= self._limit_bytes and not self._captured.unknown_sizes.intersection(tensors.tolist())
        possible &= trace.target[operator] not in COLLECTIVES
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
        realised = self._captured.operators[operator]
        assert realised.call is not None
        slots = set(_slots((realised.call.args, tuple(realised.call.kwargs.values()))))
        operands = make_operands(self._captured, slots)
        for slot, operand in operands.items():
            self._values[slot] = operand
        function = self._functions.plain(operator)
        meter.start()
        try:
            function(self._values)
            return True
        except (RuntimeError, ValueError, IndexError, TypeError):  # it does not accept random numbers
            return False
        finally:
            meter.stop()
            results = [slot for call in (realised.call, *realised.views) for slot in call.results if slot is not None]
            for slot in (*operands, *results):
                self._values[slot] = None


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


def randomised(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that no operator fails on or is slow with.

    Floating point numbers are uniform in 0 … 1; integers are 0, which is a valid index everywhere.
    """
    return tensor.uniform_() if tensor.is_floating_point() else tensor.zero_()
