"""Tests of the runtime on an accelerator; target.py says on which one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pg_tensile.execution.backends import backend_of
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.target import DEVICE, TYPE

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.accelerator import AcceleratorDevice

# Tests with the emulated device's schedules and counts; the kernels of codecs are CUDA's, and its times say something.
EMULATED = ["test_mutants.py", "test_schedules.py", "test_waits.py"]
CUDA = ["test_codecs.py", "test_times.py"]
collect_ignore = EMULATED if TYPE == "cuda" else CUDA


@pytest.fixture(scope="session", autouse=True)
def emulator() -> None:
    """Make the emulated device known to this process: pg_tensile imports it by the package's metadata."""
    if TYPE == "emulated":
        sys.path.append(str(Path(__file__).parents[1] / "emulated"))
        backend_of(TYPE)


@pytest.fixture(scope="module", autouse=True)
def garbage_collected() -> None:
    """Free memory of the device that an exception of another file's tests still holds, in a cycle of references."""
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def algorithms_restored() -> Iterator[None]:
    """Give the tests that follow in this process the algorithms that they had: a device makes them deterministic."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.fixture(scope="session")
def control(emulator: None) -> Any:
    """The emulated device's controls, imported only where a test runs: that registers the device with PyTorch."""
    from tests.emulated.emulated import control

    return control


@pytest.fixture(autouse=True)
def checked(emulator: None) -> Iterator[None]:
    """Fail a test in which work on the emulated device was not ordered; the device is as new for each."""
    if TYPE != "emulated":
        yield
        return
    from tests.emulated.emulated import control

    control.reset()
    with control.checked():
        yield
    control.reset()


@pytest.fixture
def device() -> Iterator[AcceleratorDevice]:
    from pg_tensile.execution.runtime.accelerator import AcceleratorDevice

    accelerator = AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)
    yield accelerator
    accelerator.close()
