"""Plans of `joint` for networks that it was not made with, beside what no plan can be below.

For each network, profile of a device and budget: the time of an iteration under the first plan, and under the plan that
a search finds (policies/joint/plan_search.py), over that without a plan, and the lower bound (planning/bounds).
Latencies are the roofline's; on the noisy profile each operator's is drawn (log-normal, as beside a busy neighbour)
before planning. Everything is simulated on the trace that was planned. Updates are early, as in the server.

Checked: less memory never takes less time, and a search never makes a plan slower. Counted: the points at which the
time lost is at most twice what is lost at least.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.checks import Check
from benchmarks.experiments.networks import UNTUNED, Network, named
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from pg_tensile.planning import bounds
from pg_tensile.planning.device.profile import H100_PCIE, RTX_4090, RTX_A6000, DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.policies.joint.plan_search import PlanSearch
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.simulated import captured
from pg_tensile.tools.cli.bench import parse

SAVED = tuple(percent / 100 for percent in range(20, 80, 5))  # of the peak without a plan
SHOWN = (0.2, 0.5, 0.65, 0.75)
NOISY, SIGMA = "noisy", 0.5
PROFILES: dict[str, DeviceProfile] = {
    "RTX A6000": RTX_A6000,
    "H100": H100_PCIE,
    "RTX 4090": RTX_4090,
    "slow link": RTX_A6000.with_share(0.5),
    NOISY: RTX_A6000,
}
HEADINGS = ("saved", "profile", "first plan", "found", "bound", "within twice", "found, s")


def trace_of(network: Network) -> Trace:
    options = [
        "bench",
        *network.arguments(),
        "--device",
        f"sim:{RTX_A6000.name}",
        "--policies",
        "none,joint:early_update=true",
    ]
    return captured(parse(options)).early.trace


def timed(trace: Trace, profile: str) -> Trace:
    trace = roofline.timed(trace, PROFILES[profile])
    if profile != NOISY:
        return trace
    factors = np.random.default_rng(0).lognormal(0.0, SIGMA, trace.operator_count)
    return trace.with_latencies(trace.latency_us * factors)


def measure(network: Network, quick: bool) -> Iterator[dict[str, Any]]:
    captured_trace = trace_of(network)
    for profile in [*PROFILES][: 1 if quick else None]:
        planner = JobPlanner(timed(captured_trace, profile), PROFILES[profile])
        vanilla = planner.vanilla
        budgets = {saved: int((1 - saved) * vanilla.device_peak_bytes) for saved in (SHOWN if quick else SAVED)}
        possible = [budget for budget in budgets.values() if budget >= planner.least_bytes]
        began = time.process_time()
        first = {budget: planner.best(budget) for budget in possible}
        first_s = time.process_time() - began
        by_budget = PlanSearch(planner).ladder(possible)
        found_s = time.process_time() - began - first_s
        for saved, budget in budgets.items():
            plan, searched = first.get(budget), by_budget.get(budget)
            if not isinstance(plan, Candidate) or not isinstance(searched, Candidate):
                continue
            yield {
                "network": network.title,
                "operators": planner.trace.operator_count,
                "profile": profile,
                "saved": saved,
                "first": plan.us / vanilla.us,
                "found": searched.us / vanilla.us,
                # It takes seconds.
                "bound": bounds.least_us(planner.trace, planner.profile, budget) / vanilla.us
                if saved in SHOWN
                else None,
                "first_s": first_s / len(possible),
                "found_s": found_s / len(possible),
            }


def rows_of(network: Network, quick: bool) -> list[dict[str, Any]]:
    return list(measure(network, quick))


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure all networks, in as many processes as there are cores; `quick`: the first one, on one profile."""
    wanted = run.wanted([network.title for network in UNTUNED[: 1 if run.quick else None]])
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        measured = pool.imap(partial(rows_of, quick=run.quick), [named(UNTUNED, title) for title in wanted])
        for _ in run.scenarios(wanted):
            yield from next(measured)


def slower_with_more(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the pairs of neighbouring budgets of which the larger has the slower plan."""
    by_curve = sorted(rows, key=lambda row: (row["network"], row["profile"], row["saved"]))
    curves = (list(curve) for _, curve in groupby(by_curve, key=lambda row: (row["network"], row["profile"])))
    return [(more, less) for curve in curves for more, less in pairwise(curve) if more["found"] > less["found"]]


def is_near(row: Mapping[str, Any]) -> bool:
    return bool(row["found"] - 1 <= 2 * (row["bound"] - 1) + 0.01)


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    shown = []
    for saved in SHOWN:
        for profile in PROFILES:
            cell = [row for row in rows if row["saved"] == saved and row["profile"] == profile]
            if cell:
                means = (f"{statistics.mean(row[name] for row in cell):.3f}" for name in ("first", "found", "bound"))
                near = f"{sum(map(is_near, cell))} of {len(cell)}"
                seconds = f"{statistics.median(row['found_s'] for row in cell):.1f}"
                shown.append((f"{saved:.0%}", profile, *means, near, seconds))
    return shown


def checks(results: Results) -> list[Check]:
    rows = results.rows()
    faults: dict[str, Sequence[object]] = {
        "slower with more memory": slower_with_more(rows),
        "searched and slower": [row for row in rows if row["found"] > row["first"] * (1 + 1e-9)],
        "below the bound": [row for row in rows if row["bound"] and row["found"] < row["bound"] * (1 - 1e-9)],
    }
    counts = {f"points that are {name}": len(found) for name, found in faults.items()}
    return [Check("planner", what, f"{count}", f"0 of {len(rows)}", not count) for what, count in counts.items()]


def tables(results: Results) -> list[str]:
    return table(HEADINGS, table_rows(results.rows()))


def expected(_kind: str) -> list[str]:
    return [network.title for network in UNTUNED]


BENCHMARK = Section(
    "Plans for networks that the planner was not made with", rows, tables, checks, expected, f"sim:{RTX_A6000.name}"
)
