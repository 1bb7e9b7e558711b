"""Choosing the batch size, measured on the host device (AccUDNN; docs/batch-size.md).

- choice: within a budget, the chosen batch size's throughput beside that of twelve others over the whole range, each
  measured under its plan. It has to reach 95 % of the best, and nothing may run out of memory.
- memory: ResNet-152 within 8/24 of its memory without a plan, as in the paper, beside vanilla's speed: 95 % of it.
- accuracy: scikit-learn's digits, trained with the chosen batch size and its learning rate, and with 64 rows: not more
  than half a percentage point apart on held-out rows.

A row is a plain dictionary; `checks(rows)` evaluates the promises.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.checks import Check
from benchmarks.command import Row
from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.batchsize.choose import choose
from pg_tensile.planning.batchsize.learning_rate import BASE_BATCH, scaled_learning_rate
from pg_tensile.planning.batchsize.predict import Predictor
from pg_tensile.tools.bench.batch import choose_batch
from pg_tensile.tools.bench.contenders import PlanStepper, take_turn
from pg_tensile.tools.bench.measured import MeasuredBench, chosen_device
from pg_tensile.tools.bench.options import BenchOptions
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.run import default_threads
from pg_tensile.tools.bench.workload import build_model, prepare
from pg_tensile.tools.cli import bench as cli

SECTION = "batch size"
SIZES = 12  # of the exhaustive search
MOST_ROWS = 384
ROUNDS, STEPS = 3, 3  # STEPS in each round of a size, after a first step
PAPERS_SHARE = 8 / 24  # of vanilla's memory


class Asked(NamedTuple):
    """Goals: shares of the best throughput and of vanilla's speed, and percentage points of accuracy."""

    of_best: float
    of_vanilla: float
    points: float


FULL, QUICK = Asked(0.95, 0.95, 0.5), Asked(0.4, 0.1, 5.0)  # quick: few steps, with inaccurate results


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Yield a row for each case whose name contains `only`; `quick`: with small networks and few steps."""
    cases = {"choice": choice_row, "memory": memory_row, "accuracy": accuracy_row}
    torch.set_num_threads(default_threads("host"))
    yield from ({"case": name, "quick": quick, **measure(quick)} for name, measure in cases.items() if only in name)


def checks(rows: Iterable[Row]) -> list[Check]:
    """Check the rows against the promises."""
    return [CHECKS[row["case"]](row, QUICK if row["quick"] else FULL) for row in rows]


# ---- the choice, beside other sizes ----


def choice_row(quick: bool) -> Row:
    """Measure the throughput, in rows a second, of the chosen size and of SIZES others within the same budget."""
    model, budget = ("resnet20_cifar10", "60MB") if quick else ("resnet56_cifar10", "600MB")
    options = parse(f"pytorchcv.models.resnet_cifar:{model}", "float32:3x32x32", "0", f"joint:budget={budget}")
    most, rounds = (48, 1) if quick else (MOST_ROWS, ROUNDS)
    with Progress() as progress:
        choice, predict = choose_batch(options, progress, most)
        largest = max(candidate.batch_size for candidate in choice.candidates if candidate.feasible)
        sizes = sorted({*np.geomspace(max(1, largest / 32), largest, SIZES).round().astype(int).tolist()})
        sizes = [*dict.fromkeys([choice.batch_size, *sizes])]
        step_ms: dict[int, list[float]] = {size: [] for size in sizes}
        out_of_memory = []
        for number in range(rounds):
            for size in reversed(sizes) if number % 2 else sizes:
                progress.say(f"batch {size}")
                try:
                    step_ms[size] += measured_ms(options, predict, size, 1 if quick else STEPS)
                except OutOfDeviceMemoryError as error:
                    out_of_memory.append(f"{size}: {error.message}")
    throughput = {size: size / statistics.median(ms) * 1e3 for size, ms in step_ms.items() if ms}
    best = max(throughput, key=lambda size: throughput[size])
    return {
        "model": model,
        "budget_bytes": predict.budget_bytes,
        "chosen": choice.batch_size,
        "predicted": choice.candidates[0].samples_per_s,
        "measured": throughput.get(choice.batch_size, 0.0),
        "best": best,
        "best_measured": throughput[best],
        "of_best": throughput.get(choice.batch_size, 0.0) / throughput[best],
        "throughput": throughput,
        "out_of_memory": out_of_memory,
    }


def measured_ms(options: BenchOptions, predict: Predictor, size: int, steps: int) -> tuple[float, ...]:
    """Measure `steps` steps, after a first one, under the plan for batch size `size`."""
    workload = prepare(replace(options, batch=size), build_model(options), chosen_device(options))
    device = HostDevice(predict.profile, predict.budget_bytes)
    try:
        stepper = PlanStepper(workload, workload.early, device, predict.plan(size))
        try:
            turn = take_turn(stepper, workload.batches(1 + steps), 1, options.seed)
        finally:
            stepper.close()
    finally:
        device.close()
    return turn.step_ms


def choice_check(row: Row, asked: Asked) -> Check:
    finding = f"{row['chosen']} rows, {row['of_best']:.1%} of the best, {row['best']} rows"
    if row["out_of_memory"]:
        finding += f"; out of memory: {', '.join(row['out_of_memory'])}"
    holds = row["of_best"] >= asked.of_best and not row["out_of_memory"]
    bar = f"{asked.of_best:.0%}, never out of memory"
    return Check(SECTION, f"{row['model']}: measured throughput", finding, bar, holds)


# ---- a third of the memory ----


def memory_row(quick: bool) -> Row:
    """Measure the speed of `joint`, and of the paper's own plan, within a third of vanilla's memory."""
    name, shape, batch, rounds = ("resnet:resnet152", "float32:3x224x224", 8, 2)
    if quick:
        name, shape, batch, rounds = ("resnet_cifar:resnet20_cifar10", "float32:3x32x32", 8, 1)
    share = f"{100 * PAPERS_SHARE:.2f}%"
    policies = f"none,joint:budget={share},accudnn:budget={share}"
    options = parse(f"pytorchcv.models.{name}", shape, str(batch), policies, "--optimizer", "momentum")
    with Progress() as progress:
        report = MeasuredBench(replace(options, rounds=rounds), progress).run()
    rows = {row.policy: row for row in report.rows}
    joint, paper = rows["joint"], rows["accudnn"]
    return {
        "model": name,
        "batch": batch,
        "budget_bytes": joint.budget_bytes,
        "device_peak_bytes": joint.device_peak_bytes,
        "speed": 1 / joint.eor if joint.eor else 0.0,
        "papers_speed": 1 / paper.eor if paper.eor else None,
        "link_gbps": joint.link_gbps,
        "error": joint.error,
        "papers_error": paper.error,
    }


def memory_check(row: Row, asked: Asked) -> Check:
    finding = row["error"] or f"{row['speed']:.1%} of vanilla's speed"
    holds = row["error"] is None and row["speed"] >= asked.of_vanilla
    return Check(SECTION, f"{row['model']} within 8/24 of its memory", finding, f"{asked.of_vanilla:.0%}", holds)


# ---- the accuracy ----


class Digits(nn.Module):
    """A small network for scikit-learn's digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def accuracy_row(quick: bool) -> Row:
    """Measure the accuracy on the last fifth of the digits, averaged over several seeds."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    pixels = (pixels / 16).float()
    kept = len(pixels) // 5
    rows, epochs, seeds = len(pixels) - kept, 3 if quick else 20, range(1 if quick else 10)
    base_rate = 1e-3
    options = parse("benchmarks.systems.batch:Digits", "float32:64", "0", "joint")
    with Progress() as progress:
        _, predict = choose_batch(options, progress)
    choice = choose(predict, rows, budget_bytes=predict.budget_bytes, learning_rate=base_rate)

    def accuracy(batch: int, rate: float) -> float:
        return statistics.mean(learnt(pixels, labels, rows, batch, rate, epochs, seed) for seed in seeds)

    chosen, base = accuracy(choice.batch_size, choice.learning_rate), accuracy(BASE_BATCH, base_rate)
    return {
        "batch": choice.batch_size,
        "learning_rate": choice.learning_rate,
        "linear": scaled_learning_rate(base_rate, BASE_BATCH, choice.batch_size, "linear"),
        "accuracy": chosen,
        "base_accuracy": base,
        "epochs": epochs,
        "seeds": len(seeds),
    }


def learnt(
    pixels: torch.Tensor, labels: torch.Tensor, rows: int, batch: int, rate: float, epochs: int, seed: int
) -> float:
    """Return the accuracy on the rows from `rows` on, after training on the rows before."""
    torch.manual_seed(seed)
    step = EagerStep(Digits(), StepSpec(F.cross_entropy, OptimizerSpec("adamw", rate)))
    for _ in range(epochs):
        for part in torch.randperm(rows).split(batch):
            step.step([pixels[part]], [labels[part]])
    with torch.no_grad():
        return float((step.model(pixels[rows:]).argmax(1) == labels[rows:]).float().mean())


def accuracy_check(row: Row, asked: Asked) -> Check:
    finding = f"{row['accuracy']:.2%} with {row['batch']} rows, {row['base_accuracy']:.2%} with {BASE_BATCH}"
    holds = 100 * (row["base_accuracy"] - row["accuracy"]) <= asked.points
    return Check(SECTION, "digits: accuracy", finding, f"at most {asked.points} points less", holds)


CHECKS = {"choice": choice_check, "memory": memory_check, "accuracy": accuracy_check}


# ---- the command ----


def parse(model: str, shape: str, batch: str, policies: str, *others: str) -> BenchOptions:
    """Parse the step as `pg-tensile bench` does, on the host device."""
    arguments = ["--model", model, "--input", shape, "--classes", "10", "--batch", batch, "--policies", policies]
    return cli.parse(["bench", *arguments, *others, "--early-update"])
