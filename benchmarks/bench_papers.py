"""`make bench-papers`: the TENSILE paper's tables and figures at its sizes, simulated. How it runs: scenarios.py.

Each scenario is one case of a table or figure (experiments/cases.py) on the profile of the paper's GPU, with batches
of 16, also where several networks train at once; nothing is executed. The policies are those of `make bench`, and
TENSILE as in the paper, without a budget, and `joint` on the graph without early updates. Besides the simulated time,
rows have the bound below which no plan for the same graph and memory can be.

The plans of tables I and II that are made before anything was measured take the roofline for latencies that differ from
it as much as `make bench-cold` allows its predictions to. Everywhere else the roofline is exact.

The last section tells how much slower operators would have to be for TENSILE to save what the paper reports
(experiments/slower.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.bench_cold import ERROR
from benchmarks.bench_methods import nothing
from benchmarks.experiments import slower
from benchmarks.experiments.cases import EXPERIMENTS, QUICK, Size, networks, runs
from benchmarks.experiments.paper import Published
from benchmarks.experiments.suite import method, published
from benchmarks.scenarios import Benchmark, Check, Results, Row, Scenario, main
from benchmarks.tables import table

DEVICE = "sim:RTX_A6000"
SIZE = Size(quick=False, batch=16, together=16, rounds=1, simulated=True)
COLD = ("table1", "table2")  # with latencies that differ from the predicted ones
TOGETHER_RUN = (("table3",), COLD, ("table4",), ("fig6",), ("fig7",))  # experiments whose cases share a run
SLOWER = "slower"
SECONDS = {"table4": 60.0, SLOWER: 15.0}  # approximate time of a case,
CASE_S = 17.0  # and of all others
BEHIND = 0.01  # of EOR: by this much, methods count as equal

Cells = Callable[[Row], tuple[str, ...]]


class Section(NamedTuple):
    """One table of the document. `words`: how the work and the platform differ from the paper's, and what follows."""

    name: str
    words: str
    headings: tuple[str, ...]
    cells: Cells


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
    for network in networks(size)[: 1 if quick else None]:
        arguments = ("--case", network.title, "--batch", str(size.batch))
        listed.append(Scenario(SLOWER, network.title, arguments, SECONDS[SLOWER], slower.__name__))
    return listed


# ---- what must hold -------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    checked = []
    for section in SECTIONS:
        rows = rows_of(results, section.name)
        if section.name == SLOWER:
            checked += slower.checks(rows)
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
    """Check `joint` against each method that saves no more than it does in the same case and phase."""
    good = [row for row in rows if not row.get("error") and row["policy"] != "none"]
    for mine in (row for row in good if row["policy"] == "joint" and row["budget"]):
        for row in good:
            alike = all(row[name] == mine[name] for name in ("experiment", "case", "latencies", "early_update"))
            if alike and row["policy"] != "joint" and row["msr"] >= mine["msr"]:
                what = f"{mine['experiment']}, {mine['case']}: {method(mine)} beside {method(row)}"
                holds = mine["eor"] <= row["eor"] + BEHIND
                yield Check(mine["experiment"], what, f"{mine['eor']:.3f}", f"≤ {row['eor']:.3f}", holds)


def rows_of(results: Results, section: str) -> list[Row]:
    return [
        row
        for scenario in results.scenarios.values()
        for row in scenario["rows"]
        if row.get("experiment", SLOWER) == section
    ]


def papers_row(row: Row) -> Published | None:
    """Return the paper's result beside which a row stands: for `joint`, TENSILE's."""
    phase = {"policy": "tensile", "label": "tensile"} if row["policy"] == "joint" else {}
    return published(row | phase)


def eor_of(row: Row) -> float:
    """Return the EOR that the paper's table is about: in table II the first iteration's."""
    return float(row["first_eor"] if row["experiment"] == "table2" else row["eor"])


# ---- the document ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[str]:
    lines = []
    for section in SECTIONS:
        rows = [row for row in rows_of(results, section.name) if row.get("policy") != "none"]
        if rows:
            lines += [f"### {title_of(section.name)}", "", section.words.strip(), ""]
            lines += table(section.headings, shown(section, rows))
    return lines


def title_of(name: str) -> str:
    return "How slow the paper's operators are" if name == SLOWER else f"{EXPERIMENTS[name].title} (`{name}`)"


def shown(section: Section, rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table; a method without a plan has the reason."""
    for row in rows:
        if row.get("error"):
            reason = row["error"].splitlines()[0]
            yield (row["case"], f"`{method(row)}`", reason, *[""] * (len(section.headings) - 3))
        else:
            yield section.cells(row)


def single_cells(row: Row) -> tuple[str, ...]:
    return (
        *common_cells(row),
        f"{row['least_eor']:.3f}" if row.get("least_eor") else "",
        f"{row['stall_ms']:.0f}",
        f"{row['recomputes']:,}",
        *papers_cells(row),
    )


def together_cells(row: Row) -> tuple[str, ...]:
    return (*common_cells(row), f"{row['stall_ms']:.0f}", *papers_cells(row))


def figure_cells(row: Row) -> tuple[str, ...]:
    return (*common_cells(row), f"{row['stall_ms']:.0f}", f"{row['recomputes']:,}")


def first_cells(row: Row) -> tuple[str, ...]:
    papers = papers_row(row)
    predicted = papers.prediction_eor if papers is not None and row["policy"] == "tensile" else None
    return (
        *(row["case"], f"`{method(row)}`", f"{row['msr']:.1%}", f"{row['first_eor']:.3f}"),
        f"{row['planning_ms'] / 1e3:.2f}",
        f"{papers.eor:.3f}" if papers is not None and row["policy"] != "joint" else "",
        f"{papers.eor - predicted:.3f}" if papers is not None and predicted is not None else "",
    )


def common_cells(row: Row) -> tuple[str, ...]:
    return (row["case"], f"`{method(row)}`", f"{row['msr']:.1%}", f"{row['eor']:.3f}", f"{row['cbr']:.3f}")


def papers_cells(row: Row) -> tuple[str, ...]:
    papers = None if row["policy"] == "joint" else papers_row(row)
    if papers is None or papers.msr is None:
        return ("", "", "")
    return (f"{papers.msr:.1%}", f"{papers.eor:.3f}", f"{papers.cbr:.3f}")


def slower_cells(row: Row) -> tuple[str, ...]:
    return (row["case"], f"{row['times']}", f"{row['msr']:.1%}", f"{row['papers_msr']:.1%}", *enough_cells(row))


def enough_cells(row: Row) -> tuple[str, ...]:
    """Describe what all rows of a network share, in the first of them."""
    if row["times"] != slower.TIMES[0]:
        return ("", "", "")
    papers_ms = row["papers_step_ms"]
    return (
        f"{row['enough']:.1f}" if row["enough"] else f"more than {slower.MOST:.0f}",
        f"{row['step_ms']:.0f}",
        f"{papers_ms:,.0f}" if papers_ms else "",
    )


SINGLE = ("", "method", "saved", "EOR", "CBR", "bound", "stall, ms", "recomputed")
TOGETHER = ("", "method", "saved", "EOR", "CBR", "stall, ms")
PAPERS = ("paper: saved", "EOR", "CBR")

SECTIONS = (
    Section(
        "table3",
        """
Each policy with a budget saves what the paper's TENSILE saved on the network. `vdnn` has no budget, and `tensile`
without one is TENSILE as in the paper: it swaps as long as nothing waits, and recomputes nothing. It saves less here
than in the paper, because the link has less time while an operator runs (the last table). With the budget it
recomputes, which is faster than the paper's swaps. Memory is that of all tensors: weights, gradients, both moments
of AdamW, activations; not the libraries' workspaces, which nobody knows without a GPU. `vdnn` moves the inputs of all
convolutions, and saves more than the paper's own `vdnn`; the paper does not say which it moves. Early updates
(`early`) release each gradient as soon as it is used; the paper's graph has all updates at the end. A plan that exceeds
the budget is a row with its reason.
""",
        (*SINGLE, *PAPERS),
        single_cells,
    ),
    Section(
        "table1",
        f"""
A plan made with predicted latencies (`roofline`) and one with the right ones, each at what the paper's saves in that
phase. The predictions are wrong by {ERROR:.0%} in the median, as those of the latency models may be. The paper's EOR in
its cold start includes the time of the predictions, which takes longer there than a step takes here; the
simulator has only the plan, and says what wrong latencies cost: a transfer that is late by the error of the operators
beside it. Both phases are therefore much closer to each other than in the paper.
""",
        (*SINGLE, *PAPERS),
        single_cells,
    ),
    Section(
        "table2",
        """
The first iteration under a plan made with predicted latencies, and under swapping on demand (`lru`), which is
Capuchin's first iteration. In the simulator a first iteration differs from later ones in nothing but the plan: nothing
is loaded, compiled or chosen. "Without prediction" is the paper's EOR less the part that it gives for its predictions.
Planning takes the seconds given on one core; the paper does not say how long its planning takes.
""",
        ("", "method", "saved", "first iteration, EOR", "planning, s", "paper", "without prediction"),
        first_cells,
    ),
    Section(
        "table4",
        """
All five networks at once, each with a batch of 16; the paper does not give its batch. The device computes for the five
jobs in turns, so without a plan each takes five times as long as alone, and the link has five times as long for each
job's transfers, but carries those of five jobs. Saved is the sum of the jobs' peaks, as if they had them at the same
time; the paper measures the largest sum at any time, so that its savings are smaller if peaks rarely meet.
""",
        (*TOGETHER, *PAPERS),
        together_cells,
    ),
    Section(
        "fig6",
        """
One to four jobs with the same network, as in the table before. The paper's figure has no numbers in its text, which
says: with more jobs vDNN's EOR falls, Capuchin's rises dramatically, and TENSILE's stays much more stable. The budget
is the same share as for a single job.
""",
        ("", "method", "saved", "EOR", "CBR", "stall, ms", "recomputed"),
        figure_cells,
    ),
    Section(
        "fig7",
        """
Policies without a budget, which choose what they save: `tensile` what hides behind operators, `joint` what costs at
most 2 % of the time. The paper's text says that savings and CBR rise with the batch, except for DenseNet with 32 and
64. Here they rise to about a batch of 16 and then stay: from there on the operators and the transfers grow alike.
""",
        ("", "method", "saved", "EOR", "CBR", "stall, ms", "recomputed"),
        figure_cells,
    ),
    Section(
        SLOWER,
        """
TENSILE as in the paper (one lane, no budget) on a device whose link is the same, and whose operators take several times
as long. *Enough* is the multiple from which it saves as much as the paper's. The paper's platform is far slower than
that: the time of its predictions, and the part of the first iteration that this is, imply how long that iteration takes
without a plan. So its link had time for all that was saved, and its extra time was not the link's.
""",
        ("", "times as slow", "saved", "paper", "enough", "step here, ms", "the paper's first, ms"),
        slower_cells,
    ),
)

BENCHMARK = Benchmark(
    "papers", "The TENSILE paper's tables and figures, simulated.", scenarios, nothing, checks, tables, DEVICE
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
