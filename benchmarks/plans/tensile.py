"""Memory against time, beside the TENSILE paper's own numbers.

The sections:

- memory: the paper's five networks, batch 16, AdamW. The policy `joint` with early updates has to save the share of the
  peak that the paper's tables name, and more, at a fraction of the paper's extra time. All plans for a network share a
  run, in interleaved rounds, so every time is compared with vanilla's in the same rounds;
- the paper's policy: `tensile` in the same way, with and without early updates, on one lane and on two;
- planning: the time in which the two policies plan traces of 5,000 to 100,000 operators, and four jobs
  (planning_speed.py).

"Saves 30 %" means a budget of 70 % of vanilla's peak (the storages alive at once). The budget applies to storages and
workspaces together, so the peak is at least 30 % below vanilla's, and the workspaces fit, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks import planning_speed
from benchmarks.checks import Check, deviation, fidelity_checks, name_of, simulator_checks, timings_of
from benchmarks.command import Row
from benchmarks.experiments.networks import (
    DENSENET121,
    INCEPTION3,
    INCEPTION4,
    PAPER,
    RESNET50,
    SMALL_DENSENET,
    SMALL_RESNET,
    VGG16,
    Network,
)
from benchmarks.experiments.paper import PUBLISHED
from benchmarks.results import Results
from benchmarks.runner import Run
from benchmarks.scenarios import Scenario, rounds, scenario_section
from benchmarks.tables import table
from pg_tensile.tools.bench.options import MEASURED

JOINT, TENSILE = "joint", "tensile"
SECTION, PAPERS = "memory", "the paper's policy"
BATCH = 16
POLICY_STEPS, OTHER_STEPS = 7, 25  # of one policy in these rounds; of calibration, eager PyTorch and vanilla
SLOWER = 1.15  # times vanilla's step: a policy's step, with the work between steps
PLANNING_S = {(1, 5_000): 0.5, (1, 13_000): 2.0, (4, 5_000): 3.0}  # (jobs, operators) → seconds, at most


class Goal(NamedTuple):
    """A saving of `percent` of the peak at an EOR of at most `eor`; None means that the EOR is only reported."""

    percent: int
    eor: float | None

    @property
    def budget(self) -> str:
        return f"{100 - self.percent}%"


HIGHER = (Goal(50, 1.12), Goal(65, 1.20), Goal(70, None))
# The first goal of each network is the paper's saving; it is the one for which tensile is measured.
GOALS = {
    VGG16.title: (Goal(27, 1.15), Goal(40, 1.20), Goal(50, None)),
    INCEPTION3.title: (Goal(44, 1.15), *HIGHER),
    INCEPTION4.title: (Goal(52, 1.15), *HIGHER),
    RESNET50.title: (Goal(43, 1.15), *HIGHER),
    DENSENET121.title: (Goal(51, 1.15), *HIGHER),
    SMALL_RESNET.title: (Goal(20, None), Goal(30, None)),
    SMALL_DENSENET.title: (Goal(20, None), Goal(40, None)),
}


def scenarios(device: str, quick: bool) -> list[Scenario]:
    """Return the scenarios, those with goals first."""
    networks = (SMALL_RESNET, SMALL_DENSENET) if quick else PAPER
    return [scenario(SECTION, network) for network in networks] + [scenario(PAPERS, network) for network in networks]


def scenario(section: str, network: Network) -> Scenario:
    asked = ["none", *(joint_policies if section == SECTION else tensile_policies)(network.title)]
    arguments = (*network.arguments(BATCH), *rounds(3), "--early-update", "--policies", ",".join(asked))
    steps = OTHER_STEPS + POLICY_STEPS * (len(asked) - 1) * SLOWER
    return Scenario(section, network.title, arguments, network.step_s * steps)


def joint_policies(title: str) -> list[str]:
    return [*(f"{JOINT}:budget={goal.budget}" for goal in GOALS[title]), f"{JOINT}:budget=none"]


def tensile_policies(title: str) -> list[str]:
    tensile = [f"{TENSILE}:lanes={lanes}:early_update={early}" for lanes in (1, 2) for early in ("false", "true")]
    within = [f"{policy}:budget={GOALS[title][0].budget}" for policy in tensile]
    return [*within, *(f"{policy}:budget=none" for policy in (tensile[0], tensile[-1]))]


# ---- what must hold -------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    rows = results.titled(SECTION) + results.titled(PAPERS)
    checked = [
        *simulator_checks("fidelity", timings_of(rows)),
        *(c for title, row in rows for c in row_checks(title, row)),
    ]
    return checked + planning_checks(results.rows("planning"))


def goal_of(title: str, row: Row) -> Goal | None:
    """Return the goal of a row, or None; only rows of joint have one."""
    if row["policy"] != JOINT or row["latencies"] != MEASURED:
        return None
    return next((goal for goal in GOALS[title] if goal.budget == row["budget"]), None)


def row_checks(title: str, row: Row) -> Iterator[Check]:
    """Check bits, budgets and simulated times of every row, and savings and times where there is a goal.

    A missing plan for a budget fails only if the goal demands a time.
    """
    what = name_of(title, row)
    goal = goal_of(title, row)
    if row["error"] is not None:
        if row["policy"] == "none" or (goal and goal.eor):
            yield Check("memory", what, row["error"], "no error", False)
        return
    same = "identical" if row["bit_identical"] else "different"
    yield Check("memory", f"{what}: results", same, "identical", row["bit_identical"] is True)
    peak, budget = row["device_peak_bytes"], row["budget_bytes"]
    if budget is not None:
        yield Check("memory", f"{what}: device peak", f"{peak:,}", f"≤ {budget:,}", peak <= budget)
    yield from fidelity_checks("fidelity", what, row["simulated_ms"], row["step_ms_median"])
    if goal is not None:
        enough = 100 * (row["vanilla_peak_bytes"] - row["peak_bytes"]) >= goal.percent * row["vanilla_peak_bytes"]
        yield Check("memory", f"{what}: saved", f"{saved(row):.1%}", f"≥ {goal.percent} %", enough)
    if goal is not None and goal.eor is not None:
        yield Check("memory", f"{what}: EOR", f"{eor(row):.3f}", f"≤ {goal.eor:.2f}", eor(row) <= goal.eor)


def planning_checks(rows: Iterable[Row]) -> list[Check]:
    """Check that every plan saves half of the memory, and that the smaller ones are made within PLANNING_S."""
    checked = []
    for row in rows:
        limit = PLANNING_S.get((row["jobs"], round(row["operators"], -3)))
        what = f"{row['policy']}, {row['jobs']} × {row['operators']:,} operators"
        if row["error"] is not None:
            checked.append(Check("planning", what, row["error"], "a plan", False))
            continue
        checked.append(Check("planning", f"{what}: saved", f"{row['saved']:.1%}", "≥ 50 %", row["saved"] >= 0.5))
        if limit is not None:
            time_s = row["seconds"]
            checked.append(Check("planning", f"{what}: time", f"{time_s:.2f} s", f"< {limit} s", time_s < limit))
    return checked


def eor(row: Row) -> float:
    """Return the ratio of the medians of the same run."""
    return row["step_ms_median"] / row["vanilla_step_ms_median"]


def saved(row: Row) -> float:
    return 1 - row["peak_bytes"] / row["vanilla_peak_bytes"]


def planning(run: Run) -> list[Row]:
    cases = ((1, 1_000), (1, 2_000), (2, 1_000)) if run.quick else ((1, 5_000), (1, 13_000), (4, 5_000), (1, 100_000))
    return [
        planning_speed.measure_policy(policy, operators, jobs, 1 if operators > 50_000 else 3)._asdict()
        for policy in (JOINT, TENSILE)
        for jobs, operators in cases
    ]


# ---- the document ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[str]:
    return [
        *vanilla_table(results),
        *joint_table(results),
        *tensile_table(results),
        *planning_table(results.rows("planning")),
    ]


def vanilla_table(results: Results) -> list[str]:
    headings = ("network", "operators", "link, GB/s", "eager, ms", "vanilla, ms", "peak, MiB", "device peak, MiB")
    rows = [
        (
            *(title, f"{row['operators']:,}", f"{row['link_gbps']:.2f}", f"{row['eager_step_ms_median']:.0f}"),
            f"{row['step_ms_median']:.0f} ({row['step_ms_min']:.0f} … {row['step_ms_max']:.0f})",
            *(f"{row['peak_bytes'] / 2**20:.1f}", f"{row['device_peak_bytes'] / 2**20:.1f}"),
        )
        for title, row in results.titled(SECTION)
        if row["policy"] == "none" and row["error"] is None
    ]
    return table(headings, rows)


def reached(row: Row) -> str:
    """Describe a row without a measurement: the saving of its plan, which exceeds the budget, or the error."""
    if row["predicted_peak_bytes"] is None or row["vanilla_peak_bytes"] is None:
        return row["error"]
    return f"{1 - row['predicted_peak_bytes'] / row['vanilla_peak_bytes']:.1%}, too little with the workspaces"


COSTS = ("step, ms", "stall, ms", "moved, MiB", "recomputed")


def costs(row: Row) -> tuple[str, ...]:
    moved = (row["bytes_out"] + row["bytes_in"]) / 2**20
    return f"{row['step_ms_median']:.0f}", f"{row['stall_ms']:.0f}", f"{moved:.0f}", f"{row['recomputes']:,}"


def joint_table(results: Results) -> list[str]:
    headings = ("network", "to save", "`joint` saved", "EOR", "asked for", "paper", *COSTS, "simulated", "planning, s")
    rows = []
    for title, row in results.titled(SECTION):
        if row["policy"] != JOINT or row["latencies"] != MEASURED:
            continue
        goal, paper = goal_of(title, row), PUBLISHED.get(("table3", title, "tensile"))
        start = (title, f"{goal.percent} %" if goal else "what is free")
        if row["error"] is not None:
            rows.append((*start, reached(row), *[""] * (len(headings) - 3)))
            continue
        asked = f"≤ {goal.eor:.2f}" if goal and goal.eor else "–"
        published = f"{paper.eor:.2f}" if paper and goal == GOALS[title][0] else ""
        simulated = f"{deviation(row['simulated_ms'], row['step_ms_median']):+.1%}"
        planned = f"{row['planning_ms'] / 1e3:.2f}"
        rows.append((*start, f"{saved(row):.1%}", f"{eor(row):.3f}", asked, published, *costs(row), simulated, planned))
    return table(headings, rows)


def tensile_table(results: Results) -> list[str]:
    headings = ("network", "to save", "lanes", "early updates", "`tensile` saved", "EOR", *COSTS)
    rows = []
    for title, row in results.titled(PAPERS):
        if row["policy"] != TENSILE:
            continue
        asked = f"{GOALS[title][0].percent} %" if row["budget"] else "what is free"
        start = (title, asked, str(row["keywords"]["lanes"]), "yes" if row["early_update"] else "no")
        if row["error"] is not None:
            rows.append((*start, reached(row), *[""] * (len(headings) - 5)))
        else:
            rows.append((*start, f"{saved(row):.1%}", f"{eor(row):.3f}", *costs(row)))
    return table(headings, rows)


def planning_table(measured: Iterable[Row]) -> list[str]:
    rows = []
    for row in measured:
        start = (f"`{row['policy']}`", str(row["jobs"]), f"{row['operators']:,}")
        limit = PLANNING_S.get((row["jobs"], round(row["operators"], -3)))
        asked = f"< {limit}" if limit else "–"
        if row["error"] is not None:
            rows.append((*start, "", row["error"], asked, ""))
        else:
            rows.append((*start, f"{row['events']:,}", f"{row['seconds']:.2f}", asked, f"{row['saved']:.1%}"))
    return table(("planning by", "jobs", "operators of each", "events", "time, s", "asked for", "saved"), rows)


BENCHMARK = scenario_section("Memory against time", scenarios, tables, checks, planning=planning)
