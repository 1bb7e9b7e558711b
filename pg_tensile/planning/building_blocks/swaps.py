"""Plan of swaps in given idle intervals, without overlap with the operators."""

from __future__ import annotations

import numpy as np

from pg_tensile.planning.plan.plan import EVENT_ROW, EventKind, Plan
from pg_tensile.planning.trace.trace import Int64s, Trace


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
