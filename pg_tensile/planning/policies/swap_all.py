"""Every tensor out after each access and back right before the next: the least memory that swapping alone can reach.

The floor for tests and comparisons, not for use: nothing overlaps. Parameters and optimizer states go as well, across
the end of the iteration. What is left on the device at an operator is what it accesses itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import EVENT_ROW, EventKind, Plan
from pg_tensile.planning.policies.coded import coded
from pg_tensile.planning.trace.trace import Int64s, Trace


@coded
def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """A swap-out after each access of a tensor with a next one, freed on the spot, and a swap-in in the gap before that
    next access, also between consecutive operators. Tensors without bytes or accesses stay where they are."""
    return {job: swaps(trace, absences(trace)) for job, trace in traces.items()}


class Absences(NamedTuple):
    """Where tensors could be away, a of them: from after one access until the next, which for persistent tensors may be
    in the next iteration (`until` ≥ n)."""

    tensor: Int64s  # [a]
    since: Int64s  # [a]: operator
    until: Int64s  # [a]: operator


def absences(trace: Trace) -> Absences:
    """All of them, of tensors with bytes; by tensor, then by operator."""
    order = trace.access_by_tensor
    tensor, since = trace.access_tensor[order].astype(np.int64), trace.access_operator[order].astype(np.int64)
    until = np.roll(since, -1)
    last = np.diff(tensor, append=-1) != 0
    until[last] = trace.tensor_first[tensor[last]] + trace.operator_count
    able = (trace.tensor_bytes[tensor] > 0) & (~last | trace.persistent[tensor])
    return Absences(tensor[able], since[able], until[able])


def swaps(trace: Trace, away: Absences) -> Plan:
    """Each tensor out right after its access, freed on the spot, and back right before the next one."""
    until = away.until % trace.operator_count
    rows = np.zeros(2 * len(until), EVENT_ROW)
    rows["tensor"] = np.concatenate([away.tensor, away.tensor])
    rows["kind"][: len(until)], rows["kind"][len(until) :] = EventKind.SWAP_OUT, EventKind.SWAP_IN
    rows["trigger"] = np.concatenate([away.since, until - 1])
    rows["deadline"] = np.concatenate([away.since, until])
    return Plan(rows)
