"""Running and showing experiments: `pg-tensile bench table1 … table4, fig6, fig7, savings, optimum`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import Row, run_bench
from benchmarks.experiments.cases import EXPERIMENTS, FULL, QUICK, Case, Run, Size, parsed, runs
from benchmarks.experiments.paper import PUBLISHED, Published
from benchmarks.figures import plots
from benchmarks.together.rounds import run_together
from benchmarks.together.simulated import simulate_together
from pg_tensile.errors import OptionError
from pg_tensile.tools.bench import options
from pg_tensile.tools.bench.options import DeviceChoice
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import table_console
from pg_tensile.tools.bench.row import json_value
from pg_tensile.tools.bench.row_file import check_writable
from pg_tensile.tools.cli.bench import LATENCY_ERROR
from pg_tensile.tools.cli.parser import Parser, add, count, number

SIMULATED = DeviceChoice("sim", profile="RTX_A6000")  # device of the experiments that are simulated


# ---- running --------------------------------------------------------------------------------------------------------


def run_case(case: Case, device: str, progress: Progress, more: tuple[str, ...] = ()) -> list[Row]:
    """Run a case and return one row for each policy. `more`: further arguments of the command for each job."""
    policies = (*more, "--policies", ",".join(case.policies))
    if len(case.jobs) > 1:
        from pg_tensile.tools.cli.bench import parse

        jobs = [parse(["bench", *arguments, *policies, "--device", device]) for arguments in case.jobs]
        value = jobs[0]
        if value.device.kind == "sim":
            return [asdict(row) for row in simulate_together(jobs, value.policies, progress)]
        return [asdict(row) for row in run_together(jobs, value.policies, value.rounds, value.iterations, progress)]
    done, rows = run_bench([*case.jobs[0], *policies, "--device", device])
    return rows or [{"policy": "none", "label": "none", "error": done.stderr.strip()[-2000:]}]


def measure(run: Run, device: DeviceChoice, progress: Progress, more: tuple[str, ...] = ()) -> Iterator[Row]:
    """Run a case and yield its rows for each experiment that includes them, with the names of experiment and case.

    `more`: as for run_case.
    """
    case = run.case
    if run.simulated and device.kind == "host":
        device = SIMULATED
    progress.say(f"{', '.join(run.wanted)}: {case.title}")
    rows = [json_value(row | {"first_eor": first_eor(row)}) for row in run_case(case, str(device), progress, more)]
    for name, policies in run.wanted.items():
        wanted = {(choice.label, str(choice.budget or "")) for choice in parsed(policies)}
        for row in rows:
            if (row["label"], row.get("budget") or "") in wanted:
                yield {"experiment": name, "case": case.title} | row


def first_eor(row: Row) -> float | None:
    first, vanilla = row.get("first_step_ms"), row.get("vanilla_first_step_ms")
    return first / vanilla if first and vanilla else None


# ---- the tables -----------------------------------------------------------------------------------------------------


def show(name: str, rows: Sequence[Row], console: Console) -> None:
    """Print the table of an experiment and, below it, the error of each policy that failed."""
    experiment = EXPERIMENTS[name]
    papers = ["paper's"] if any(published(row) for row in rows) else []
    table = Table(title=f"{name}: {experiment.title}")
    for heading in ("", "policy", *experiment.columns, *papers, "results"):
        table.add_column(heading, justify="right" if heading in experiment.columns else "left", no_wrap=True)
    for row in rows:
        if row["policy"] == "none" and row.get("error") is None:
            continue
        cells = [shown(column, row.get(column)) for column in experiment.columns]
        table.add_row(row["case"], method(row), *cells, *(str(published(row) or "") for _ in papers), results(row))
    console.print(table)
    for row in rows:
        if row.get("error"):
            console.print(f"{row['case']}, {method(row)}: {row['error']}", highlight=False, markup=False)


def method(row: Row) -> str:
    label = row["label"].replace("early_update=true", "early").replace("latencies=", "")
    return f"{label} at {row['budget']}" if row.get("budget") else str(label)


def results(row: Row) -> str:
    """Describe whether the results equal eager PyTorch's; for a peer, how far its gradients differ."""
    if row.get("error"):
        return "failed"
    difference = row.get("gradient_difference")
    if row.get("bit_identical") is False and difference is not None:
        return f"gradients {difference:.0e} off" if difference else "gradients equal"
    return {True: "identical", False: "different", None: ""}[row.get("bit_identical")]


def shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "msr":
        return f"{value:.1%}"
    return f"{value:,.0f}" if column in ("stall_ms", "planning_ms", "recomputes") else f"{value:.3f}"


def published(row: Row) -> Published | None:
    return PUBLISHED.get((row["experiment"], row["case"], what(row)))


def what(row: Row) -> str:
    """Return the method's name in PUBLISHED, or "" if its settings differ from the paper's."""
    if "which=all" in row["label"]:
        return ""
    if row["experiment"] != "table1":
        return str(row["policy"])
    return "" if row["policy"] != "tensile" else "up" if row["latencies"] == options.MEASURED else "cs"


# ---- the command ----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pg-tensile bench",
        description="Measures the tables and figures of the TENSILE paper, memory against time at several savings, "
        "and the distance from the optimum: " + ", ".join(EXPERIMENTS) + ".",
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="+", choices=EXPERIMENTS, metavar="NAME", help="of a table or figure")
    device = "host (default), cuda[:N], or sim:PROFILE, which executes nothing"
    add(parser, "--device", options.parse_device, default=DeviceChoice("host"), metavar="D", help=device)
    parser.add_argument("--quick", action="store_true", help="small networks and batches, one round")
    add(parser, "--batch", count(1), metavar="N", help=f"samples in a batch of a single job ({FULL.batch})")
    several = f"samples in a batch of one of several jobs ({FULL.together})"
    add(parser, "--together", count(1), metavar="N", help=several)
    add(parser, "--rounds", count(1), metavar="R", help=f"in which all policies take turns ({FULL.rounds})")
    add(parser, "--latency-error", number(0.0, "a number above 0"), metavar="E", help=LATENCY_ERROR)
    add(parser, "--case", metavar="TITLE", help="measure only the case with this title, as ResNet-50")
    add(parser, "--json", metavar="FILE", help="write one JSON object a line and policy")
    add(parser, "--plots", metavar="FOLDER", help="draw the figures, as SVG")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run `pg-tensile bench NAME…`: write rows as they are measured, then print a table for each experiment.

    Returns 1 if a policy failed or its results differ from eager PyTorch's, else 0. Raises OptionError.
    """
    asked = parse(arguments)
    wanted = runs(asked.names, size_of(asked), asked.case)
    if not wanted:
        raise OptionError(f'there is no case "{asked.case}"', "Titles are in the tables' first column.")
    if asked.json is not None:
        check_writable(asked.json)
        Path(asked.json).write_text("")
    if asked.plots is not None:
        plots.check(asked.plots)
    rows: list[Row] = []
    more = () if asked.latency_error is None else ("--latency-error", str(asked.latency_error))
    with Progress() as progress:
        for run in wanted:
            for row in measure(run, asked.device, progress, more):
                rows.append(row)
                if asked.json is not None:
                    with open(asked.json, "a") as file:
                        file.write(json.dumps(row, allow_nan=False) + "\n")
    for name in dict.fromkeys(asked.names):
        show(name, [row for row in rows if row["experiment"] == name], table_console(140))
    if asked.plots is not None:
        plots.draw(rows, asked.plots)
    return int(not all(is_good(row) for row in rows))


def size_of(asked: argparse.Namespace) -> Size:
    size = QUICK if asked.quick else FULL
    return size._replace(
        batch=asked.batch or size.batch,
        together=asked.together or size.together,
        rounds=asked.rounds or size.rounds,
        simulated=asked.device.kind == "sim",
    )


def is_good(row: Row) -> bool:
    """Check that a row has no error and that a policy's results equal eager PyTorch's to the bit.

    A peer's results may differ, because that is a property of PyTorch.
    """
    wrong = row.get("bit_identical") is False and row["policy"] not in options.PEERS
    return row.get("error") is None and not wrong
