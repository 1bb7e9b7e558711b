"""A job's plan beside the jobs that run: the scheduler's decision for all of them together.

Running jobs keep what they were promised (`max_slowdown`), in memory and in their part of the link; the rest is
divided as the scheduler divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.explain.request import Admission
from pg_tensile.planning.job_planner.planner import AbandonedError
from pg_tensile.planning.scheduling.decisions import DeviceState, JobState, Planned, Waits
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler


@dataclass(frozen=True)
class MemoryFlowSpeeds:
    """Memory that flows between the job and running ones (scheduling/memory_flow.py).

    The speed of a job is the time of its step without a plan over that with memory that flows; `others` has those of
    the running ones, by number."""

    speed: float
    others: dict[str, float]

    def __str__(self) -> str:
        """Return it in words: "beside job 3: their memory flows, each at 94% of its own speed"."""
        *jobs, last = self.others
        names = f"jobs {', '.join(jobs)} and {last}" if jobs else f"job {last}"
        speeds = {f"{speed:.0%}" for speed in (self.speed, *self.others.values())}
        if len(speeds) == 1:
            return f"beside {names}: their memory flows, each at {speeds.pop()} of its own speed"
        parts = [f"this one at {self.speed:.0%}", *(f"job {job} at {speed:.0%}" for job, speed in self.others.items())]
        return f"beside {names}: their memory flows, {', '.join(parts)} of its own speed"


@dataclass(frozen=True)
class Beside:
    """The job's first plan beside the running ones; times are None for a job that is executed eagerly.

    `slowdown` is `planned_us` over the time without a plan; `link_share` is the job's part of the link, 1 if its plan
    moves nothing. `flow` is None if the job has a constant grant.
    """

    planned_bytes: int
    link_share: float
    planned_us: float | None = None
    slowdown: float | None = None
    flow: MemoryFlowSpeeds | None = None


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
    has_room = admission.has_room_for(needs.get(job.job, job.least_bytes) + job.overhead_bytes)
    if not has_room and not device.memory_flow:
        return Outlook(admission)
    try:
        decisions = scheduler.schedule(device, [*running, job], over=over).decisions
    except AbandonedError:
        return Outlook(admission)
    decision = decisions[job.job]
    if isinstance(decision, Waits):
        return Outlook(admission, obstacle=decision.reason if has_room else None)
    if not isinstance(decision, Planned):
        return Outlook(admission)
    slowdowns = {number: _slowdown(each) for number, each in decisions.items() if isinstance(each, Planned)}
    flow = None
    if decision.groups:
        flowing = [number for number, each in decisions.items() if isinstance(each, Planned) and each.groups]
        speeds = {number: 1 / (slowdowns[number] or 1.0) for number in flowing}
        flow = MemoryFlowSpeeds(speeds.pop(job.job), {str(number): speed for number, speed in speeds.items()})
    slowdown = slowdowns[job.job]
    beside = Beside(decision.planned_bytes, decision.link_share, decision.iteration_us, slowdown, flow)
    return Outlook(admission, beside)


def _slowdown(planned: Planned) -> float | None:
    if planned.iteration_us is None or not planned.vanilla_us:
        return None
    return planned.iteration_us / planned.vanilla_us


def _with_promises(admission: Admission, needs: Mapping[int, int], running: Iterable[JobState]) -> Admission:
    """Return the admission with the bytes that running jobs have to be given, where it has their least bytes."""
    more = {job.job: max(0, needs.get(job.job, 0) - job.least_bytes) for job in running}
    ahead = tuple(each._replace(least_bytes=each.least_bytes + more.get(each.job, 0)) for each in admission.ahead)
    return admission._replace(least_bytes=admission.least_bytes + sum(more.values()), ahead=ahead)
