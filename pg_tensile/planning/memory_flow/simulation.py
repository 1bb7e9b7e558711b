"""Jobs whose groups interlock, on one device: how long their iterations take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.memory_flow.grants import Grants, GroupedJob
from pg_tensile.planning.memory_flow.groups import Group

REQUEST_US = 100.0  # that a job waits for the answer to the request for a group, if that is granted at once


class SimulatedFlow(NamedTuple):
    """Times and memory of jobs that interlock, in their steady state."""

    iteration_us: dict[int, float]  # by job; infinite for one that has not begun
    most_bytes: int  # of all jobs together, at any time
    waiting_us: dict[int, float]  # of it, that the job waits for memory
    slowdown: float  # factor on the times of jobs beside these that never wait for memory


class Moment(NamedTuple):
    """The memory that jobs hold from a time on."""

    us: float
    held_bytes: dict[int, int]  # by job


def with_requests(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups with the times of their requests added to their own."""
    return tuple(group._replace(us=group.us + REQUEST_US) for group in groups)


@dataclass(slots=True)
class _Runner:
    left_us: float = 0.0  # of the running group, alone on the device
    waited_us: float = 0.0
    waiting_since: float | None = None
    iterations: int = 0
    counted_from: float = 0.0
    counted_to: float = 0.0
    counted_iterations: int = 0


def simulate_memory_flow(
    jobs: Mapping[int, Sequence[Group]],
    budget_bytes: int,
    contention: float,
    iterations: int = 12,
    beside: int = 0,
    most_groups: int | None = None,
    history: list[Moment] | None = None,
) -> SimulatedFlow | None:
    """Return how long jobs take that begin their groups as soon as `Grants` lets them; None if they cannot all run.

    `contention`: how much two groups at once slow each other down: 0 not at all, 1 so much that nothing is gained.
    Each job executes at least `iterations` iterations; the first third does not count. `beside`: the number of jobs
    that compute all the time beside these, in memory of their own. `most_groups`: of all jobs, after which the
    simulation ends; the time of a job that has not come far enough is then estimated from how far it has come.
    `history`: a list that takes what the jobs hold, whenever that changes.
    """
    grants = Grants(budget_bytes)
    if not all(grants.join(number, groups) for number, groups in jobs.items()):
        return None
    runners = {number: _Runner() for number in jobs}
    now, computed, most, begun = 0.0, 0.0, 0, 0
    while any(runner.iterations < iterations for runner in runners.values()):
        begun += _begin_waiting(grants, runners, now)
        most = max(most, grants.held_bytes())
        if history is not None:
            history.append(Moment(now, {number: job.held_bytes for number, job in grants.jobs.items()}))
        running = [number for number, job in grants.jobs.items() if job.running]
        assert running, "a safe state has a job that can go on"
        pace = 1 / (1 + contention * (len(running) + beside - 1))
        elapsed = min(runners[number].left_us for number in running)
        now += elapsed / pace
        computed += elapsed
        for number, runner in runners.items():
            if not grants.jobs[number].running:
                runner.waited_us += elapsed / pace
        for number in running:
            runners[number].left_us -= elapsed
            if runners[number].left_us <= 0:
                _end(grants, number, runners[number], now, iterations)
        if most_groups is not None and begun >= most_groups:
            break
    us = {number: _iteration_us(runner, grants.jobs[number], now) for number, runner in runners.items()}
    part = {number: runner.waited_us / now if now else 0.0 for number, runner in runners.items()}
    waiting_us = {number: part[number] * us[number] for number in runners}
    return SimulatedFlow(us, most, waiting_us, now / computed if computed else 1.0)


def _iteration_us(runner: _Runner, job: GroupedJob, now: float) -> float:
    """Return the time of an iteration: the mean of those that count; without any, of the parts executed so far."""
    if runner.counted_iterations:
        return (runner.counted_to - runner.counted_from) / runner.counted_iterations
    executed = sum(group.us for group in job.groups[: job.position])
    executed += job.groups[job.position].us - runner.left_us if job.running else 0.0
    whole = sum(group.us for group in job.groups)
    parts = runner.iterations + (executed / whole if whole else 0.0)
    return now / parts if parts else math.inf


def _begin_waiting(grants: Grants, runners: Mapping[int, _Runner], now: float) -> int:
    """Begin the next group of each job that may, the one that has waited longest first; return how many may."""
    begun = 0
    idle = [number for number, job in grants.jobs.items() if not job.running]
    for number in idle:
        if runners[number].waiting_since is None:
            runners[number].waiting_since = now
    for number in sorted(idle, key=lambda number: (runners[number].waiting_since, number)):
        if grants.begin(number):
            runner, job = runners[number], grants.jobs[number]
            runner.left_us = job.groups[job.position].us
            runner.waiting_since = None
            begun += 1
    return begun


def _end(grants: Grants, number: int, runner: _Runner, now: float, iterations: int) -> None:
    grants.end(number)
    if grants.jobs[number].position == 0:
        runner.iterations += 1
        runner.counted_to = now
        if runner.iterations <= iterations // 3:
            runner.counted_from = now
        else:
            runner.counted_iterations += 1
