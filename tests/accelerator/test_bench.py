"""The benchmark's command on an accelerator, where an operator has no deterministic algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pg_tensile.tools.bench.measured import MeasuredBench
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.cli.bench import parse
from tests.accelerator.target import TYPE

REFUSAL = "adaptive_avg_pool2d_backward does not have a deterministic implementation"


@pytest.mark.long
def test_a_benchmark_goes_on_where_an_operator_has_no_deterministic_algorithm(monkeypatch):
    """The kernels of the emulated device are the CPU's, all of them deterministic: the bench refuses in their stead."""
    measured = MeasuredBench.measured

    def refusing(bench: MeasuredBench, captured: Any) -> Any:
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{REFUSAL}, but you set 'torch.use_deterministic_algorithms(True)'")
        return measured(bench, captured)

    monkeypatch.setattr(MeasuredBench, "measured", refusing)
    words = "bench --model benchmarks.experiments.tiny:cnn --input float32:3x8x8 --classes 10 --batch 2 --light quick"
    options = parse([*words.split(), "--rounds", "1", "--iterations", "1", "--device", TYPE])
    with Progress() as progress:
        report = MeasuredBench(options, progress).run()
    assert f"results may differ in their last bits: {REFUSAL}" in report.notes
    assert [row.error for row in report.rows] == [None]
    assert torch.is_deterministic_algorithms_warn_only_enabled()
