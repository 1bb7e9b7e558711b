"""The memory that a process is expected to take on an accelerator, besides its tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_tensile.execution.backends import backend_of
from pg_tensile.planning.device.profile import A100_40GB, DeviceProfile
from pg_tensile.planning.plan.allocator import MARGIN_BYTES
from pyworker.children.overhead import UNMEASURED_BYTES, overhead_bytes
from tests.accelerator.target import DEVICE, TYPE


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
