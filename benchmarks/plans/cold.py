"""The first iteration of a step without any measurements.

Latency models are calibrated on the training steps of the paper's networks with small batches and stored in
build/latency-models-<device>.bin. Then each network trains with a batch of 16, whose shapes are new to the models,
under a plan made with predicted latencies before the first iteration; and beside it under one made with the roofline's.
The first iteration is compared with vanilla's first, which spends time on the same checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.checks import Check, simulator_checks, timings_of
from benchmarks.command import ROOT, Row
from benchmarks.experiments.networks import PAPER, SMALL_DENSENET, SMALL_RESNET, Network
from benchmarks.experiments.paper import PUBLISHED
from benchmarks.plans.tensile import BATCH, GOALS, saved
from benchmarks.results import Results, torch_device
from benchmarks.runner import Run
from benchmarks.scenarios import Scenario, scenario_section
from benchmarks.tables import table
from pg_tensile.execution.capture import Captured
from pg_tensile.execution.measuring.device import measure
from pg_tensile.execution.measuring.operators import Calibration
from pg_tensile.execution.runtime.open_device import open_device
from pg_tensile.planning.latency import mlp, model_bytes
from pg_tensile.tools.bench.options import MODELS, ROOFLINE
from pg_tensile.tools.bench.run import default_threads
from pg_tensile.tools.bench.workload import build_model, prepare
from pg_tensile.tools.cli.bench import parse

BATCHES = (2, 8, 24)  # for calibration: the predicted batch lies between them
SECONDS = 700.0  # of calibration, at most: enough for all rounds over all graphs
ROUNDS = ("--rounds", "1", "--warmup", "0", "--iterations", "1", "--light", "only first steps are compared")
STEPS = 21  # of one scenario
FIRST_EOR = 1.3
ERROR = 0.10  # median, relative, of an operator's predicted latency


def chosen(quick: bool) -> tuple[Network, ...]:
    return (SMALL_RESNET, SMALL_DENSENET) if quick else PAPER


def scenarios(device: str, quick: bool) -> list[Scenario]:
    models = str(models_path(device))
    listed = []
    for network in chosen(quick):
        budget = GOALS[network.title][0].budget
        joint = [f"joint:latencies={source}:budget={budget}" for source in (MODELS, ROOFLINE)]
        policies = ",".join(["none", *joint])
        arguments = (*network.arguments(BATCH), *ROUNDS, "--early-update", "--policies", policies)
        listed.append(
            Scenario("cold start", network.title, (*arguments, "--latency-models", models), STEPS * network.step_s)
        )
    return listed


# ---- calibration ----------------------------------------------------------------------------------------------------


def models_path(kind: str) -> Path:
    return ROOT / "build" / f"latency-models-{kind}.bin"


def calibrate(run: Run) -> list[Row]:
    """Calibrate latency models, write their file, and return a row about the calibration."""
    torch.set_num_threads(default_threads(run.kind))
    torch_kind = torch_device(run.device)
    with closing(open_device(torch_kind, measure(torch_kind))) as runtime:
        captured = [step(network, batch, torch_kind) for network in chosen(run.quick) for batch in BATCHES]
        limit_bytes = runtime.profile.memory_bytes // 2
        calibration = Calibration(captured, runtime, limit_bytes, 10.0 if run.quick else SECONDS, loads=(0,))
        with closing(calibration.run()) as visits:
            visited = [progress.done for progress in visits]
        models = mlp.train(calibration.samples, runtime.profile)
    path = models_path(run.kind)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model_bytes.encode(models))
    return [{"graphs": len(captured), "visits": len(visited) - 1, "samples": len(calibration.samples)}]


def step(network: Network, batch: int, device: torch.device) -> Captured:
    options = parse(["bench", *network.arguments(batch)])
    return prepare(options, build_model(options), device).vanilla


# ---- what must hold -------------------------------------------------------------------------------------------------


def first_eor(row: Row) -> float:
    """Return the time of the first iteration over vanilla's first."""
    return row["first_step_ms"] / row["vanilla_first_step_ms"]


def checks(results: Results) -> list[Check]:
    rows = results.titled("cold start")
    checked = [*simulator_checks("cold start", timings_of(rows))]
    return checked + [check for title, row in rows for check in row_checks(title, row)]


def row_checks(title: str, row: Row) -> Iterator[Check]:
    """Check the bits of every row, and times and errors of plans made with the models."""
    what = f"{title}, {row['label']}"
    if row["error"] is not None:
        yield Check("cold start", what, row["error"], "no error", False)
        return
    same = "identical" if row["bit_identical"] else "different"
    yield Check("cold start", f"{what}: results", same, "identical", row["bit_identical"] is True)
    if row["latencies"] == MODELS:
        first, error = first_eor(row), row["latency_error"]
        yield Check("cold start", f"{what}: first iteration", f"{first:.3f}", f"≤ {FIRST_EOR}", first <= FIRST_EOR)
        yield Check("cold start", f"{what}: latencies", f"{error:.1%}", f"< {ERROR:.0%}", error < ERROR)


# ---- the document ---------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[str]:
    headings = (
        *("network", "saved", "latencies", "median error", "first iteration, EOR", "planning, s"),
        *("paper, first iteration", "its Capuchin"),
    )
    rows = []
    for title, row in results.titled("cold start"):
        if row["policy"] == "none" or row["error"] is not None:
            continue
        papers = [PUBLISHED.get(("table2", title, method)) for method in ("tensile", "lru")]
        rows.append(
            (
                *(title, f"{saved(row):.1%}", row["latencies"], f"{row['latency_error']:.1%}", f"{first_eor(row):.2f}"),
                f"{row['planning_ms'] / 1e3:.2f}",
                *(str(paper or "") for paper in papers),
            )
        )
    lines = [f"Calibrated with {row['graphs']} graphs: {row['samples']:,} samples." for row in results.rows("planning")]
    return [*lines, *table(headings, rows)]


BENCHMARK = scenario_section("Cold start", scenarios, tables, checks, planning=calibrate)
