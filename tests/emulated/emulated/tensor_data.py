"""`tensor.data = other` and `module.to(device)` between the CPU and the emulated device, as with CUDA."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulated.emulated.native import native


def allow_data_of_other_devices() -> None:
    """Replace the property `torch.Tensor.data` by one that does it for the emulated device, too.

    `module.to(device)` asks whether it may, and keeps the module's parameters then, so that tied ones stay tied."""
    plain: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if tensor.device.type != data.device.type and "emulated" in (tensor.device.type, data.device.type):
            native.set_data(tensor, data)
        else:
            plain.__set__(tensor, data)

    # with PyTorch's names of the arguments, which TorchDynamo compares
    def may_have_data_of(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return {input.device.type, from_.device.type} == {"cpu", "emulated"} or compatible(input, from_)

    torch._has_compatible_shallow_copy_type = may_have_data_of
    torch.Tensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]
