"""The processor time of plans by policies and of the scheduler's rounds, also with promises.

The networks are those of planning_speed.py, and jobs of one round have networks of slightly different sizes. The budget
is half of what the jobs take without a plan for policies, and half-way between the least and the most for rounds.

- policies: `joint` and `tensile` for large traces.
- rounds: the first plan of jobs that have come, made in few passes where traces are long, and the thorough round that
  follows it; without promises, and with a `max_slowdown` for each job that none of the plans reaches.

Processor time does not depend on what else the machine does, or little. Everything is planned anew each time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.planning_speed import build
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan import memory
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.scheduling.decisions import DeviceState, JobState, Planned
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.trace.trace import Trace

POLICIES = ("joint", "tensile")
LARGE = ((1, 5_000), (4, 5_000))  # (jobs, operators of each)
ROUNDS = tuple((jobs, operators) for operators in (93, 500, 1_000) for jobs in (1, 2, 4))
PROMISE = 3.0  # factor on the time without a plan: no plan for these budgets is as slow
REPEATS = 3
REPEATED_S = 10.0  # rounds that take longer are measured once
POLICY_HEADINGS = ("jobs", "operators of each", "`joint`, s", "`tensile`, s", "ratio")
ROUND_HEADINGS = ("jobs", "operators of each", "first plan, s", "with promises", "thorough round, s", "with promises")


def policy_s(policy: str, jobs: int, operators: int) -> float:
    """Return the processor time in s of planning equal jobs within half of their memory by a policy."""
    trace, _ = build(operators)
    data, budget = trace.to_bytes(), jobs * memory.footprint(trace).device_peak_bytes // 2
    traces = {job: Trace.from_bytes(data) for job in range(jobs)}
    began = time.process_time()
    named_policy(policy)(traces, RTX_A6000, budget)
    return time.process_time() - began


def round_s(jobs: int, operators: int, max_slowdown: float | None, may_be_brief: bool) -> float:
    """Return the processor time in s of a round for jobs that have come, each with a promise if there is one."""
    traces = [Trace.from_bytes(build(operators + 10 * number)[0].to_bytes()) for number in range(jobs)]
    budget = sum(least_bytes(trace) + memory.footprint(trace).device_peak_bytes for trace in traces) // 2
    device = DeviceState("cpu", replace(RTX_A6000, kind="host"), budget)
    states = [JobState(number, trace, 0, max_slowdown=max_slowdown) for number, trace in enumerate(traces)]
    began = time.process_time()
    schedule = DeviceScheduler().schedule(device, states, may_be_brief)
    seconds = time.process_time() - began
    assert all(isinstance(decision, Planned) for decision in schedule.decisions.values())
    return seconds


def medians(measurements: Mapping[str, Callable[[], float]], repeated_s: float = math.inf) -> dict[str, float]:
    """Return the medians of measurements in s that take turns; those of more than `repeated_s` are made once."""
    taken: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(REPEATS):
        for name, measurement in measurements.items():
            if max(taken[name], default=0.0) <= repeated_s:
                taken[name].append(measurement())
    return {name: statistics.median(times) for name, times in taken.items()}


def policy_row(jobs: int, operators: int) -> dict[str, Any]:
    taken = medians({policy: partial(policy_s, policy, jobs, operators) for policy in POLICIES})
    return {"jobs": jobs, "operators": build(operators)[0].operator_count} | taken


def round_row(jobs: int, operators: int) -> dict[str, Any]:
    measured = partial(round_s, jobs, operators)
    taken = medians(
        {
            "first": partial(measured, None, True),
            "first_promised": partial(measured, PROMISE, True),
            "thorough": partial(measured, None, False),
            "thorough_promised": partial(measured, PROMISE, False),
        },
        REPEATED_S,
    )
    return {"jobs": jobs, "operators": operators} | taken


def policy_lines(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            *(str(row["jobs"]), f"{row['operators']:,}", *(f"{row[policy]:.2f}" for policy in POLICIES)),
            f"{row['joint'] / row['tensile']:.2f}",
        )
        for row in rows
    ]


def round_lines(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    names = ("first", "first_promised", "thorough", "thorough_promised")
    return [(str(row["jobs"]), f"{row['operators']:,}", *(f"{row[name]:.2f}" for name in names)) for row in rows]


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure all cases; `quick`: the smallest of each kind."""
    cases = {f"{jobs} × {size:,} operators, policies": (policy_row, "policies", jobs, size) for jobs, size in LARGE}
    cases |= {f"{jobs} × {size:,} operators, rounds": (round_row, "rounds", jobs, size) for jobs, size in ROUNDS}
    if run.quick:
        cases = {"quick policies": (policy_row, "policies", 1, 500), "quick rounds": (round_row, "rounds", 1, 93)}
    for name in run.scenarios(cases):
        row_of, table, jobs, operators = cases[name]
        yield {"table": table, **row_of(jobs, operators)}


def tables(results: Results) -> list[str]:
    policies, rounds = policy_lines(results.rows("policies")), round_lines(results.rows("rounds"))
    return [*table(POLICY_HEADINGS, policies), *table(ROUND_HEADINGS, rounds)]


BENCHMARK = Section("Processor time of plans", rows, tables)
