"""Lower bounds for a trace of any size, whatever the policy: on memory, and on time within a budget.

Both hold for the trace as given; with early updates, or in another order, it is another trace.
"""

from __future__ import annotations

import numpy as np

from pg_tensile.errors import BudgetError
from pg_tensile.planning.bounds.knapsack import cut_us
from pg_tensile.planning.bounds.program import least_added_us
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import floor_bytes
from pg_tensile.planning.trace.trace import Int64s, Trace

LIMIT_S = 20.0  # of solver time


def check_budget(trace: Trace, peak_bytes: int) -> None:
    """Raise BudgetError if `peak_bytes` is below `floor_bytes`."""
    if peak_bytes < floor_bytes(trace):
        raise BudgetError(peak_bytes, floor_bytes(trace), trace.operator_label(trace.largest_operator))


def least_us(trace: Trace, profile: DeviceProfile, peak_bytes: int, limit_s: float = LIMIT_S) -> float:
    """Return a lower bound, in µs, on a steady-state iteration of any plan with a device peak within `peak_bytes`.

    It is the larger of two bounds, the linear program's (program.py) and a weaker one (knapsack.py), which is returned
    alone if the solver has not ended after `limit_s` seconds. Raises BudgetError if `peak_bytes` is below
    `floor_bytes`.
    """
    solved = solved_us(trace, profile, peak_bytes, limit_s)
    if solved is not None:
        return solved
    trace = roofline.timed(trace, profile)
    return cut_us(trace, profile, _excess(trace, peak_bytes))


def solved_us(trace: Trace, profile: DeviceProfile, peak_bytes: int, limit_s: float = LIMIT_S) -> float | None:
    """Return `least_us`, or None if the solver has not ended after `limit_s` seconds. Raises BudgetError likewise."""
    check_budget(trace, peak_bytes)
    trace = roofline.timed(trace, profile)
    total_us, excess = float(trace.latency_us.sum()), _excess(trace, peak_bytes)
    if excess.max() <= 0:
        return total_us
    added_us = least_added_us(trace, profile, excess, limit_s)
    return None if added_us is None else max(cut_us(trace, profile, excess), total_us + added_us)


def _excess(trace: Trace, peak_bytes: int) -> Int64s:
    """Return int64[n]: the bytes over the peak at each operator, without tensors that no operator accesses.

    These are parts of a trace that may be off the device at all times.
    """
    idle = trace.persistent & (np.diff(trace.tensor_start) == 0)
    return trace.footprint + trace.workspace_bytes - peak_bytes - int(trace.tensor_bytes[idle].sum())
