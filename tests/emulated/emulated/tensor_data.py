"""`tensor.data = other` between the CPU and the emulated device, as PyTorch permits it for CUDA."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulated.emulated.native import native


def allow_data_of_other_devices() -> None:
    """Replace the property `torch.Tensor.data` by one that does it for the emulated device, too."""
    plain: Any = torch._C.TensorBase.data

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if tensor.device.type != data.device.type and "emulated" in (tensor.device.type, data.device.type):
            native.set_data(tensor, data)
        else:
            plain.__set__(tensor, data)

    torch.Tensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]
