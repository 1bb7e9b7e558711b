"""Schedule of a run's checkpoints, which bounds both the work that can be lost and the time spent on them.

A checkpoint is due `interval_s` seconds after the previous one was written, but not before PAUSE times the duration of
that write has passed: writing takes at most 1/(PAUSE + 1) of a run's time, whatever the size of the model and the speed
of the disk. So a run that fails loses at most the longer of the two pauses, the time of a write and a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PAUSE = 20  # multiple of the duration of a write: at most 4.8 % of the time is spent on writing


class CheckpointSchedule:
    """Schedule of one run; `clock` returns seconds. Interval 0: a checkpoint is due as soon as its cost allows."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._began = 0.0
        self._due_at = math.inf

    @property
    def due(self) -> bool:
        """True if a checkpoint should be made now; false while one is being written."""
        return self._clock() >= self._due_at

    def start(self) -> None:
        """Start the schedule: the first checkpoint is due after the interval, as its cost is not known yet."""
        self._due_at = self._clock() + self._interval_s

    def begin(self) -> None:
        """Note that making a checkpoint begins now."""
        self._began = self._clock()
        self._due_at = math.inf

    def written(self, at: float) -> None:
        """Note that the checkpoint begun last has been stored durably at the time `at`, on the same clock."""
        self._due_at = at + max(self._interval_s, PAUSE * (at - self._began))
