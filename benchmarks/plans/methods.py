"""All methods on every network, beside the paper's results and the limits.

Each scenario is one case of the paper's tables and figures, of memory against time at several savings, or of small
steps beside their best plan (benchmarks.experiments.cases). `joint` has to be ahead of each method with right
results: it has to reach the method's measured peak in no more time.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from typing import NamedTuple

from benchmarks.checks import Check, Timing, fidelity_checks, simulator_checks
from benchmarks.command import Row
from benchmarks.experiments import suite
from benchmarks.experiments.cases import EXPERIMENTS, FULL, QUICK, Run, Size, runs
from benchmarks.experiments.suite import method, published
from benchmarks.figures import points
from benchmarks.figures.plots import draw
from benchmarks.results import Results
from benchmarks.scenarios import Scenario, scenario_section
from benchmarks.tables import table
from pg_tensile.tools.bench import options

BATCH, ROUNDS = 8, 1  # chosen to keep the whole below two hours on two cores
LONGEST_S = 155.0  # of a case of a figure
NOISE = 0.03  # of a ratio of two times measured in the same rounds
SECTIONS = ("savings", "table1", "table2", "table3", "table4", "fig6", "fig7", "optimum")  # in the document
FIGURES = {"savings": "pareto-savings", "fig6": "fig6"}


def size(quick: bool) -> Size:
    return QUICK if quick else FULL._replace(batch=BATCH, rounds=ROUNDS)


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    asked = size(quick)
    how = ("--quick",) if quick else ("--batch", str(asked.batch), "--rounds", str(asked.rounds))
    return [
        Scenario("methods", run.case.title, (*run.wanted, "--case", run.case.title, *how), run.seconds(asked))
        for run in runs(SECTIONS, asked)
        if run.seconds(asked) <= LONGEST_S or "savings" in run.wanted
    ]


def left_out(asked: Size) -> list[Run]:
    """Return the runs of the figures that would take too long."""
    return [run for run in runs(SECTIONS, asked) if run.seconds(asked) > LONGEST_S and "savings" not in run.wanted]


# ---- joint against its rivals ---------------------------------------------------------------------------------------


class Rival(NamedTuple):
    """A method's row, and joint's EOR in the same rounds at the row's measured peak.

    `joint` is None if joint was not measured so low.
    """

    case: str
    row: Row
    joint: float | None

    @property
    def ahead(self) -> bool:
        return self.joint is not None and self.joint <= self.row["eor"] * (1 + NOISE)


def is_right(row: Row) -> bool:
    """Return whether a row was measured and its results, or a peer's gradients, are those of eager PyTorch."""
    return row.get("error") is None and row.get("eor") is not None and points.right(row)


def rivals(rows: Iterable[Row]) -> Iterator[Rival]:
    """Yield the rivals of `savings`; methods that save nothing are no rivals.

    Joint's points come from all experiments, which have one run of each case.
    """
    for case, group in groupby(sorted(rows, key=lambda row: row["case"]), lambda row: row["case"]):
        right = [row for row in group if is_right(row)]
        reached = [(row["device_peak_bytes"], row["eor"]) for row in right if row["policy"] in ("none", "joint")]
        for row in right:
            if row["experiment"] == "savings" and row["policy"] not in ("none", "joint") and row["msr"] > 0.01:
                yield Rival(case, row, eor_at(row["device_peak_bytes"], reached))


def eor_at(peak: int, points: Iterable[tuple[int, float]]) -> float | None:
    """Return the EOR at a device peak, from points (device peak, EOR); None if all points need more memory.

    It is the EOR of a point that needs no more memory, or interpolated between the next smaller and the next larger
    one. With all the memory joint is vanilla, so vanilla's is a point.
    """
    ordered = sorted(points)
    split = bisect_right(ordered, (peak, inf))
    smaller, larger = ordered[:split], ordered[split:]
    if not smaller:
        return None
    least = min(eor for _, eor in smaller)
    if not larger:
        return least
    (low, slow), (high, fast) = smaller[-1], larger[0]
    return min(least, slow + (fast - slow) * (peak - low) / (high - low))


def checks(results: Results) -> list[Check]:
    rows = rows_of(results)
    checked = [check for row in rows for check in row_checks(row)]
    timings = [
        Timing(f"{case}, {label}", row.get("simulated_ms"), measured_ms)
        for (case, label, measured_ms), row in measurements(rows).items()
    ]
    checked += simulator_checks("fidelity", timings)
    for timing in timings:
        checked += fidelity_checks("fidelity", *timing)
    for rival in rivals(rows):
        what = f"{rival.case}: joint beside {method(rival.row)}, {rival.row['msr']:.1%} saved"
        mine = "does not save that much" if rival.joint is None else f"{rival.joint:.3f}"
        checked.append(Check("ahead", what, mine, f"≤ {rival.row['eor']:.3f}", rival.ahead))
    return checked


def row_checks(row: Row) -> Iterator[Check]:
    """Check bits and budgets of the policies measured. A missing plan for a budget only appears in the table."""
    if row.get("error") is not None or row["policy"] in options.PEERS:
        return
    what = f"{row['experiment']}, {row['case']}, {method(row)}"
    if row["bit_identical"] is not None:
        same = "identical" if row["bit_identical"] else "different"
        yield Check("results", what, same, "identical", row["bit_identical"])
    if row["budget_bytes"] is not None:
        peak, budget = row["device_peak_bytes"], row["budget_bytes"]
        yield Check("peak", what, f"{peak:,}", f"≤ {budget:,}", peak <= budget)


def measurements(rows: Iterable[Row]) -> dict[tuple[str, str, float | None], Row]:
    """Return one row for each policy's steps, by case, method and time, because the experiments of a run share them."""
    return {
        (row["case"], method(row), row.get("step_ms_median")): row
        for row in rows
        if row.get("error") is None and row["policy"] not in options.PEERS
        if not EXPERIMENTS[row["experiment"]].simulated
    }


def rows_of(results: Results) -> list[Row]:
    return [row for _, row in results.titled("methods")]


# ---- the document ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[str]:
    rows, lines = rows_of(results), []
    for name in SECTIONS:
        mine = [row for row in rows if row["experiment"] == name]
        if mine:
            lines += [f"## {EXPERIMENTS[name].title} (`{name}`)", "", *picture(name, results)]
            lines += rivals_table(rows) if name == "savings" else []
            lines += rows_table(mine)
    missing = [] if results.is_quick else [run.case.title for run in left_out(size(False))]
    return [*lines, *([f"Not measured, as each takes long: {'; '.join(missing)}."] if missing else [])]


def picture(name: str, results: Results) -> list[str]:
    """Return the line of an experiment's figure; those that are tables in the paper have none."""
    return [f"![{FIGURES[name]}](../plots/{results.path.stem}/{FIGURES[name]}.svg)", ""] if name in FIGURES else []


def draw_figures(results: Results, folder: Path) -> None:
    draw([row for row in rows_of(results) if row["experiment"] in FIGURES], folder)


def rivals_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate each method over all cases of `savings`: its time over joint's at its own measured peak."""
    lines = []
    ordered = sorted(rivals(rows), key=lambda rival: method(rival.row))
    for label, group in groupby(ordered, lambda rival: method(rival.row)):
        of_method = list(group)
        slower = [rival.row["eor"] / rival.joint for rival in of_method if rival.joint is not None]
        middle = f"{statistics.median(slower):.2f} ({min(slower):.2f} … {max(slower):.2f})" if slower else ""
        saved = ", ".join(f"{rival.case} {rival.row['msr']:.0%}" for rival in of_method)
        behind = ", ".join(rival.case for rival in of_method if not rival.ahead) or "–"
        lines.append((f"`{label}`", saved, middle, behind))
    return table(("method", "saved", "its time / `joint`'s at its peak", "`joint` is not ahead on"), lines)


def rows_table(rows: Sequence[Row]) -> list[str]:
    headings = ("", "method", "saved", "EOR", "spread", "CBR", "stall, ms", "recomputed", "paper", "results")
    return table(headings, [cells(row) for row in rows if row["policy"] != "none" or row.get("error")])


def cells(row: Row) -> tuple[str, ...]:
    start = (row["case"], f"`{method(row)}`")
    if row.get("error"):
        return (*start, row["error"].splitlines()[0], *[""] * 7)
    eor = row["first_eor"] if row["experiment"] == "table2" else row["eor"]
    return (
        *(*start, f"{row['msr']:.1%}", f"{eor:.3f}", spread(row), f"{row['cbr']:.3f}"),
        "" if row.get("stall_ms") is None else f"{row['stall_ms']:.0f}",
        *("" if row.get("recomputes") is None else f"{row['recomputes']:,}", str(published(row) or "")),
        results_of(row),
    )


def spread(row: Row) -> str:
    """Return the spread of the rounds around their median."""
    return "" if row.get("spread") is None else f"± {row['spread']:.1%}"


def results_of(row: Row) -> str:
    return suite.results(row) if is_right(row) else f"**wrong**: {suite.results(row)}"


BENCHMARK = scenario_section("All methods, side by side", scenarios, tables, checks)._replace(draw=draw_figures)
