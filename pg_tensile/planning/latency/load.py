"""Load of a device by others: the share of it that other processes use, 0 … 1 (TENSILE, section IV-A).

On the host it is processor time from the kernel's counters without that of this process; time stolen by a hypervisor
counts as other processes' time. On CUDA it is NVML's utilisation, which includes this process: read it while this
process computes nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_BUSY = slice(0, 8)  # user, nice, system, idle, iowait, irq, softirq, steal; user already includes the guests' time
_IDLE = (3, 4)


class _Times(NamedTuple):
    """Processor times in seconds since an arbitrary point."""

    busy: float  # sum over the processors that this process may use
    own: float  # of this process
    total: float


class LoadMeter:
    """Meter of the load between two reads.

    `kind` is "host" or "cuda"; a device that cannot be queried counts as idle.
    """

    def __init__(self, kind: str = "host", index: int = 0) -> None:
        self._kind, self._index = kind, index
        self._before = _processor_times()

    def read(self) -> float:
        """Return the load since the previous read, or since the meter was created.

        On the host that period should be at least some tenths of a second, because the kernel counts in hundredths; on
        CUDA it is NVML's last sampling period in any case.
        """
        if self._kind == "cuda":
            return _nvml_utilisation(self._index)
        before, self._before = self._before, _processor_times()
        total = self._before.total - before.total
        others_busy = (self._before.busy - before.busy) - (self._before.own - before.own)
        return min(1.0, max(0.0, others_busy / total)) if total > 0 else 0.0


def _processor_times() -> _Times:
    """Return the current processor times, all zero if there is no /proc/stat."""
    chosen = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return _Times(0.0, 0.0, 0.0)
    total = idle = 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in chosen:
            ticks = [int(field) for field in fields[_BUSY]]
            total += sum(ticks)
            idle += sum(ticks[column] for column in _IDLE)
    rate = os.sysconf("SC_CLK_TCK")
    return _Times((total - idle) / rate, time.process_time(), total / rate)


def _nvml_utilisation(index: int) -> float:
    try:
        import pynvml
    except ImportError:
        return 0.0
    try:
        pynvml.nvmlInit()
        try:
            return pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(index)).gpu / 100
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or a device without utilisation counters, such as a MIG instance
        return 0.0
