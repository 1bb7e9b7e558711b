"""Swapping everything but what there is room for: plans for budgets that only a plan close to `swap_all` can meet.

Tensors that leave for the shortest time stay first: that takes the least memory for the transfers that it saves.
"""

from __future__ import annotations

import numpy as np

from pg_tensile.peak import footprint
from pg_tensile.plan import Plan
from pg_tensile.policies.swap_all import Absences, absences, swaps
from pg_tensile.sequence import AccessSequence
from pg_tensile.trace import Trace


def least_bytes(trace: Trace) -> int:
    """The device memory that swapping everything takes: no plan that is known takes less."""
    return footprint(trace, swaps(trace, absences(trace))).device_peak_bytes


def relaxed_swap_all(trace: Trace, budget_bytes: int) -> Plan | None:
    """Swaps alone that keep the iteration within the budget, workspaces included; None if that is impossible."""
    away = absences(trace)
    memory = AccessSequence(trace, swaps(trace, away)).footprint + trace.workspace_bytes
    if memory.max() > budget_bytes:
        return None
    stays = np.zeros(len(away.tensor), np.bool_)
    count, size = trace.operator_count, trace.tensor_bytes[away.tensor]
    for gap in np.lexsort((-size, away.until - away.since)).tolist():
        first, end, nbytes = int(away.since[gap]) + 1, int(away.until[gap]), int(size[gap])
        parts = [memory[first:end]] if end <= count else [memory[first:], memory[: end - count]]
        if all(part.size == 0 or part.max() + nbytes <= budget_bytes for part in parts):
            stays[gap] = True
            for part in parts:
                part += nbytes
    return swaps(trace, Absences(*(column[~stays] for column in away)))
