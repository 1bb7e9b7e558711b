"""Memory that only real operators tell, before the first iteration: workspaces, and sizes that capturing left open.

A workspace is what an operator uses besides what it creates. Some operators also create tensors whose size is their
library's affair, such as what the forward pass of a recurrent layer keeps for its backward pass. A plan made without
either may not fit once they are known. So each operator is executed once by itself, on random numbers, while the
allocator is observed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pg_tensile.execution.capture.captured import Captured
from pg_tensile.execution.measuring.single_operators import Alone, executing, with_real_sizes
from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.trace.trace import Int64s, Mode


def probe(captured: Captured, device: Device, limit_bytes: int) -> Captured:
    """Return the graph with workspaces and sizes that are measured by executing each distinct call once.

    The larger of the trace's workspace and the measured one counts. The trace's numbers remain if the operator with the
    tensors that it accesses takes more than `limit_bytes`, or cannot be executed on random numbers; the workspace of
    the output is at least the copies that it returns. Uses as much device memory as the operator that needs the most,
    besides tensors of unknown size, and leaves the random number generators unchanged.
    """
    with executing(device), device.iteration():
        captured = with_real_sizes(captured, device, limit_bytes)
        alone = Alone(captured, device, limit_bytes)
        peak = alone.iteration(device.allocator())
    return replace(
        captured, trace=captured.trace.with_latencies(captured.trace.latency_us, _workspaces(captured, peak))
    )


def _workspaces(captured: Captured, peak: np.ndarray) -> Int64s:
    """Return the workspaces, int64[operators], of calls that had this `peak`, float64[operators], NaN if not known."""
    trace = captured.trace
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
