"""Opening the runtime's device for a device of PyTorch."""

from __future__ import annotations

import torch

from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.device.profile import DeviceProfile


def open_device(
    device: torch.device, profile: DeviceProfile, budget_bytes: int | None = None, strict: bool = False
) -> Device:
    """Return the host device for the CPU, else an accelerator; see their classes. Raises DeviceError."""
    if device.type == "cpu":
        from pg_tensile.execution.runtime.host import HostDevice

        return HostDevice(profile, budget_bytes)
    from pg_tensile.execution.runtime.accelerator import AcceleratorDevice

    return AcceleratorDevice(device, profile, budget_bytes, strict)
