"""Swapping every tensor out after each access and in before the next: the least memory that swapping alone can reach.

A floor for tests and comparisons, not for use: no transfer overlaps with computation. Parameters and optimizer states
are swapped as well, across the end of the iteration. At each operator, only the tensors that it accesses are resident
(and those that no operator accesses).
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
    """Return plans that swap each tensor out after every access that another one follows, and in right before that one.

    A swap-out frees on the spot. A swap-in is triggered in the gap before the next access, also between consecutive
    operators. Tensors without bytes or accesses stay where they are.
    """
    return {job: swaps(trace, absences(trace)) for job, trace in traces.items()}


class Absences(NamedTuple):
    """Idle intervals, `a` of them, in which tensors could be off the device: from after one access until the next.

    For persistent tensors the next access may be in the next iteration (`until` ≥ n).
    """

    tensor: Int64s  # [a]
    since: Int64s  # [a]: operator
    until: Int64s  # [a]: operator


def absences(trace: Trace) -> Absences:
    """Return the idle intervals of all tensors with bytes, by tensor, then by operator."""
    order = trace.access_by_tensor
    tensor, since = trace.access_tensor[order].astype(np.int64), trace.access_operator[order].astype(np.int64)
    until = np.roll(since, -1)
    last = np.diff(tensor, append=-1) != 0
    until[last] = trace.tensor_first[tensor[last]] + trace.operator_count
    able = (trace.tensor_bytes[tensor] > 0) & (~last | trace.persistent[tensor])
    return Absences(tensor[able], since[able], until[able])


def swaps(trace: Trace, away: Absences) -> Plan:
    """Return a plan that swaps each tensor out right after its access and in right before the next one.

    Swap-outs free on the spot.
    """
    until = away.until % trace.operator_count
    rows = np.zeros(2 * len(until), EVENT_ROW)
    rows["tensor"] = np.concatenate([away.tensor, away.tensor])
    rows["kind"][: len(until)], rows["kind"][len(until) :] = EventKind.SWAP_OUT, EventKind.SWAP_IN
    rows["trigger"] = np.concatenate([away.since, until - 1])
    rows["deadline"] = np.concatenate([away.since, until])
    return Plan(rows)
