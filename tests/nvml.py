"""A stand-in for the module `pynvml`, NVIDIA's library of management, with one GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "00000000-0000-0000-0000-000000000001"


class NVMLError(Exception):
    """Error of the library, as pynvml has it."""


class StandInNvml:
    """Module with one GPU. `values` maps a function's name and its arguments after the handle to its result.

    A function whose result is not there raises `NVMLError`, as the driver's does for a value that it does not offer.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, values: dict[tuple[Any, ...], Any]) -> None:
        self.values = values
        self.opened = 0  # calls of nvmlInit less those of nvmlShutdown

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this the module that is imported as pynvml, and its GPU the one that PyTorch has."""
        monkeypatch.setitem(sys.modules, "pynvml", self)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise NVMLError(f"there is no GPU {uuid}")
        return uuid

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvmlDevice"):
            raise AttributeError(function)

        def call(handle: str, *arguments: Any) -> Any:
            assert self.opened and handle == f"GPU-{UUID}"
            try:
                return self.values[(function, *arguments)]
            except KeyError:
                raise NVMLError(f"{function} is not supported") from None

        return call
