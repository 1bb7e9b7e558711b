"""Predictions on an accelerator beside those on the CPU: digits, time and memory.

A model predicts one row, and a batch, in three ways, which take turns: on the CPU, on the accelerator in one piece, and
there within a memory budget of BUDGET of its weights (`Served`, as in the server). Digits are compared with the CPU's:
the largest difference as a multiple of the largest output.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.tiny import mlp
from benchmarks.experiments.untuned import VisionTransformer
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.systems.inference import in_turns, network
from benchmarks.tables import table
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.execution.measuring.device import measure
from pg_tensile.execution.runtime.open_device import open_device
from pg_tensile.execution.training.prediction import Served

BUDGET = 0.6  # of the weights' bytes
CLOSE = 1e-3  # of the largest output
BATCH, ROUNDS = 256, 15
Models = dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]  # how to make each, and the shape of its input
MODELS: Models = {
    "MLP": (lambda: mlp(256, 1024), (256,)),
    "ViT, 12 layers": (lambda: VisionTransformer(12, 768), (3, 224, 224)),
    "ResNet-152": (network, (3 * 128 * 128,)),
}
QUICK_MODELS: Models = {
    "MLP": (mlp, (256,)),
    "small ViT": (lambda: VisionTransformer(2, 96), (3, 224, 224)),
}


def measured(
    title: str, model: nn.Module, shape: tuple[int, ...], device_name: str, batch: int, rounds: int
) -> Iterator[Row]:
    """Yield a row for one row at a time, and one for batches."""
    torch_device = choose_device(device_name)
    model = model.eval()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budget, profile = int(BUDGET * weights), measure(torch_device)
    there = copy.deepcopy(model).to(torch_device)
    for rows in (1, batch):
        inputs = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))

        @torch.no_grad()
        def predict(network: nn.Module, inputs: Tensor, device: torch.device) -> Tensor:
            return network(inputs.to(device)).cpu()

        on_cpu = partial(predict, model, inputs, torch.device("cpu"))
        whole = partial(predict, there, inputs, torch_device)
        expected = on_cpu()
        row: Row = {"model": title, "rows": rows, "weight_bytes": weights, "budget_bytes": budget}
        with closing(open_device(torch_device, profile, budget)) as device:
            served = Served(copy.deepcopy(model), [inputs], device, rows)
            with closing(served):
                within = partial(served.predict, [inputs])
                outputs = {"whole": whole(), "within": within()}
                times = in_turns([on_cpu, whole, within], rounds)
                row["peak_bytes"] = served.peak_bytes
        for way, ms in zip(("cpu", "whole", "within"), times, strict=True):
            row[f"{way}_ms"] = statistics.median(ms)
        for way, output in outputs.items():
            row[f"{way}_difference"] = difference(output, expected)
        yield row


def difference(outputs: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a multiple of the largest output expected."""
    return float((outputs - expected).abs().max() / expected.abs().max())


def rows(run: Run) -> Iterator[Row]:
    models = QUICK_MODELS if run.quick else MODELS
    for title in run.scenarios(models):
        make, shape = models[title]
        torch.manual_seed(0)
        yield from measured(title, make(), shape, run.device, 8 if run.quick else BATCH, 3 if run.quick else ROUNDS)


def checks(results: Results) -> list[Check]:
    checked = []
    for row in results.rows():
        for way in ("whole", "within"):
            off = row[f"{way}_difference"]
            what = f"{row['model']}, {row['rows']} rows, {way}: difference from the CPU"
            checked.append(Check("devices", what, f"{off:.1e}", f"≤ {CLOSE:.0e}", off <= CLOSE))
        peak, budget = row["peak_bytes"], row["budget_bytes"]
        checked.append(Check("devices", f"{row['model']}: peak", f"{peak:,}", f"≤ {budget:,}", peak <= budget))
    return checked


def tables(results: Results) -> list[str]:
    headings = (
        *("model", "rows", "CPU, ms", "device, ms", f"within {BUDGET:.0%} of the weights, ms"),
        *("difference from the CPU", "within", "peak, MiB"),
    )
    cells = [
        (
            *(row["model"], str(row["rows"])),
            *(f"{row[f'{way}_ms']:.2f}" for way in ("cpu", "whole", "within")),
            *(f"{row[f'{way}_difference']:.1e}" for way in ("whole", "within")),
            f"{row['peak_bytes'] / 2**20:.1f}",
        )
        for row in results.rows()
    ]
    return table(headings, cells)


BENCHMARK = Section("Predictions on an accelerator", rows, tables, checks, lambda _: list(MODELS), "cuda")
