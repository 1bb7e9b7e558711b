"""Jobs whose groups interlock, on one device: how long their iterations take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pg_tensile.planning.waterwave.grants import Grants
from pg_tensile.planning.waterwave.groups import Group


class Flow(NamedTuple):
    """Times and memory of jobs that interlock, in their steady state."""

    iteration_us: dict[int, float]  # by job
    most_bytes: int  # of all jobs together, at any time


@dataclass(slots=True)
class _Runner:
    left_us: float = 0.0  # of the running group, alone on the device
    waiting_since: float | None = None
    iterations: int = 0
    counted_from: float = 0.0
    counted_to: float = 0.0
    counted_iterations: int = 0


def simulate_flow(
    jobs: Mapping[int, Sequence[Group]], budget_bytes: int, contention: float, iterations: int = 12
) -> Flow | None:
    """Return how long jobs take that begin their groups as soon as `Grants` lets them; None if they cannot all run.

    `contention`: how much two groups at once slow each other down: 0 not at all, 1 so much that nothing is gained.
    Each job executes at least `iterations` iterations; the first third does not count.
    """
    grants = Grants(budget_bytes)
    if not all(grants.join(number, groups) for number, groups in jobs.items()):
        return None
    runners = {number: _Runner() for number in jobs}
    now, most = 0.0, 0
    while any(runner.iterations < iterations for runner in runners.values()):
        _begin_waiting(grants, runners, now)
        most = max(most, grants.held_bytes())
        running = [number for number, job in grants.jobs.items() if job.running]
        assert running, "a safe state has a job that can go on"
        pace = 1 / (1 + contention * (len(running) - 1))
        elapsed = min(runners[number].left_us for number in running)
        now += elapsed / pace
        for number in running:
            runners[number].left_us -= elapsed
            if runners[number].left_us <= 0:
                _end(grants, number, runners[number], now, iterations)
    return Flow(
        {
            number: (runner.counted_to - runner.counted_from) / runner.counted_iterations
            for number, runner in runners.items()
        },
        most,
    )


def _begin_waiting(grants: Grants, runners: Mapping[int, _Runner], now: float) -> None:
    """Begin the next group of each job that may, the one that has waited longest first."""
    idle = [number for number, job in grants.jobs.items() if not job.running]
    for number in idle:
        if runners[number].waiting_since is None:
            runners[number].waiting_since = now
    for number in sorted(idle, key=lambda number: (runners[number].waiting_since, number)):
        if grants.begin(number):
            runner, job = runners[number], grants.jobs[number]
            runner.left_us = job.groups[job.position].us
            runner.waiting_since = None


def _end(grants: Grants, number: int, runner: _Runner, now: float, iterations: int) -> None:
    grants.end(number)
    if grants.jobs[number].position == 0:
        runner.iterations += 1
        runner.counted_to = now
        if runner.iterations <= iterations // 3:
            runner.counted_from = now
        else:
            runner.counted_iterations += 1
