"""Predictions within a memory budget on an accelerator: the bits of the model in one piece, and the planned memory."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

from pg_tensile.errors import DeviceFaultError, ModelRefusedError
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice, make_deterministic
from pg_tensile.execution.training.prediction import Served
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.target import DEVICE, TYPE


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).eval()


@pytest.mark.parametrize("parts", [4, 2])
def test_a_part_of_the_parameters_is_enough(parts: int) -> None:
    make_deterministic(TYPE)
    rows = torch.randn(8, 1024)
    whole = network().to(DEVICE)
    with torch.no_grad():
        expected = {count: whole(rows[:count].to(DEVICE)).cpu() for count in (1, 8)}
    parameters = sum(parameter.nbytes for parameter in whole.parameters())
    del whole
    budget = parameters // parts
    accelerator = closing(AcceleratorDevice(DEVICE, A100_40GB, budget))
    with accelerator as device, closing(Served(network(), [rows], device, 8)) as served:
        for count in (1, 1, 8, 1):
            assert torch.equal(served.predict([rows[:count]]), expected[count])
            assert served.device_bytes <= budget and served.peak_bytes <= budget
        assert served.host_bytes >= parameters - budget


def test_too_small_a_budget_is_refused() -> None:
    with closing(AcceleratorDevice(DEVICE, A100_40GB, 1 << 20)) as device, pytest.raises(ModelRefusedError):
        Served(network(), [torch.zeros(1, 1024)], device)


@pytest.mark.long
@pytest.mark.skipif(TYPE != "emulated", reason="a fault of a GPU would end the tests' process")
def test_a_fault_that_the_result_shows_is_the_devices(control):
    """Kernels run when the host waits for the output."""
    row = torch.zeros(1, 1024)
    with closing(AcceleratorDevice(DEVICE, A100_40GB)) as device:
        served = Served(network(), [row], device)
        served.predict([row])
        control.schedule("late_compute")
        control.fail_kernel(1)
        for _ in range(2):
            with pytest.raises(DeviceFaultError, match="has failed"):
                served.predict([row])
