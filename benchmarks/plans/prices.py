"""The origin of the constants of `joint`, on networks of their own.

The networks (experiments/networks.py, `TUNING`) are not among those of `planner`, which so stay unseen. At
each point (a network, a profile of a device, a budget) the time of a plan is compared with that without a plan.

- PRICES: one pass for each candidate of a grid at each point. Prices are chosen one by one, each for the least mean of
  the logarithms of the best time of those chosen so far: so any number of the first ones is a good choice, too.
- CONGESTED: the same with stretched passes, at the points whose best plan of PRICES still waits.
- Other constants of job_planner/planner.py: the mean time and the planner's computing time with each of them changed
  as `ALTERNATIVES` says.

A test compares job_planner/prices.py with the choice. Choosing takes ten minutes on two cores, and so do the
effects.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.experiments.networks import TUNING, Network
from benchmarks.plans.planner import PROFILES, trace_of
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from pg_tensile.planning.job_planner import planner as planner_module
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.prices import CONGESTED, PRICES, Prices
from pg_tensile.planning.latency import roofline

TUNING_PROFILES = ("RTX A6000", "H100", "slow link")
SAVED = (0.3, 0.5, 0.65, 0.75)
GRID = tuple(
    Prices(*values)
    for values in product((0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6), (0.0, 0.3, 0.6, 1.0), (1, 2, 4, 8, 24))
)
CONGESTED_GRID = tuple(Prices(*values) for values in product((0.05, 0.3, 1.0, 3.0), (0.3, 0.8), (1, 2, 4, 8)))
AS_IT_IS = "as it is"
NO_PLAN = 20.0  # time that counts where a pass finds no plan, as a multiple of that without a plan
ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "OPERATORS": (9_500, 38_000),
    "SLOW": (1.0, 2.0),
    "STRETCHED": (1.0, 1.3),
    "STRETCHES": ((0.5,), (0.25, 0.5, 0.75, 1.0)),
    "STRETCHED_PASSES": (0, 1, 4),
    "REFINEMENTS": (10, 40),
    "REPAIRS": (2, 8),
}


class Point(NamedTuple):
    """A planner for a network on a device, and a budget in bytes."""

    planner: JobPlanner
    budget_bytes: int


def points(network: Network) -> Iterable[tuple[str, Point]]:
    trace = trace_of(network)
    for profile in TUNING_PROFILES:
        planner = JobPlanner(roofline.timed(trace, PROFILES[profile]), PROFILES[profile])
        for saved in SAVED:
            budget = int((1 - saved) * planner.vanilla.device_peak_bytes)
            if budget >= planner.least_bytes:
                yield f"{network.title}, {profile}, {saved:.0%}", Point(planner, budget)


def slowdown(point: Point, prices: Prices | None = None) -> float:
    """Return the time of the best plan, or of that of one pass, as a multiple of the time without a plan."""
    best = point.planner.best(point.budget_bytes, prices)
    return best.us / point.planner.vanilla.us if isinstance(best, Candidate) else NO_PLAN


def passes(network: Network) -> dict[str, list[float]]:
    """Return the slowdown by each of GRID at each of the network's points."""
    return {name: [slowdown(point, prices) for prices in GRID] for name, point in points(network)}


def stretched_passes(network: Network, chosen: Sequence[Prices]) -> dict[str, list[float]]:
    """Return the slowdown by each of CONGESTED_GRID, the best of its stretches, at the points that wait."""
    found = {}
    for name, point in points(network):
        before = min(slowdown(point, prices) for prices in chosen)
        if planner_module.STRETCHED <= before < NO_PLAN:
            found[name] = [before] + [
                min(slowdown(point, prices._replace(stretch=before**exponent)) for exponent in planner_module.STRETCHES)
                for prices in CONGESTED_GRID
            ]
    return found


def effects(network: Network) -> dict[str, dict[str, float]]:
    """Return the mean logarithm of the slowdown and the computing time in s, by constant and value."""
    changes: list[dict[str, Any]] = [{}]
    changes += [{name: value} for name, values in ALTERNATIVES.items() for value in values]
    results = {}
    for change in changes:
        with patch.multiple(planner_module, **change) if change else nullcontext():
            mine = [point for _, point in points(network)]
            began = time.process_time()
            times = [math.log(slowdown(point)) for point in mine]
            seconds = time.process_time() - began
        title = "".join(f"{name} = {value}" for name, value in change.items()) or AS_IT_IS
        results[title] = {"log": sum(times), "s": seconds, "points": len(times)}
    return results


def choose(
    rows: Sequence[Sequence[float]], candidates: Sequence[Prices], most: int, start: Sequence[float]
) -> list[Prices]:
    """Return the candidates chosen one by one, each for the least mean of the logarithms of the best so far.

    `rows`: slowdowns by candidate at each point; `start`: the slowdown at each point before any is chosen.
    """
    best, chosen = list(start), []
    for _ in range(most):
        means = [
            statistics.fmean(math.log(min(so_far, row[index])) for so_far, row in zip(best, rows, strict=True))
            for index in range(len(candidates))
        ]
        index = min(range(len(candidates)), key=means.__getitem__)
        best = [min(so_far, row[index]) for so_far, row in zip(best, rows, strict=True)]
        chosen.append(candidates[index])
    return chosen


def gathered(networks: Sequence[Network], work: Callable[..., dict[str, Any]], *arguments: Any) -> list[dict[str, Any]]:
    """Do the work for each network, in as many processes as there are cores."""
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        return pool.starmap(work, [(network, *arguments) for network in networks], chunksize=1)


def merged(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    return {name: row for part in parts for name, row in part.items()}


def found_prices(networks: Sequence[Network]) -> Iterator[dict[str, Any]]:
    """Yield the prices that are chosen, and at how many points."""
    rows = merged(gathered(networks, passes))
    prices = choose(list(rows.values()), GRID, len(PRICES), [NO_PLAN] * len(rows))
    congested_rows = merged(gathered(networks, stretched_passes, prices))
    before = [row[0] for row in congested_rows.values()]
    congested = choose([row[1:] for row in congested_rows.values()], CONGESTED_GRID, len(CONGESTED), before)
    yield {
        "table": "chosen",
        "networks": [network.title for network in networks],
        "points": len(rows),
        "congested_points": len(congested_rows),
        "prices": [list(each[:3]) for each in prices],
        "congested": [list(each[:3]) for each in congested],
    }


def measured_effects(networks: Sequence[Network]) -> Iterator[dict[str, Any]]:
    """Yield the mean slowdown and the seconds of computing by constant and value."""
    parts = gathered(networks, effects)
    counted = sum(part[AS_IT_IS]["points"] for part in parts)
    for name in parts[0]:
        yield {
            "table": "effects",
            "constant": name,
            "slowdown": math.exp(sum(part[name]["log"] for part in parts) / counted),
            "seconds": sum(part[name]["s"] for part in parts),
        }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Choose, and measure effects; `quick`: for one network."""
    for name in run.scenarios(WORK):
        yield from WORK[name](TUNING[: 1 if run.quick else None])


WORK = {"choice": found_prices, "effects": measured_effects}


def tables(results: Results) -> list[str]:
    lines = [
        f"Networks: {', '.join(row['networks'])}. Prices were chosen at {row['points']} points, those for a congested "
        f"link at {row['congested_points']}.\n"
        for row in results.rows("chosen")
    ]
    effects = results.rows("effects")
    shown = [
        (
            f"`{row['constant']}`",
            f"{row['slowdown']:.4f}",
            f"{row['slowdown'] / effects[0]['slowdown'] - 1:+.2%}",
            f"{row['seconds'] / effects[0]['seconds']:.2f}",
        )
        for row in effects
    ]
    return [*lines, *table(("constant", "time", "change", "computing"), shown)]


BENCHMARK = Section("Constants of the planner", rows, tables, device=f"sim:{', '.join(TUNING_PROFILES)}")
