"""Every tensor out after each access and back right before the next: the least memory that swapping alone can reach.

The floor for tests and comparisons, not for use: nothing overlaps. Parameters and optimizer states go as well, across
the end of the iteration. What is left on the device at an operator is what it accesses itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pg_tensile.plan import EVENT_ROW, EventKind, Plan
from pg_tensile.profile import DeviceProfile
from pg_tensile.trace import Trace


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """A swap-out after each access of a tensor with a next one, freed on the spot, and a swap-in in the gap before that
    next access, also between consecutive operators. Tensors without bytes or accesses stay where they are."""
    return {job: _plan(trace) for job, trace in traces.items()}


def _plan(trace: Trace) -> Plan:
    order = trace.access_by_tensor
    tensor, operator = trace.access_tensor[order], trace.access_operator[order]
    following = np.roll(operator, -1)  # operator of the tensor's next access
    last = np.diff(tensor, append=-1) != 0
    following[last] = trace.tensor_first[tensor[last]]  # in the next iteration
    swapped = (trace.tensor_bytes[tensor] > 0) & (~last | trace.persistent[tensor])
    tensor, operator, following = tensor[swapped], operator[swapped], following[swapped]
    rows = np.zeros(2 * len(tensor), EVENT_ROW)
    rows["tensor"] = np.concatenate([tensor, tensor])
    rows["kind"][: len(tensor)], rows["kind"][len(tensor) :] = EventKind.SWAP_OUT, EventKind.SWAP_IN
    rows["trigger"] = np.concatenate([operator, following - 1])
    rows["deadline"] = np.concatenate([operator, following])
    return Plan(rows)
