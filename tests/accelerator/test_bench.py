"""The benchmark's command on an accelerator: what its rows say of memory and conditions, and of algorithms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pg_tensile.execution.backends import backend_of
from pg_tensile.execution.measuring import device as devices
from pg_tensile.planning.allocator_rules import AllocatorRules
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.tools.bench.conditions import AllocatorUse, TurnWatch, release_cached_memory
from pg_tensile.tools.bench.contenders import EagerStepper
from pg_tensile.tools.bench.measured import MeasuredBench
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.cli.bench import parse
from tests.accelerator.target import DEVICE, TYPE, module

MIB = 1 << 20
CNN = "bench --model benchmarks.experiments.tiny:cnn --input float32:3x8x8 --classes 10 --batch 2 --light quick"
SWAPPED = "--policies swap_all --rounds 1 --iterations 1"
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
    options = parse([*CNN.split(), "--rounds", "1", "--iterations", "1", "--device", TYPE])
    with Progress() as progress:
        report = MeasuredBench(options, progress).run()
    assert f"results may differ in their last bits: {REFUSAL}" in report.notes
    assert [row.error for row in report.rows] == [None]
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_peaks_and_retries_are_those_of_the_steps_that_count():
    """The device has 64 MiB left, of which 20 are in use and 30 cached when 40 are requested."""
    device = torch.device(DEVICE)
    torch.empty(100 * MIB, dtype=torch.uint8, device=device)
    release_cached_memory(device)
    reserved, allocated = torch.accelerator.memory_reserved(device), torch.accelerator.memory_allocated(device)
    watch = TurnWatch(device)
    fraction = module().get_per_process_memory_fraction(device)
    module().set_per_process_memory_fraction(
        (reserved + 64 * MIB) / torch.accelerator.get_memory_info(device)[1], device
    )
    try:
        watch.start()
        kept = [torch.empty(20 * MIB, dtype=torch.uint8, device=device)]
        torch.empty(30 * MIB, dtype=torch.uint8, device=device)
        kept.append(torch.empty(40 * MIB, dtype=torch.uint8, device=device))
        watch.stop()
    finally:
        module().set_per_process_memory_fraction(fraction, device)
    assert watch.allocator == AllocatorUse(reserved + 60 * MIB, allocated + 60 * MIB, retries=1)


def test_a_row_has_the_memory_of_its_contender_and_the_conditions_of_its_turns(monkeypatch):
    """The first contender, eager PyTorch, leaves 256 MiB to the allocator's cache, which does not follow its rules."""
    close = EagerStepper.close

    def leave_memory(stepper: EagerStepper) -> None:
        torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE)
        close(stepper)

    monkeypatch.setattr(EagerStepper, "close", leave_memory)
    profile = replace(A100_40GB, allocator=AllocatorRules(large_page_bytes=64 * MIB, is_followed=False))
    monkeypatch.setattr(devices, "measure", lambda device: profile)  # which takes seconds on the emulated device
    options = parse([*CNN.split(), *SWAPPED.split(), "--device", TYPE])
    with Progress() as progress:
        bench = MeasuredBench(options, progress)
        report = bench.run()
    row: Any = report.rows[0]
    assert bench.workload.early.trace.allocator == profile.allocator
    assert any("does not take memory as plans expect" in note for note in report.notes)
    assert row.error is None and row.allocator_retries == 0
    assert row.peak_bytes <= row.allocated_peak_bytes <= row.reserved_peak_bytes < 256 * MIB
    assert row.out_gbps > 0 and row.in_gbps > 0 and 0 <= row.overlap <= 1
    (turn,) = row.conditions
    if TYPE == "emulated":
        assert row.context_bytes == 256 * MIB  # what the emulated driver counts besides tensors
        assert turn.start == turn.end == backend_of(TYPE).conditions(torch.device(DEVICE)) and turn.device_load == 0
