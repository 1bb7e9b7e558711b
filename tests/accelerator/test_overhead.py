"""The memory that a process is expected to take on an accelerator, besides its tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pg_tensile.execution.backends import backend_of
from pg_tensile.execution.backends.nvml import _taking, identified
from pg_tensile.planning.allocator_rules import MARGIN_BYTES
from pg_tensile.planning.device.profile import A100_40GB, DeviceProfile
from pyworker.children.overhead import UNMEASURED_BYTES, overhead_bytes
from tests.accelerator.target import DEVICE, TYPE, module


def with_process(nbytes: int) -> DeviceProfile:
    return replace(A100_40GB, process_bytes=nbytes)


@pytest.mark.parametrize("device", [DEVICE, TYPE, "cuda:0"])
def test_a_process_needs_room_for_code_that_is_loaded_after_the_device_was_measured(device):
    code = backend_of(device.partition(":")[0]).code_bytes
    assert overhead_bytes(device, with_process(700 << 20)) == (700 << 20) + code + MARGIN_BYTES
    assert overhead_bytes(device, with_process(0)) == UNMEASURED_BYTES + code + MARGIN_BYTES
    assert code > 0 or device != "cuda:0"


def test_a_process_on_the_cpu_needs_none():
    assert overhead_bytes("cpu", with_process(700 << 20)) == 0


def test_a_process_is_known_by_the_memory_that_it_takes():
    """By the allocator at hand: what it takes for a moment shows in the driver's count, and is given back."""
    device, own = torch.device(DEVICE), 4711
    backend = backend_of(TYPE)
    torch.empty(1, device=device)
    before = backend.process_bytes(device)
    if before is None:
        pytest.skip("the driver does not tell the memory of this process")
    others: dict[int, int | None] = {1: 500 << 20, 2: None}
    taking = partial(_taking, device)
    assert identified(lambda: {**others, own: backend.process_bytes(device)}, taking) == own
    assert (backend.process_bytes(device) or 0) <= before
    assert identified(lambda: others, taking) is None


def test_without_memory_for_it_a_process_stays_unknown():
    device = torch.device(DEVICE)
    torch.empty(1, device=device)
    torch.accelerator.empty_cache()
    fraction, (_, total) = module().get_per_process_memory_fraction(device), torch.accelerator.get_memory_info(device)
    module().set_per_process_memory_fraction((torch.accelerator.memory_reserved(device) + 1) / total, device)
    try:
        assert identified(lambda: {1: torch.accelerator.memory_reserved(device)}, partial(_taking, device)) is None
    finally:
        module().set_per_process_memory_fraction(fraction, device)
