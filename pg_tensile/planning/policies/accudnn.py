"""AccUDNN (Guo et al.): all feature maps are swapped except those that would make the backward pass wait.

This is the memory optimizer of AccUDNN, section 3, on its own; batchsize/ chooses the batch size. A feature map is
swapped out after its last read in forward and swapped in as early as memory allows. Constraint (6) identifies those
that cannot be back in time: they are pinned, as many as fit. Where they do not all fit, or where copies out take longer
than forward, the job waits; the paper would take a smaller batch. The method plans a single job, so each job gets its
share of the budget.
"""

from __future__ import annotations

from collections.abc import Mapping

from pg_tensile.errors import BudgetError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.building_blocks.ready import Layerwise
from pg_tensile.planning.policies.building_blocks.transfer_times import schedule
from pg_tensile.planning.policies.lru import shares
from pg_tensile.planning.trace.trace import Trace


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return a plan for each job within its part of the budget, as given by `lru.shares`.

    `budget_bytes`: None means the device's memory. Raises BudgetError with the smallest budget with which every job's
    part is enough when all its feature maps are swapped.
    """
    jobs = {job: Layerwise(roofline.timed(trace, profile), profile) for job, trace in traces.items()}
    granted = shares(traces, profile, budget_bytes)
    vanilla = {job: max(1, footprint(trace).device_peak_bytes) for job, trace in traces.items()}
    total = sum(vanilla.values())
    least = {job: -(-each.least_bytes * total // vanilla[job]) for job, each in jobs.items()}
    short = [job for job, each in jobs.items() if each.least_bytes > granted[job]]
    if short:
        job = max(short, key=lambda job: least[job])
        budget = profile.memory_bytes if budget_bytes is None else budget_bytes
        largest = int(jobs[job].least_memory.argmax())
        raise BudgetError(budget, least[job], traces[job].operator_label(largest))
    return {job: _plan(each, granted[job]) for job, each in jobs.items()}


def _plan(job: Layerwise, budget_bytes: int) -> Plan:
    pinning = job.pinning(budget_bytes)
    assert pinning is not None  # `plan` has checked that the least bytes fit
    swapped = [each for each in job.maps if each.tensor not in pinning.pinned]
    sequence = AccessSequence(job.trace, job.plan_of(swapped))
    return schedule(sequence, job.profile, budget_bytes)
