"""The tables and figures of tensile.txt, measured here: `pg-tensile bench table1 … table4, fig6, fig7`.

An experiment is a list of cases, each a run of the command with several policies: of one training step, or of several
jobs together. A method that appears everywhere is a line in METHODS, a network a line in networks.PAPER. `--quick`
takes small networks, few steps and small batches. Cases run in processes of their own; every row is one policy's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pg_tensile.bench import options
from pg_tensile.bench.networks import (
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
from pg_tensile.bench.progress import Progress
from pg_tensile.bench.report import check_writable, plain, table_console
from pg_tensile.bench.together import run_together

Row = dict[str, Any]

# What is compared where a budget is given ({}), a line each; vDNN knows none.
METHODS = (
    "vdnn",
    "vdnn:which=all",
    "capuchin:budget={}",
    "lru:budget={}",
    "tensile:budget={}",
    "tensile:early_update=true:budget={}",
    "joint:early_update=true:budget={}",
)
BATCHES = (4, 8, 16, 32, 64)
MIXED_SAVED, SAVED = (
    16,
    {VGG16: 27, INCEPTION3: 44, INCEPTION4: 52, RESNET50: 43, DENSENET121: 51},
)  # percent, the paper's
QUICK_SAVED = 20


class Published(NamedTuple):
    """What the paper reports (its tables I to IV)."""

    msr: float
    eor: float

    def __str__(self) -> str:
        return f"{self.msr:.1%} at {self.eor:.2f}"


PUBLISHED = {  # experiment, case and policy; of table 2 the first iteration's EOR
    ("table1", "VGG-16", "up"): Published(0.3192, 1.2475),
    ("table1", "VGG-16", "cs"): Published(0.2670, 6.0128),
    ("table1", "Inception v3", "up"): Published(0.4788, 1.4839),
    ("table1", "Inception v3", "cs"): Published(0.4361, 3.1128),
    ("table1", "Inception v4", "up"): Published(0.5558, 1.2898),
    ("table1", "Inception v4", "cs"): Published(0.5154, 2.6727),
    ("table1", "ResNet-50", "up"): Published(0.4647, 1.3813),
    ("table1", "ResNet-50", "cs"): Published(0.4258, 3.5395),
    ("table1", "DenseNet-121", "up"): Published(0.5236, 1.0664),
    ("table1", "DenseNet-121", "cs"): Published(0.5135, 2.2532),
    ("table3", "VGG-16", "vdnn"): Published(0.1109, 1.7835),
    ("table3", "VGG-16", "capuchin"): Published(0.2558, 1.8304),
    ("table3", "VGG-16", "tensile"): Published(0.2670, 1.6287),
    ("table3", "Inception v3", "vdnn"): Published(0.1633, 2.5184),
    ("table3", "Inception v3", "capuchin"): Published(0.4331, 2.7745),
    ("table3", "Inception v3", "tensile"): Published(0.4361, 1.6468),
    ("table3", "Inception v4", "vdnn"): Published(0.1903, 2.5028),
    ("table3", "Inception v4", "capuchin"): Published(0.5129, 3.2362),
    ("table3", "Inception v4", "tensile"): Published(0.5154, 1.4281),
    ("table3", "ResNet-50", "vdnn"): Published(0.1733, 2.2981),
    ("table3", "ResNet-50", "capuchin"): Published(0.3859, 2.2320),
    ("table3", "ResNet-50", "tensile"): Published(0.4258, 1.5540),
    ("table3", "DenseNet-121", "vdnn"): Published(0.1381, 2.6148),
    ("table3", "DenseNet-121", "capuchin"): Published(0.4860, 3.4400),
    ("table3", "DenseNet-121", "tensile"): Published(0.5135, 1.1678),
    ("table4", "mixed", "vdnn"): Published(0.0580, 1.6297),
    ("table4", "mixed", "capuchin"): Published(0.1150, 7.6545),
    ("table4", "mixed", "tensile"): Published(0.1565, 1.1589),
}


class Case(NamedTuple):
    """Several policies on the same jobs; more than one job: all at once. `jobs`: each one's arguments of the command,
    without the policies."""

    title: str
    jobs: tuple[tuple[str, ...], ...]
    policies: tuple[str, ...]


class Experiment(NamedTuple):
    """`cases` at full size or quick; `columns`: what its table shows of a row besides case, policy and the paper's."""

    title: str
    cases: Callable[[bool], list[Case]]
    columns: tuple[str, ...]


# ---- what is run ----------------------------------------------------------------------------------------------------


def steps(network: Network, batch: int, quick: bool) -> tuple[str, ...]:
    rounds = ("--rounds", "1") if quick else ("--rounds", "3")
    return (*network.arguments(batch), *rounds, "--warmup", "1", "--iterations", "1", "--light")


def chosen(quick: bool) -> list[tuple[Network, str]]:
    """Networks, and the budget with which each saves what the paper's TENSILE saved of it."""
    if quick:
        return [(network, f"{100 - QUICK_SAVED}%") for network in (SMALL_RESNET, SMALL_DENSENET)]
    return [(network, f"{100 - SAVED[network]}%") for network in PAPER]


def methods(budget: str) -> tuple[str, ...]:
    return tuple(each.format(budget) for each in METHODS)


def single(network: Network, batch: int, quick: bool, policies: Sequence[str], title: str = "") -> Case:
    return Case(title or network.title, (steps(network, batch, quick),), ("none", *policies))


def phases(quick: bool) -> list[Case]:
    """Table I: planned with predicted latencies (the cold start), and with measured ones (updated)."""
    policies = ("tensile:latencies=roofline:budget={0}", "tensile:budget={0}", "joint:latencies=roofline:budget={0}")
    asked = [f"{each}:early_update=true" for each in (*policies, "joint:budget={0}")]
    return [
        single(network, 4 if quick else 16, quick, [each.format(budget) for each in asked])
        for network, budget in chosen(quick)
    ]


def first_iterations(quick: bool) -> list[Case]:
    """Table II: the first iteration of plans made before it; Capuchin's is passive, as `lru`."""
    asked = ("tensile:latencies=roofline", "joint:latencies=roofline:early_update=true", "lru")
    return [
        single(network, 4 if quick else 16, quick, [f"{each}:budget={budget}" for each in asked])
        for network, budget in chosen(quick)
    ]


def single_tasks(quick: bool) -> list[Case]:
    """Table III."""
    return [single(network, 4 if quick else 16, quick, methods(budget)) for network, budget in chosen(quick)]


def mixed(quick: bool) -> list[Case]:
    """Table IV: all networks at once, started one after another in random order."""
    networks = [network for network, _ in chosen(quick)]
    jobs = tuple(steps(network, 4, quick) for network in networks)
    return [Case("mixed", jobs, ("none", *methods(f"{100 - MIXED_SAVED}%")))]


def workloads(quick: bool) -> list[Case]:
    """Fig. 6: one to four of the same network at once."""
    return [
        Case(f"{count} × {network.title}", (steps(network, 4, quick),) * count, ("none", *methods(budget)))
        for network, budget in chosen(quick)
        for count in range(1, 3 if quick else 5)
    ]


def batch_sizes(quick: bool) -> list[Case]:
    """Fig. 7: batches of 4 to 64, with what each policy saves by itself."""
    asked = ("tensile", "tensile:early_update=true", "joint:early_update=true")
    return [
        single(network, batch, quick, asked, f"{network.title}, batch {batch}")
        for network, _ in chosen(quick)
        for batch in (BATCHES[:2] if quick else BATCHES)
    ]


MEMORY = ("msr", "eor", "cbr", "stall_ms", "recomputes")
TOGETHER = ("msr", "eor", "cbr", "stall_ms")
EXPERIMENTS = {
    "table1": Experiment("Each phase's performance", phases, MEMORY),
    "table2": Experiment("First iteration", first_iterations, ("msr", "first_eor", "eor", "planning_ms")),
    "table3": Experiment("A single task", single_tasks, MEMORY),
    "table4": Experiment("Mixed neural architectures", mixed, TOGETHER),
    "fig6": Experiment("One to four workloads", workloads, TOGETHER),
    "fig7": Experiment("The batch size's influence", batch_sizes, MEMORY),
}


# ---- running --------------------------------------------------------------------------------------------------------


def run_case(case: Case, device: str, progress: Progress) -> list[Row]:
    """A row for each policy."""
    policies = ("--policies", ",".join(case.policies))
    if len(case.jobs) > 1:
        from pg_tensile.cli import parse

        jobs = [parse(["bench", *arguments, *policies, "--device", device]) for arguments in case.jobs]
        value = jobs[0]
        return [asdict(row) for row in run_together(jobs, value.policies, value.rounds, value.iterations, progress)]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "pg_tensile", "bench", *case.jobs[0], *policies, "--device", device]
        done = subprocess.run(
            [*command, "--json", file.name], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        rows = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    return rows or [{"policy": "none", "label": "none", "error": done.stderr.strip()[-2000:]}]


def run_experiment(name: str, device: str, quick: bool, progress: Progress) -> Iterator[Row]:
    """The rows of all its cases, as they come; each with the names of experiment and case."""
    for case in EXPERIMENTS[name].cases(quick):
        progress.say(f"{name}: {case.title}")
        for row in run_case(case, device, progress):
            first, vanilla = row.get("first_step_ms"), row.get("vanilla_first_step_ms")
            yield plain(
                {"experiment": name, "case": case.title}
                | row
                | {"first_eor": first / vanilla if first and vanilla else None}
            )


def show(name: str, rows: Sequence[Row], console: Console) -> None:
    """A table, and below it why a policy has no numbers."""
    experiment = EXPERIMENTS[name]
    table = Table(title=f"{name}: {experiment.title}")
    for heading in ("", "policy", *experiment.columns, "paper's", "results"):
        table.add_column(heading, justify="right" if heading in experiment.columns else "left", no_wrap=True)
    for row in rows:
        if row["policy"] == "none" and row.get("error") is None:
            continue
        cells = [shown(column, row.get(column)) for column in experiment.columns]
        same = {True: "identical", False: "different", None: ""}[row.get("bit_identical")]
        table.add_row(
            row["case"], method(row), *cells, str(published(row) or ""), "failed" if row.get("error") else same
        )
    console.print(table)
    for row in rows:
        if row.get("error"):
            console.print(f"{row['case']}, {method(row)}: {row['error']}", highlight=False, markup=False)


def method(row: Row) -> str:
    label = row["label"].replace("early_update=true", "early").replace("latencies=", "")
    return f"{label} at {row['budget']}" if row.get("budget") else str(label)


def shown(column: str, value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.1%}"
        if column == "msr"
        else f"{value:,.0f}"
        if column in ("stall_ms", "planning_ms", "recomputes")
        else f"{value:.3f}"
    )


def published(row: Row) -> Published | None:
    return PUBLISHED.get((row["experiment"], row["case"], what(row)))


def what(row: Row) -> str:
    """A method by the name that PUBLISHED has it under."""
    if row["experiment"] != "table1":
        return str(row["policy"])
    return "" if row["policy"] != "tensile" else "up" if row["latencies"] == options.MEASURED else "cs"


# ---- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """`pg-tensile bench NAME…`: runs, prints a table for each, and writes rows as they come; 1 when a policy failed or
    its results differ. Raises OptionError."""
    from pg_tensile.cli import Parser, add

    parser = Parser(
        prog="pg-tensile bench",
        description="Measures the tables and figures of the TENSILE paper: " + ", ".join(EXPERIMENTS) + ".",
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="+", choices=EXPERIMENTS, metavar="NAME", help="of a table or figure")
    device = "host (default), cuda[:N], or sim:PROFILE, which executes nothing"
    add(parser, "--device", options.parse_device, default=options.DeviceChoice("host"), metavar="D", help=device)
    parser.add_argument("--quick", action="store_true", help="small networks and batches, one round")
    add(parser, "--json", metavar="FILE", help="write one JSON object a line and policy")
    asked = parser.parse_args(arguments)
    if asked.json is not None:
        check_writable(asked.json)
        Path(asked.json).write_text("")
    good = True
    with Progress() as progress:
        for name in dict.fromkeys(asked.names):
            rows = []
            for row in run_experiment(name, str(asked.device), asked.quick, progress):
                rows.append(row)
                good = good and row.get("error") is None and row.get("bit_identical") is not False
                if asked.json is not None:
                    with open(asked.json, "a") as file:
                        file.write(json.dumps(row, allow_nan=False) + "\n")
            show(name, rows, table_console(120))
    return int(not good)
