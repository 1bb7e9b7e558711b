"""Swapping on demand, least recently used first: the passive mode of Capuchin (Peng et al., ASPLOS 2020) on its own.

A baseline for comparisons. Where the next operator does not fit, tensors that it does not access are swapped out while
it waits, the least recently used first. They are swapped in right before an operator that accesses them, which waits as
well. Nothing is planned ahead, so nothing overlaps. Dead tensors are released implicitly. The first iteration of
`capuchin`, before there is a plan, takes as long as an iteration of this policy.

With `prefetch` it is ODSwap, the baseline of SwapAdvisor (section 6.1): later iterations repeat the decisions of the
first, and as these are known, copies overlap with operators (building_blocks/transfer_times.py): out from the last
access on, in as soon as there is room.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pg_tensile.planning.building_blocks.coded import coded
from pg_tensile.planning.building_blocks.shares import check_shares, shares, working_sets
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Trace


@coded
def plan(
    traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None, prefetch: bool = False
) -> dict[int, Plan]:
    """Return a plan for each job within its `shares` of the budget.

    `budget_bytes`: None means the device's memory. `prefetch`: each job counts on the whole link. Raises BudgetError
    with the smallest budget for which every job's largest operator fits into its share.
    """
    check_shares(traces, {job: working_sets(trace) for job, trace in traces.items()}, profile, budget_bytes)
    granted = shares(traces, profile, budget_bytes)
    plans = {job: _plan(trace, granted[job], prefetch) for job, trace in traces.items()}
    if not prefetch:
        return plans
    return {job: schedule(AccessSequence(traces[job], plan), profile, granted[job]) for job, plan in plans.items()}


def _plan(trace: Trace, budget: int, early: bool) -> Plan:
    """Return the plan of the second of two passes. `early`: copies out start after the last access.

    The tensors resident at an operator depend only on the accesses since each tensor's last access, because no tensor
    is evicted before an older one. So the first pass, whatever it starts from, ends in the state in which every later
    one starts and ends.
    """
    columns = Columns(trace)
    budget -= int(trace.tensor_bytes[np.diff(trace.tensor_start) == 0].sum())
    resident = {tensor: 0 for tensor in np.flatnonzero(trace.persistent).tolist() if _counts(columns, tensor)}
    _walk(columns, budget, resident, early)
    return Plan.build(_walk(columns, budget, resident, early))


def _counts(columns: Columns, tensor: int) -> bool:
    return columns.bytes[tensor] > 0 and bool(columns.accesses[tensor])


def _walk(columns: Columns, budget: int, resident: dict[int, int], early: bool) -> list[Event]:
    """Return the events of an iteration.

    `resident`: tensors with bytes and accesses, least recently used first, with the operator of that access; updated to
    those at the end. `early`: as for `_plan`.
    """
    events: list[Event] = []
    size, level = columns.bytes, sum(columns.bytes[tensor] for tensor in resident)
    for operator, uses in enumerate(columns.uses):
        before = (operator - 1) % columns.operators  # room for the first operator is made at the iteration's end
        used = [use.tensor for use in uses if size[use.tensor]]
        coming = [tensor for tensor in used if tensor not in resident]
        level += sum(size[tensor] for tensor in coming)
        evicted = []
        for tensor in resident:
            if level + columns.workspace[operator] <= budget:
                break
            if tensor not in used:
                level -= size[tensor]
                evicted.append(tensor)
        for tensor in evicted:
            used_last = resident.pop(tensor)
            since = used_last if used_last <= before else 0  # it was used last in the iteration before
            events.append(Event(EventKind.SWAP_OUT, tensor, since if early else before, before))
        for tensor in coming:
            if columns.persistent[tensor] or columns.accesses[tensor][0] < operator:
                events.append(Event(EventKind.SWAP_IN, tensor, before, operator))
        for tensor in used:
            resident.pop(tensor, None)
            if columns.persistent[tensor] or columns.accesses[tensor][-1] > operator:
                resident[tensor] = operator
            else:
                level -= size[tensor]
    return events
