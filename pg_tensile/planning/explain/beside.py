"""A job's plan beside the jobs that run: the scheduler's decision for all of them together.

Running jobs keep what they were promised (`max_slowdown`), in memory and in their part of the link; the rest is
divided as the scheduler divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.explain.request import Admission
from pg_tensile.planning.policies.joint.part import AbandonedError
from pg_tensile.planning.scheduling.decisions import DeviceState, JobState, Planned, Waits
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler


@dataclass(frozen=True)
class Beside:
    """The job's first plan beside the running ones; times are None for a job that is executed eagerly.

    `slowdown` is `planned_us` over the time without a plan; `link_share` is the job's part of the link, 1 if its plan
    moves nothing.
    """

    planned_bytes: int
    link_share: float
    planned_us: float | None = None
    slowdown: float | None = None


class Outlook(NamedTuple):
    """A job's prospects beside the running ones.

    `admission` has the memory that those hold with their promises. `beside` is None if the job would not start, or if
    planning was abandoned. `obstacle` is why it would wait although its least memory is there: a promise, its own or
    another one's, cannot be kept, or host memory is short.
    """

    admission: Admission
    beside: Beside | None = None
    obstacle: str | None = None


def outlook(
    scheduler: DeviceScheduler,
    device: DeviceState,
    job: JobState,
    running: Sequence[JobState],
    admission: Admission,
    over: Callable[[], bool],
) -> Outlook:
    """Return the prospects of `job` beside the `running` ones; planning is abandoned once `over` returns True."""
    needs = scheduler.needs(device, [*running, job])
    admission = _with_promises(admission, needs, running)
    if not admission.has_room_for(needs.get(job.job, job.least_bytes) + job.overhead_bytes):
        return Outlook(admission)
    try:
        decision = scheduler.schedule(device, [*running, job], over=over).decisions[job.job]
    except AbandonedError:
        return Outlook(admission)
    if isinstance(decision, Waits):
        return Outlook(admission, obstacle=decision.reason)
    if not isinstance(decision, Planned):
        return Outlook(admission)
    slowdown = None
    if decision.iteration_us is not None and decision.vanilla_us:
        slowdown = decision.iteration_us / decision.vanilla_us
    return Outlook(admission, Beside(decision.planned_bytes, decision.link_share, decision.iteration_us, slowdown))


def _with_promises(admission: Admission, needs: Mapping[int, int], running: Iterable[JobState]) -> Admission:
    """Return the admission with the bytes that running jobs have to be given, where it has their least bytes."""
    more = {job.job: max(0, needs.get(job.job, 0) - job.least_bytes) for job in running}
    ahead = tuple(each._replace(least_bytes=each.least_bytes + more.get(each.job, 0)) for each in admission.ahead)
    return admission._replace(least_bytes=admission.least_bytes + sum(more.values()), ahead=ahead)
