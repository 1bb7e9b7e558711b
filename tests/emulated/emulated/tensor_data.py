"""`tensor.data = other` and `module.to(device)` between the CPU and the emulated device, as with CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

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


def keep_parameters_of_modules() -> None:
    """Let `module.to` the emulated device keep the module's parameters, as on CUDA, so that tied ones stay tied.

    It would make new ones, as PyTorch exchanges the data of parameters between devices of its own only."""
    plain = nn.Module.to
    future = torch.__future__

    @functools.wraps(plain)
    def to(module: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        before = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(before or "emulated" in f"{arguments}{options}")
        try:
            return plain(module, *arguments, **options)
        finally:
            future.set_swap_module_params_on_conversion(before)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
