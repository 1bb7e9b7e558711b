"""Workspaces of operators before the first iteration: the memory that they use besides what they create.

A plan made without workspaces may not fit once they are known. So each operator is executed once by itself, on random
numbers, while the allocator is observed.
"""

from __future__ import annotations

import math

import numpy as np

from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.measuring.single_operators import Alone, executing
from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.trace.trace import Int64s, Mode


def probe(captured: Captured, device: Device, limit_bytes: int) -> Int64s:
    """Return the workspaces of a trace, int64[operators], bytes, measured by executing each distinct call once.

    The larger of the trace's workspace and the measured one counts. The trace's remains if the operator with the
    tensors that it accesses takes more than `limit_bytes`, or cannot be executed on random numbers; that of the output
    is at least the copies that it returns. Uses as much device memory as the operator that needs the most, and leaves
    the random number generators unchanged.
    """
    trace = captured.trace
    alone = Alone(captured, device, limit_bytes)
    with executing(device), device.iteration():
        peak = alone.iteration(device.allocator())
    creates = trace.access_mode == Mode.CREATE
    created = np.zeros(trace.operator_count, np.int64)
    np.add.at(created, trace.access_operator[creates], trace.tensor_bytes[trace.access_tensor[creates]])
    measured = np.maximum(np.nan_to_num(peak).astype(np.int64) - created, 0)
    calls: dict[tuple[str, str], list[int]] = {}
    for operator in range(1, trace.operator_count - 1):
        calls.setdefault((trace.target[operator], trace.signature[operator]), []).append(operator)
    workspace = trace.workspace_bytes.copy()
    for operators in calls.values():
        workspace[operators] = np.maximum(workspace[operators], measured[operators].max())
    returned = [captured.values[slot] for slot in captured.returned]  # the caller's own: copied if something views them
    workspace[-1] = max(workspace[-1], sum(math.prod(value.shape) * value.dtype.itemsize for value in returned))
    return workspace
