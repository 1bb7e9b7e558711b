"""The TENSILE paper's tables and figures at its sizes, simulated.

Each scenario is one case of a table or figure (experiments/cases.py) on the profile of the paper's GPU, with batches
of 16, also where several networks train at once; nothing is executed. The policies are those of `methods`, and
TENSILE as in the paper, without a budget, and `joint` on the graph without early updates. Besides the simulated time,
rows have the bound below which no plan for the same graph and memory can be.

The plans of tables I and II that are made before anything was measured take the roofline for latencies that differ from
it as much as `cold` allows its predictions to. Everywhere else the roofline is exact.

Five tables have modules of their own: how much slower operators would have to be for TENSILE to save what the paper
reports (experiments/slower.py), SwapAdvisor's models (swapadvisor.py), AccUDNN's batches (accudnn.py), CSWAP's epochs
(cswap.py) and bounds for several jobs at once (together_bounds.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.cases import EXPERIMENTS, QUICK, Size, runs
from benchmarks.experiments.networks import PAPER
from benchmarks.experiments.paper import Published
from benchmarks.experiments.sections import ERROR, PROGRAM_TITLES, SECTIONS, Section, papers_row
from benchmarks.experiments.suite import method
from benchmarks.experiments.together_bounds import least_eor
from benchmarks.results import Results
from benchmarks.scenarios import Scenario, scenario_section
from benchmarks.tables import table

DEVICE = "sim:RTX_A6000"
SIZE = Size(quick=False, batch=16, together=16, rounds=1, simulated=True)
COLD = ("table1", "table2")  # with latencies that differ from the predicted ones
TOGETHER_SECTIONS = ("fig6", "table4")  # of several jobs at once
TOGETHER_RUN = (("table3",), COLD, ("table4",), ("fig6",), ("fig7",))  # experiments whose cases share a run
SECONDS = {
    "table4": 60.0,
    "swapadvisor": 90.0,
    "accudnn": 40.0,
    "cswap": 8.0,
    "bounds": 60.0,
}  # approximate time of a case,
CASE_S = 17.0  # and of all others
BEHIND = 0.01  # of EOR: by this much, methods count as equal


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    """Return the scenarios in the order of the document; `quick` has small networks."""
    size = QUICK._replace(simulated=True) if quick else SIZE
    how = ("--quick",) if quick else ("--batch", str(size.batch), "--together", str(size.together), "--rounds", "1")
    listed = []
    for names in TOGETHER_RUN:
        error = ("--latency-error", str(ERROR)) if names == COLD else ()
        for run in runs(names, size):
            title = run.case.title
            arguments = (*names, "--case", title, *how, *error)
            listed.append(Scenario(" ".join(names), title, arguments, SECONDS.get(names[0], CASE_S)))
    for section in SECTIONS:
        if section.program is not None and not quick:
            seconds, work = SECONDS.get(section.name, CASE_S), section.program.measure
            listed += [Scenario(section.name, title, (title,), seconds, work) for title in section.program.TITLES]
    return listed


# ---- what must hold -------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    checked = []
    for section in SECTIONS:
        rows = rows_of(results, section.name)
        if section.program is not None:
            checked += section.program.checks(rows)
            continue
        checked += [check for row in rows if not row.get("error") for check in row_checks(row)]
        checked += rival_checks(rows)
    return checked


def row_checks(row: Row) -> Iterator[Check]:
    """Check budgets and bounds, and `joint`'s EOR against that of the paper's TENSILE at the same saving."""
    section, what = row["experiment"], f"{row['experiment']}, {row['case']}, {method(row)}"
    if row["budget_bytes"] is not None:
        peak, budget = row["device_peak_bytes"], row["budget_bytes"]
        yield Check(section, f"{what}: peak", f"{peak:,}", f"≤ {budget:,}", peak <= budget)
    if row.get("least_eor") is not None and not row["early_update"]:
        least, eor = row["least_eor"], row["eor"]
        yield Check(section, f"{what}: EOR", f"{eor:.3f}", f"≥ {least:.3f}", eor >= least * (1 - 1e-6))
    papers = papers_row(row)
    if row["policy"] == "joint" and papers is not None:
        yield Check(section, f"{what}: EOR", f"{eor_of(row):.3f}", f"≤ {papers.eor}", eor_of(row) <= papers.eor)


def rival_checks(rows: Sequence[Row]) -> Iterator[Check]:
    """Check `joint` against each method that saves as much in the same case and phase.

    On the graph without early updates only against the methods on that graph, as the paper's.
    """
    good = [row for row in rows if not row.get("error") and row["policy"] != "none"]
    for mine in (row for row in good if row["policy"] == "joint" and row["budget"]):
        for row in good:
            alike = all(row[name] == mine[name] for name in ("experiment", "case", "latencies"))
            alike = alike and row["early_update"] <= mine["early_update"]
            if alike and row["policy"] != "joint" and row["msr"] >= mine["msr"]:
                what = f"{mine['experiment']}, {mine['case']}: {method(mine)} beside {method(row)}"
                holds = mine["eor"] <= row["eor"] + BEHIND
                yield Check(mine["experiment"], what, f"{mine['eor']:.3f}", f"≤ {row['eor']:.3f}", holds)


def rows_of(results: Results, section: str) -> list[Row]:
    """Return the rows of a section; those of several jobs have the bounds that together_bounds.py computed."""
    rows = [row for rows in results.tables.values() for row in rows if "experiment" in row]
    mine = [row for row in rows if row["experiment"] == section]
    if section not in TOGETHER_SECTIONS:
        return mine
    curves = {(row["case"], row["jobs"]): row for row in rows if row.get("experiment") == "bounds"}
    return [row | {"least_eor": row.get("least_eor") or least_eor(row, curves, jobs_of(row["case"]))} for row in mine]


def jobs_of(case: str) -> list[str]:
    """Return the networks of a case with several jobs: "3 × VGG-16" or "mixed"."""
    count, times, network = case.partition(" × ")
    return [network] * int(count) if times else [network.title for network in PAPER]


def eor_of(row: Row) -> float:
    """Return the EOR that the paper's table is about: in table II the first iteration's."""
    return float(row["first_eor"] if row["experiment"] == "table2" else row["eor"])


# ---- the document ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[str]:
    lines = []
    for section in SECTIONS:
        rows = rows_of(results, section.name)
        if section.program is None:
            rows = [row for row in rows if row["policy"] != "none"]
        if rows:
            lines += [f"## {title_of(section.name)}", "", section.words.strip(), ""]
            lines += table(section.headings, (pivoted if section.columns else shown)(section, rows))
    return lines


def title_of(name: str) -> str:
    return PROGRAM_TITLES.get(name) or f"{EXPERIMENTS[name].title} (`{name}`)"


def shown(section: Section, rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table; a method without a plan has the reason."""
    for row in rows:
        if row.get("error"):
            reason = row["error"].splitlines()[0]
            yield (
                row["case"],
                f"`{method(row) if 'label' in row else row['policy']}`",
                reason,
                *[""] * (len(section.headings) - 3),
            )
        elif section.cells is not None:
            yield section.cells(row)


def pivoted(section: Section, rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each network and method, with what is saved at which EOR in each of the section's columns."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        network, column = split_title(row["case"])
        result = "no plan" if row.get("error") else str(Published(row["msr"], row["eor"]))
        if row.get("least_eor") and not row.get("error") and section.name in TOGETHER_SECTIONS:
            result += f" ≥ {row['least_eor']:.2f}"
        cells.setdefault((network, method(row)), {})[column] = result
    for (network, label), by_column in cells.items():
        yield (network, f"`{label}`", *(by_column.get(column, "") for column in section.columns))


def split_title(title: str) -> tuple[str, str]:
    """Return the network and the column of the title of a case: "2 × VGG-16" or "VGG-16, batch 4"."""
    count, times, network = title.partition(" × ")
    if times:
        return network, count
    network, _, batch = title.partition(", ")
    return network, batch


BENCHMARK = scenario_section("The papers' tables, simulated", scenarios, tables, checks, DEVICE)
