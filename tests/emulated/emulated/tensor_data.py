"""`tensor.data = other` between the CPU and the emulated device, as PyTorch permits it for CUDA."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulated.emulated.native import native


def allow_data_of_other_devices() -> None:
    """Replace the property `torch.Tensor.data` by one that does it for the emulated device, too.

    Modules are told so: `module.to(device)` keeps its parameters then, and tied ones stay tied."""
    plain: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if tensor.device.type != data.device.type and "emulated" in (tensor.device.type, data.device.type):
            native.set_data(tensor, data)
        else:
            plain.__set__(tensor, data)

    def may_have_data_of(tensor: torch.Tensor, data: torch.Tensor) -> bool:
        types = {tensor.device.type, data.device.type}
        return types == {"cpu", "emulated"} or compatible(tensor, data)

    torch._has_compatible_shallow_copy_type = may_have_data_of
    torch.Tensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]
