"""Changes of a device's load by others that are a reason to plan its jobs again (TENSILE, section IV-F).

Plans count with the load of the time when they were made. A change is clear if a job's load has differed by `CLEAR`
from the one that it was planned with, always in the same direction, for `LASTING` seconds: short peaks do not count,
and a load that goes to and fro around the planned one does not either. Planning itself loads the host, so the next
request for this reason follows at least `PAUSE` seconds after an answer, and `PART` times as long as that one took.
Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

CLEAR = 0.25  # change of the load (0 … 1); latency/current_load.py rounds loads to steps of 0.1
LASTING = 5.0  # seconds
PAUSE = 15.0  # seconds
PART = 10.0


@dataclass
class _Planned:
    """The loads that a device's plans were made with, and since when they differ."""

    loads: Mapping[int, float]  # by job
    next_at: float  # when they may be a reason again
    since: dict[int, tuple[bool, float]] = field(default_factory=dict)  # by job: whether it is larger, and since when


class LoadChanges:
    """Watch over the loads of all devices. `clock` returns seconds from an arbitrary point."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._planned: dict[str, _Planned] = {}

    def record(self, device: str, loads: Mapping[int, float], seconds: float) -> None:
        """Record that jobs were planned with these loads, which took the planner so many seconds."""
        self._planned[device] = _Planned(loads, self._clock() + max(PAUSE, PART * seconds))

    def forget(self, device: str) -> None:
        self._planned.pop(device, None)

    def clear_changes(self, device: str, loads: Mapping[int, float]) -> list[str]:
        """Describe the clear changes of the loads now, by job, in words; call it in each turn of the scheduler.

        Jobs that have no plan yet, or whose load is not known, do not count."""
        planned = self._planned.get(device)
        if planned is None:
            return []
        now = self._clock()
        words = []
        for job in sorted(planned.loads):
            before, load = planned.loads[job], loads.get(job)
            if load is None or abs(load - before) < CLEAR:
                planned.since.pop(job, None)
                continue
            larger, since = planned.since.get(job, (load > before, now))
            if larger != (load > before):
                since = now
            planned.since[job] = load > before, since
            if now - since >= LASTING:
                change = f"from {before:.0%} to {load:.0%}"
                words.append(f"the load of {device} by others than job {job} has changed {change}")
        return words if now >= planned.next_at else []
