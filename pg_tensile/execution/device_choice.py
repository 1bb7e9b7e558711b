"""Choice of the device that a job trains on, by its name."""

from __future__ import annotations

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends import backend_of, module_of
from pg_tensile.planning.device_types import ACCELERATORS


def choose_device(name: str) -> torch.device:
    """Return the device named `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is the first CUDA device if CUDA works, else the CPU. Raises DeviceError if the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind = name.partition(":")[0]
    if kind in ACCELERATORS:
        backend_of(kind)  # which may be what makes it known to PyTorch
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f'"{name}" is not a device', hint="Use auto, cpu, cuda or cuda:N.") from None
    if device.type == "cpu":
        return device
    if kind not in ACCELERATORS:
        raise DeviceError(f'devices of type "{kind}" are not supported', hint="Use auto, cpu, cuda or cuda:N.")
    count = module_of(device).device_count()
    if (device.index or 0) >= count:
        hint = "Set pg_tensile.device to auto or cpu, or install a PyTorch built for CUDA and check nvidia-smi."
        raise DeviceError(f'the device "{name}" is not there: PyTorch sees {count} {device.type} devices', hint=hint)
    return torch.device(device.type, device.index or 0)
