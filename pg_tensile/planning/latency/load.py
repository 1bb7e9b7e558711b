"""Load of a device by others: the share of it that other processes use, 0 … 1 (TENSILE, section IV-A).

On the host it is processor time from the kernel's counters without that of this process; time stolen by a hypervisor
counts as other processes' time. An accelerator's is read by a function of its backend.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BUSY = 0.1  # load from which what was measured is measured again
_BUSY = slice(0, 8)  # user, nice, system, idle, iowait, irq, softirq, steal; user already includes the guests' time
_IDLE = (3, 4)


class _Times(NamedTuple):
    """Processor times in seconds since an arbitrary point."""

    busy: float  # sum over the processors that this process may use
    own: float  # of this process
    total: float


class LoadMeter:
    """Meter of the load between two reads: of the host or, with `device_load`, what that returns."""

    def __init__(self, device_load: Callable[[], float] | None = None) -> None:
        self._device_load = device_load
        self._before = _processor_times()

    def read(self) -> float:
        """Return the load since the previous read, or since the meter was created.

        On the host that period should be at least some tenths of a second, because the kernel counts in hundredths; on
        a GPU it is the driver's last sampling period in any case.
        """
        if self._device_load is not None:
            return self._device_load()
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
