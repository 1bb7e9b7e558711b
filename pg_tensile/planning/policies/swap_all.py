"""Swapping every tensor out after each access and in before the next: the least memory that swapping alone can reach.

A floor for tests and comparisons, not for use: no transfer overlaps with computation. Parameters and optimizer states
are swapped as well, across the end of the iteration. At each operator, only the tensors that it accesses are resident
(and those that no operator accesses).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import EVENT_ROW, EventKind, Plan
from pg_tensile.planning.policies.building_blocks.idle import idle_intervals
from pg_tensile.planning.policies.coded import coded
from pg_tensile.planning.trace.trace import Int64s, Trace


@coded
def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return plans that swap each tensor out after every access that another one follows, and in right before that one.

    A swap-out frees on the spot. A swap-in is triggered in the gap before the next access, also between consecutive
    operators. Tensors without bytes or accesses stay where they are.
    """
    return {job: swaps(trace, idle_intervals(trace)) for job, trace in traces.items()}


def swaps(trace: Trace, intervals: Int64s) -> Plan:
    """Return a plan that swaps tensors out right after the begin of idle intervals and in right before their end.

    `intervals`: int64[k, 3], as `idle_intervals` returns them. Swap-outs free on the spot.
    """
    tensor, since, until = intervals.T[0], intervals.T[1] // 2, intervals.T[2] // 2 % trace.operator_count
    rows = np.zeros(2 * len(tensor), EVENT_ROW)
    rows["tensor"] = np.concatenate([tensor, tensor])
    rows["kind"][: len(tensor)], rows["kind"][len(tensor) :] = EventKind.SWAP_OUT, EventKind.SWAP_IN
    rows["trigger"] = np.concatenate([since, until - 1])
    rows["deadline"] = np.concatenate([since, until])
    return Plan(rows)
