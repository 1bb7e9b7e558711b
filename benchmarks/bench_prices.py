"""`make bench-prices`: the origin of the constants of `joint`, on networks of their own.

The networks (experiments/networks.py, `TUNING`) are not among those of `make bench-planner`, which so stay unseen. At
each point (a network, a profile of a device, a budget) the time of a plan is compared with that without a plan.

- PRICES: one pass for each candidate of a grid at each point. Prices are chosen one by one, each for the least mean of
  the logarithms of the best time of those chosen so far: so any number of the first ones is a good choice, too.
- CONGESTED: the same with stretched passes, at the points whose best plan of PRICES still waits.
- Other constants: the mean time and the planner's computing time with each of them changed as `EFFECTS` says, for one
  job, for one job after a search, or for several jobs that share memory and link (`GROUPS`).

The choice and the effects go to benchmarks/results/prices-model.json and to docs/benchmarks.md; a test compares
policies/joint/prices.py with them. Choosing takes ten minutes on two cores, and the effects
(`--effects`) twenty.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.bench_planner import PROFILES, trace_of
from benchmarks.experiments.networks import TUNING, Network
from benchmarks.scenarios import RESULTS, measured_on, write_document
from benchmarks.tables import table
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.policies.building_blocks import recompute_chains, transfer_times
from pg_tensile.planning.policies.joint import contention, off_device, part, search, share_out, sweep
from pg_tensile.planning.policies.joint import planner as planner_module
from pg_tensile.planning.policies.joint.candidate import Candidate
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.policies.joint.prices import CONGESTED, PRICES, Prices
from pg_tensile.tools.bench.report import machine, versions

NAME, KIND = "prices", "model"
PATH = RESULTS / f"{NAME}-{KIND}.json"
TUNING_PROFILES = ("RTX A6000", "H100", "slow link")
SAVED = (0.3, 0.5, 0.65, 0.75)
GRID = tuple(
    Prices(*values)
    for values in product((0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6), (0.0, 0.3, 0.6, 1.0), (1, 2, 4, 8, 24))
)
CONGESTED_GRID = tuple(Prices(*values) for values in product((0.05, 0.3, 1.0, 3.0), (0.3, 0.8), (1, 2, 4, 8)))
AS_IT_IS = "as it is"
NO_PLAN = 20.0  # time that counts where a pass finds no plan, as a multiple of that without a plan
ONE, SEARCHED, SEVERAL = "one job", "searched", "several jobs"
MODULES = (planner_module, sweep, off_device, recompute_chains, transfer_times, search, part, share_out, contention)
# What is changed, by kind. With one unit for each job and no other numbers of them, the jobs that use the link have
# equal parts of it.
EFFECTS: dict[str, list[dict[str, Any]]] = {
    ONE: [
        *({"OPERATORS": value} for value in (9_500, 38_000)),
        *({"SLOW": value} for value in (1.0, 2.0)),
        *({"STRETCHED": value} for value in (1.0, 1.3)),
        *({"STRETCHES": value} for value in ((0.5,), (0.25, 0.5, 0.75, 1.0))),
        *({"STRETCHED_PASSES": value} for value in (0, 1, 4)),
        *({"REFINEMENTS": value} for value in (10, 40)),
        *({"REPAIRS": value} for value in (2, 8)),
        *({"SMALLEST": value} for value in (1 / 200_000, 1 / 2_000)),
        *({"STALE": value} for value in (1.05, 2.0)),
        *({"SMALL_INPUT": value} for value in (1, 16)),
        *({"LONGEST_RECOMPUTATION": value} for value in (8, 48)),
        *({"AHEAD": value} for value in (0.0, 0.5)),
    ],
    SEARCHED: [
        *({"TRIES": value} for value in (40, 160)),
        {"STARTS": 1},
        {"FEWER": 0},
        *({"PENALISED": value} for value in (0.0, 1.0)),
    ],
    SEVERAL: [
        *({"LEVELS": value} for value in (4, 16)),
        *({"UNITS": value} for value in (1, 4)),
        {"OTHER_UNITS": ()},
        {"UNITS": 1, "OTHER_UNITS": ()},
        *({"WORTH_ANOTHER": value} for value in (0.0, 0.1)),
        {"SPLITS": 64},
        {"FEWEST_SPLITS": 8},
        *({"STAGGERS": value} for value in ((1.0,), (0.2, 0.4, 0.6, 0.8, 1.0))),
        *({"WORTH": value} for value in (0.0, 0.02)),
        *({"SLACKS": value} for value in ((), (0.8, 0.65, 0.5, 0.35))),
        *({"PASSES": value} for value in (1, 8)),
    ],
}
SEARCHED_PROFILES, SEARCHED_SAVED = ("RTX A6000",), (0.65,)
# Networks trained at once, within the least memory for which there are plans and a part of what they could save
GROUPS = (("VGG-16", "BERT, 6 layers"), ("GoogLeNet", "MobileNet", "SqueezeNet"), ("Inception v3", "LSTM"))
GROUP_BUDGETS, GROUP_PROFILE = (0.5, 0.25), "RTX A6000"
JUDGED = (0.1, 0.3, 0.5, 0.7, 0.9)  # STAGGERS with which every division is judged


cached_trace = cache(trace_of)


class Point(NamedTuple):
    """A planner for a network on a device, and a budget in bytes."""

    planner: JobPlanner
    budget_bytes: int


def points(
    network: Network, profiles: Sequence[str] = TUNING_PROFILES, saved_parts: Sequence[float] = SAVED
) -> Iterable[tuple[str, Point]]:
    trace = cached_trace(network)
    for profile in profiles:
        planner = JobPlanner(roofline.timed(trace, PROFILES[profile]), PROFILES[profile])
        for saved in saved_parts:
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


@contextmanager
def changed(constants: Mapping[str, Any]) -> Iterator[None]:
    """Give constants other values, in each of MODULES that has them."""
    with ExitStack() as stack:
        for module, (name, value) in product(MODULES, constants.items()):
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, value))
        yield


def title_of(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in change.items()) or AS_IT_IS


def measured_values(
    changes: Sequence[Mapping[str, Any]], measure: Callable[[], Sequence[float]]
) -> dict[str, dict[str, float]]:
    """Return the sum of the logarithms of the slowdowns, and the computing time in s, without and with each change.

    `measure` returns slowdowns.
    """
    results = {}
    for change in ({}, *changes):
        with changed(change):
            began = time.process_time()
            times = measure()
            seconds = time.process_time() - began
        results[title_of(change)] = {"log": sum(map(math.log, times)), "s": seconds, "points": len(times)}
    return results


def effects_on_one(network: Network, changes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    return measured_values(changes, lambda: [slowdown(point) for _, point in points(network)])


def effects_on_searches(network: Network, changes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    def measure() -> list[float]:
        found = []
        for _, (planner, budget_bytes) in points(network, SEARCHED_PROFILES, SEARCHED_SAVED):
            best = search.Search(planner, search.TRIES).best(budget_bytes)
            found.append(best.us / planner.vanilla.us if isinstance(best, Candidate) else NO_PLAN)
        return found

    return measured_values(changes, measure)


def effects_on_several(titles: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    profile = PROFILES[GROUP_PROFILE]
    networks = [network for network in TUNING if network.title in titles]
    planners = {
        job: JobPlanner(roofline.timed(trace_of(network), profile), profile) for job, network in enumerate(networks)
    }
    together = sum(planner.vanilla.device_peak_bytes for planner in planners.values())
    least = sum(planner.least_bytes for planner in planners.values())

    def measure() -> list[float]:
        found = []
        for share in GROUP_BUDGETS:
            budget_bytes = least + int(share * (together - least))
            division = share_out.share_out(planners, budget_bytes)
            with changed({"STAGGERS": JUDGED}):
                us = contention.times_us(planners, division.chosen)
            found += [us[job] / planner.vanilla.us for job, planner in planners.items()]
        return found

    return measured_values(changes, measure)


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


def gathered(
    work: Callable[..., dict[str, Any]], *arguments: Any, items: Iterable[Any] = TUNING
) -> list[dict[str, Any]]:
    """Do the work for each network or group of them, in as many processes as there are cores."""
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        return pool.starmap(work, [(item, *arguments) for item in items], chunksize=1)


def merged(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    return {name: row for part in parts for name, row in part.items()}


def found_prices() -> dict[str, Any]:
    """Return the prices that are chosen, and at how many points."""
    rows = merged(gathered(passes))
    prices = choose(list(rows.values()), GRID, len(PRICES), [NO_PLAN] * len(rows))
    congested_rows = merged(gathered(stretched_passes, prices))
    before = [row[0] for row in congested_rows.values()]
    congested = choose([row[1:] for row in congested_rows.values()], CONGESTED_GRID, len(CONGESTED), before)
    return {
        "revision": versions()["revision"],
        "points": len(rows),
        "congested_points": len(congested_rows),
        "prices": [list(each[:3]) for each in prices],
        "congested": [list(each[:3]) for each in congested],
    }


MEASURES: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[Any]]] = {
    ONE: (effects_on_one, TUNING),
    SEARCHED: (effects_on_searches, TUNING),
    SEVERAL: (effects_on_several, GROUPS),
}


def missing_effects(kind: str, known: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measure the changes that `known` lacks, and yield their rows.

    A row has the mean slowdown, and the computing time over that without a change. Raises ValueError if plans without
    a change are not those of the known rows.
    """
    mine = [row for row in known if row["jobs"] == kind]
    missing = [change for change in EFFECTS[kind] if title_of(change) not in {row["change"] for row in mine}]
    work, items = MEASURES[kind]
    parts = gathered(work, missing, items=items) if missing else []
    for name in parts[0] if parts else ():
        row = {
            "jobs": kind,
            "change": name,
            "points": (points_in_all := sum(part[name]["points"] for part in parts)),
            "slowdown": math.exp(sum(part[name]["log"] for part in parts) / points_in_all),
            "computing": sum(part[name]["s"] for part in parts) / sum(part[AS_IT_IS]["s"] for part in parts),
            "revision": versions()["revision"],
        }
        if name != AS_IT_IS or not mine:
            yield row
        elif not math.isclose(row["slowdown"], mine[0]["slowdown"], rel_tol=1e-9):
            raise ValueError(f"plans have changed ({kind}): remove the known rows to measure all of them again")


def page_part(results: Mapping[str, Any]) -> str:
    """Return the generated part of the section."""
    chosen, rows = results["chosen"], results["effects"]
    revisions = ", ".join(dict.fromkeys([chosen["revision"], *(row["revision"] for row in rows)]))
    device = f"sim:{', '.join(TUNING_PROFILES)}"
    bases = {row["jobs"]: row for row in rows if row["change"] == AS_IT_IS}
    shown = [
        (
            row["jobs"],
            f"`{row['change']}`",
            f"{row['slowdown']:.4f}",
            f"{row['slowdown'] / bases[row['jobs']]['slowdown'] - 1:+.2%}",
            # Plans for several jobs come from the cache after the first.
            "" if row["jobs"] == SEVERAL else f"{row['computing']:.2f}",
        )
        for row in rows
    ]
    return (
        "\n".join(
            [
                measured_on(device, results["machine"], results["versions"], revisions),
                "",
                f"Networks: {', '.join(results['networks'])}. Prices were chosen at {chosen['points']} points, "
                f"those for a congested link at {chosen['congested_points']}.",
                "",
                *table(("jobs", "constant", "time", "difference", "computing"), shown),
            ]
        ).rstrip()
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The origin of the constants of the policy joint.")
    parser.add_argument(
        "--effects", action="store_true", help="only the effects of other constants that the results lack"
    )
    parser.add_argument("--document", action="store_true", help="only write the document from the results")
    options = parser.parse_args()
    results = json.loads(PATH.read_text()) if PATH.exists() else {}
    networks = [network.title for network in TUNING]
    about = {"machine": machine(None), "versions": versions(), "networks": networks}
    if options.effects:
        for kind in EFFECTS:
            known = results.get("effects", [])
            rows = sorted([*known, *missing_effects(kind, known)], key=lambda row: list(EFFECTS).index(row["jobs"]))
            save(results | about | {"effects": rows})
            results = json.loads(PATH.read_text())
    elif not options.document:
        save(results | about | {"chosen": found_prices()})
    results = json.loads(PATH.read_text())
    if {"chosen", "effects"} <= results.keys():
        write_document(NAME, KIND, page_part(results))
        print(page_part(results))
    return 0


def save(results: Mapping[str, Any]) -> None:
    PATH.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
