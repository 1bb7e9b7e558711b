"""Load of the machine, by the kernel's counters of processor time. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Columns of /proc/stat: user (without nice), nice, system, idle, iowait, irq, softirq, steal
_ALL = slice(0, 8)
_NICE, _IDLE, _IOWAIT = 1, 3, 4


class Load(NamedTuple):
    """Shares of all processors' time, 0 to 1: `busy` by anybody, and `urgent`, which leaves out lowered priorities."""

    busy: float
    urgent: float


class MachineLoad:
    """Meter of the load between two reads."""

    def __init__(self) -> None:
        self._before = _ticks()

    def read(self) -> Load:
        """Return the load since the read before, or since the meter was made; 0 where the kernel does not tell."""
        now = _ticks()
        passed = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        total = sum(passed)
        if total <= 0:
            return Load(0.0, 0.0)
        busy = total - passed[_IDLE] - passed[_IOWAIT]
        return Load(max(0.0, busy / total), max(0.0, (busy - passed[_NICE]) / total))


def _ticks() -> list[int]:
    """Return the processor time since the machine has started, by column; zeros if it is not known."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return [0] * 8
    return [int(field) for field in line.split()[1:]][_ALL]
