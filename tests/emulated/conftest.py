"""The emulated device for the tests of the emulator: as new for each test.

The device is registered when the first of these tests runs, not when they are collected, so that the tests that a
worker has run before see PyTorch as it is without it. Afterwards `torch.accelerator.current_accelerator()` is
"emulated" for the rest of the process, and `pin_memory=True` pins for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def garbage_collected() -> None:
    """Free memory of the device that an exception of another file's tests still holds, in a cycle of references."""
    gc.collect()


@pytest.fixture(autouse=True)
def control() -> Iterator[ModuleType]:
    """`emulated.control`, reset before and after the test."""
    from tests.emulated.emulated import control

    torch.get_device_module("emulated").set_device(0)
    control.reset()
    yield control
    control.reset()
