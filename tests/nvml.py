"""A stand-in for the module `pynvml`, NVIDIA's library of management, with one GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from ctypes import Structure, c_char_p, c_ulonglong
from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "00000000-0000-0000-0000-000000000001"
OF_VALUES = (
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)

Bytes = Callable[[], int | None]


class NVMLError(Exception):
    """Error of the library, as pynvml has it."""


class StandInNvml:
    """The functions of pynvml that the project calls.

    `processes`: bytes of each process, read anew by each call; None where NVML does not count them. `used_bytes` reads
    the device's memory in use. `utilisation`: percent of each process. `values`: results of OF_VALUES, by function and
    arguments after the handle; one that is not there raises `NVMLError`, as for a value that a driver does not offer.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(
        self,
        processes: dict[int, Bytes] | None = None,
        used_bytes: Callable[[], int] = lambda: 0,
        values: Mapping[tuple[Any, ...], Any] | None = None,
    ) -> None:
        self.processes = processes or {}
        self.used_bytes = used_bytes
        self.values = values or {}
        self.utilisation: dict[int, int] = {}
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
        assert self.opened > 0
        if uuid != f"GPU-{UUID}":
            raise NVMLError(f"there is no GPU {uuid}")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used()) for pid, used in self.processes.items()]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.used_bytes())

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=1) for pid, share in self.utilisation.items()]

    def __getattr__(self, function: str) -> Any:
        if function not in OF_VALUES:
            raise AttributeError(function)

        def call(handle: str, *arguments: Any) -> Any:
            assert self.opened and handle == f"GPU-{UUID}"
            try:
                return self.values[(function, *arguments)]
            except KeyError:
                raise NVMLError(f"{function} is not supported") from None

        return call


class SetLimits(Structure):
    """NVML's limits of a control group, to be set."""

    _fields_ = [("nameSpace", c_char_p), ("softLimit", c_ulonglong), ("hardLimit", c_ulonglong)]


class GetLimits(Structure):
    """NVML's limits of a control group."""

    _fields_ = [*SetLimits._fields_, ("currentUsed", c_ulonglong)]


class LimitingNvml(StandInNvml):
    """A stand-in for a driver that limits control groups; `refusal` is its error when they are to be set."""

    NVML_DEVICE_MEMORY_LIMIT_MAX = 0xFFFF_FFFF_FFFF_FFFF
    c_nvmlSetMemoryLimits_v1_t = SetLimits
    c_nvmlGetMemoryLimits_v1_t = GetLimits

    def __init__(self, refusal: str | None = None) -> None:
        super().__init__({})
        self.limits: dict[str, tuple[int, int]] = {}  # (soft, hard) by group
        self.refusal = refusal

    def nvmlDeviceGetMemoryLimits_v1(self, handle: str, limits: GetLimits) -> None:
        limits.softLimit, limits.hardLimit = self.limits.get(
            limits.nameSpace.decode(), (0, self.NVML_DEVICE_MEMORY_LIMIT_MAX)
        )

    def nvmlDeviceSetMemoryLimits_v1(self, handle: str, limits: SetLimits) -> None:
        if self.refusal is not None:
            raise NVMLError(self.refusal)
        self.limits[limits.nameSpace.decode()] = limits.softLimit, limits.hardLimit
