"""A stand-in for the module of NVML, whose processes and memory tests choose."""

from __future__ import annotations

from collections.abc import Callable
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
