"""Batch sizes that are tried by training with them, and `pg-tensile bench --batch 0`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pg_tensile.errors import BudgetError
from pg_tensile.execution.capture import Captured, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.measuring.batch_sizes import STEPS, Probing, Rows, probe_sizes
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.batchsize.choose import Choice
from pg_tensile.planning.batchsize.predict import Correction, Predictor
from pg_tensile.planning.batchsize.throughput import Curves
from pg_tensile.planning.batchsize.traces import BatchTraces
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.tools.cli.main import main
from tests.unit.executing import FAST, SPEC, batch, net

SIZES = (4, 8, 16)


def captured(size: int) -> Captured:
    inputs, targets = batch(0, size)
    return capture(net(), inputs, targets, SPEC)


def rows(size: int) -> Iterator[Rows]:
    number = 0
    while True:
        yield batch(number, size)
        number += 1


def test_sizes_are_parts_of_the_largest() -> None:
    assert probe_sizes(48) == (6, 12, 24, 32, 48)
    assert probe_sizes(3) == (1, 2, 3)
    assert probe_sizes(1) == (1,)
    assert probe_sizes(48, least=20) == (20, 24, 32, 48)


def test_training_goes_on_from_one_size_to_the_next() -> None:
    """To the bits of eager PyTorch: weights, the optimizer's moments and dropout's numbers go on."""
    traces = BatchTraces(lambda size: captured(size).trace)
    graphs = {size: captured(size) for size in SIZES}
    curves = Curves(FAST.launch_us, [traces.trace_at(4)])
    predictor = Predictor(traces.trace_at, FAST, None, curves.predict)
    reference = EagerStep(net(), SPEC)
    torch.manual_seed(3)
    for size in SIZES:
        for number in range(STEPS):
            reference.step(*batch(number, size))
    device = HostDevice(FAST)
    model = net()
    with Probing(graphs.__getitem__, model, device, predictor, traces, curves) as probing:
        torch.manual_seed(3)
        probes = probing.run(SIZES, rows, 60.0)
        assert [probe.batch_size for probe in probes] == list(SIZES)
        assert all(probe.samples_per_s > 0 for probe in probes)
    device.close()
    for (name, tensor), other in zip(model.state_dict().items(), reference.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    known = traces.trace_at(16)
    assert curves.predict(known).sum() > 0 and known.workspace_bytes.max() > 0
    assert traces.trace_at(32).workspace_bytes.sum() == 2 * known.workspace_bytes.sum()
    assert predictor(16).iteration_us == pytest.approx(probes[-1].step_us, rel=1e-6)


def test_a_size_is_trained_with_the_plan_that_it_needs() -> None:
    """Nothing larger than the budget is tried, and what needs a plan has one."""
    traces = BatchTraces(lambda size: captured(size).trace)
    curves = Curves(FAST.launch_us)
    device = HostDevice(FAST)
    with Probing(captured, net(), device, Predictor(traces.trace_at, FAST), traces, curves) as probing:
        probing.measure(16, rows(16))
    vanilla = footprint(traces.trace_at(16)).device_peak_bytes
    budget = (least_bytes(traces.trace_at(16)) + vanilla) // 2
    predictor = Predictor(traces.trace_at, FAST, budget, curves.predict)
    assert len(predictor.plan(16)) and not predictor(400).feasible
    tight = HostDevice(FAST, budget)
    with Probing(captured, net(), tight, predictor, traces, curves) as probing:
        assert [probe.batch_size for probe in probing.run((8, 16, 400), rows, 60.0)] == [8, 16]
        assert probing.executor is not None and probing.executor.counters.peak_bytes <= budget
    device.close()
    tight.close()
    with pytest.raises(BudgetError):
        predictor.plan(400)


def test_nothing_more_is_tried_when_the_time_is_over() -> None:
    traces = BatchTraces(lambda size: captured(size).trace)
    device = HostDevice(FAST)
    predictor = Predictor(traces.trace_at, FAST)
    with Probing(captured, net(), device, predictor, traces, Curves(FAST.launch_us)) as probing:
        assert [probe.batch_size for probe in probing.run(SIZES, rows, 0.0)] == [4]
    device.close()


def test_predictions_are_corrected_by_what_was_measured() -> None:
    corrected = Correction((8, 32), (100.0, 400.0), (150.0, 1000.0))
    assert corrected(8, 100.0) == pytest.approx(150) and corrected(32, 400.0) == pytest.approx(1000)
    assert corrected(16, 200.0) == pytest.approx(400)  # half of the way from 1.5 to 2.5
    assert corrected(64, 800.0) == pytest.approx(2000)
    assert corrected(2, 25.0) == pytest.approx(75)
    assert Correction()(8, 100.0) == 100


def test_what_is_chosen_is_trained_with_before_the_choice_is_final() -> None:
    """The first choice turns out slow: the next one is taken."""
    traces = BatchTraces(lambda size: captured(size).trace)
    curves = Curves(FAST.launch_us, [traces.trace_at(4)])
    device = HostDevice(FAST)
    predictor = Predictor(traces.trace_at, FAST, None, curves.predict)
    offered = iter([8, 16, 16])

    def choose_next() -> Choice:
        size = next(offered)
        return Choice(size, 1e-3, (predictor(size),), "none")

    with Probing(captured, net(), device, predictor, traces, curves) as probing:
        choice = probing.settle(choose_next, rows, 60.0)
        assert choice.batch_size == 16 and list(probing.probes) == [8, 16]
        measured = probing.probes[16].step_us
    assert predictor(16).iteration_us == pytest.approx(measured, rel=1e-6)
    device.close()


NET = """
from torch import nn

def Net():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
"""


@pytest.mark.long
@pytest.mark.parametrize("device", ["sim:RTX_A6000", "host"])
def test_the_bench_chooses_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    (tmp_path / "small.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    arguments = (
        *("bench", "--model", "small.py:Net", "--input", "float32:64", "--classes", "10", "--batch", "0"),
        *("--policies", "joint", "--budget", "200KB", "--device", device, "--link", "1"),
        *("--rounds", "1", "--iterations", "1", "--json", "rows.json"),
    )
    try:
        assert main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    found = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    printed = capsys.readouterr().out
    assert f"batch size {found[0]['batch']} is predicted to be the fastest that fits" in printed
    assert printed.count("samples/s") >= 13
    assert all(row["error"] is None and row["device_peak_bytes"] <= 200_000 for row in found)
    assert found[0]["batch"] > 8


def test_no_batch_fits_the_benchs_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    arguments = ("bench", "--model", "small.py:Net", "--input", "float32:64", "--classes", "10", "--batch", "0")
    assert main((*arguments, "--policies", "joint", "--budget", "1KB", "--device", "sim:RTX_A6000")) == 1
    message, *rest = [line for line in capsys.readouterr().err.splitlines() if "choosing" not in line]
    assert message.startswith("pg-tensile: no batch size fits: a batch of 1 needs at least")
    assert any(line.startswith("hint: Use a larger memory budget") for line in rest)
