"""A stand-in for the module of NVML, whose processes and memory tests choose."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, c_char_p, c_ulonglong
from types import SimpleNamespace

Bytes = Callable[[], int | None]


class NVMLError(Exception):
    """Error of the stand-in."""


class StandInNvml:
    """The functions of pynvml that the project calls, for one device.

    `processes`: bytes of each process, read anew by each call; None where NVML does not count them. `used_bytes` reads
    the device's memory in use. `utilisation`: percent of each process."""

    NVMLError = NVMLError

    def __init__(self, processes: dict[int, Bytes], used_bytes: Callable[[], int] = lambda: 0) -> None:
        self.processes = processes
        self.used_bytes = used_bytes
        self.utilisation: dict[int, int] = {}
        self.initialised = 0

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.initialised > 0
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used()) for pid, used in self.processes.items()]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.used_bytes())

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=1) for pid, share in self.utilisation.items()]


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
