"""Shares of the budget for jobs that are planned each by itself, and the least memory of a plan of swaps alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pg_tensile.errors import BudgetError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.trace.trace import Int64s, Trace


def check_shares(
    traces: Mapping[int, Trace], memory: Mapping[int, Int64s], profile: DeviceProfile, budget_bytes: int | None
) -> None:
    """Raise BudgetError, with the smallest budget that is enough, if a job needs more than its share.

    `memory`: int64[n] for each job, the least bytes during each operator.
    """
    budget = profile.memory_bytes if budget_bytes is None else budget_bytes
    vanilla = {job: footprint(trace).device_peak_bytes for job, trace in traces.items()}
    total = sum(vanilla.values())
    least = {job: -(-int(needed.max()) * total // max(vanilla[job], 1)) for job, needed in memory.items()}
    if least and max(least.values()) > budget:
        job = max(least, key=lambda job: least[job])
        raise BudgetError(budget, least[job], traces[job].operator_label(int(memory[job].argmax())))


def shares(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, int]:
    """Return each job's share of the budget in bytes, in proportion to its device peak without a plan.

    So every job has to save the same fraction of its peak. Baselines for single jobs plan each job within its share.
    `budget_bytes`: None means the device's memory.
    """
    budget = profile.memory_bytes if budget_bytes is None else budget_bytes
    vanilla = {job: footprint(trace).device_peak_bytes for job, trace in traces.items()}
    total = max(sum(vanilla.values()), 1)
    return {job: budget * peak // total for job, peak in vanilla.items()}


def least_bytes(trace: Trace) -> int:
    """Return the smallest budget in bytes for which one job has a plan: the largest of the working sets."""
    return int(working_sets(trace).max())


def working_sets(trace: Trace) -> Int64s:
    """Return int64[n], the working sets: bytes that each operator accesses, its workspace, and tensors never accessed.

    The last stay on the device.
    """
    unused = trace.tensor_bytes[np.diff(trace.tensor_start) == 0].sum()
    sets: Int64s = trace.working_set_bytes + unused
    return sets
