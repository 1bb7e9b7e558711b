"""When a job would start, and why, by the scheduler's rule (scheduling/admission.py).

A job starts if its least memory and that of the running jobs fit into the device's budget, and all of them can have
plans that keep what was promised; or if memory can flow between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Literal

from pg_tensile.planning.explain.beside import Beside
from pg_tensile.planning.explain.request import Admission, Ahead, Request
from pg_tensile.text import size


@dataclass(frozen=True)
class Start:
    """When the job would start, and why, in words."""

    when: Literal["now", "later", "never"]
    why: str


@dataclass(frozen=True)
class LaterStart(Start):
    """A start that has to wait for others; `wait_s` is an upper bound in seconds, None if unknown."""

    wait_s: float | None


def start_of(
    request: Request,
    least_bytes: int,
    admission: Admission,
    largest: str | None,
    unplanned: str | None,
    obstacle: str | None = None,
    beside: Beside | None = None,
) -> Start:
    """Return the start of a job that needs at least `least_bytes`.

    `largest` describes the operator that needs the most memory, if known; `unplanned` is why no plan can be made, if
    so; `obstacle` is why it waits for running jobs to end although its memory is there, if it does. `beside`: its plan
    beside the running jobs, if there is one.
    """
    need = least_bytes + request.overhead_bytes
    budget = admission.budget_bytes
    promise = f" for its max_slowdown of {request.max_slowdown:g}" if request.max_slowdown is not None else ""
    because = f"; the most is needed by {largest}" if largest else ""
    if request.memory_budget is not None and least_bytes > request.memory_budget:
        least, limit = size(least_bytes, True), size(request.memory_budget)
        name = request.budget_name or "memory_budget"
        return Start("never", f"it needs at least {least}{promise}, more than its {name} of {limit}{because}")
    if need > budget:
        return Start(
            "never", f"it needs at least {size(need, True)}{promise}, {request.device} has {size(budget)}{because}"
        )
    if unplanned:
        return Start("never", unplanned)
    if request.open_job is not None:
        return LaterStart("later", f"the model is being trained by job {request.open_job}", request.open_job_s)
    if request.ranks is not None and request.ranks["waits_for"] is not None:
        return _start_on_cluster(request.ranks)
    running = "1 running job" if admission.running == 1 else f"{admission.running} running jobs"
    parts = [f"it needs at least {size(need, True)} of the {size(budget)} of {request.device}"]
    parts += [f"{running} at least {size(admission.least_bytes)}"] if admission.running else []
    parts += [f"predictions {size(admission.inference_bytes)}"] if admission.inference_bytes else []
    why = ", ".join(parts) + (f"; waiting already: {admission.waiting}" if admission.waiting else "")
    if obstacle is not None:
        alone = budget - admission.inference_bytes
        return LaterStart("later", f"{why}; {obstacle}", _wait_s(max(need, alone), admission))
    if beside is not None and beside.flow is not None:
        return Start("now", f"{why}; it would run {beside.flow}")
    if beside is not None or admission.has_room_for(need):
        return Start("now", why)
    return LaterStart("later", why, _wait_s(need, admission))


def _start_on_cluster(ranks: Mapping[str, Any]) -> Start:
    """Return the start of a job for which the Ray cluster has not all the processors that it asks for."""
    why = ranks["waits_for"]
    if ranks["count"] < ranks["most"]:
        count = "1 rank" if ranks["count"] == 1 else f"{ranks['count']} ranks"
        return LaterStart("later", f"{why}; with {count} after pg_tensile.ray_timeout", None)
    return LaterStart("later", why, None)


def _wait_s(need: int, admission: Admission) -> float | None:
    """Return an upper bound, in seconds, on the wait of a job that needs `need` bytes.

    Jobs ahead of it start in their order, as soon as enough of the running ones have ended. None if a job must end
    first whose end is unknown.
    """
    running = [job for job in admission.ahead if job.running]
    free = admission.budget_bytes - admission.inference_bytes - sum(job.least_bytes for job in running)
    ends = [(_or_never(job.remaining_s), job.least_bytes) for job in running]
    heapify(ends)
    now = 0.0
    for job in (*(job for job in admission.ahead if not job.running), Ahead(False, need, None)):
        while free < job.least_bytes:
            if not ends or ends[0][0] == inf:
                return None
            end, freed = heappop(ends)
            now = max(now, end)
            free += freed
        free -= job.least_bytes
        heappush(ends, (now + _or_never(job.remaining_s), job.least_bytes))
    return now


def _or_never(seconds: float | None) -> float:
    return inf if seconds is None else seconds
