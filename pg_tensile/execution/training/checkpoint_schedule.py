"""When a run makes its checkpoints: often enough that little is lost, and so rarely that they cost little.

A checkpoint is due `interval_s` seconds after the one before was written, but not before PAUSE times as long as that
one took has passed: writing takes no more than one part in PAUSE + 1 of a run's time, however large the model is and
however slow the disk. So a run that dies loses no more than the longer of the two pauses, the writing and a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PAUSE = 20  # times what writing took: at most 4.8 % of the time is spent on it


class CheckpointSchedule:
    """The schedule of one run; `clock` gives seconds. Interval 0: a checkpoint is due as soon as its cost allows."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._began = 0.0
        self._due_at = math.inf

    @property
    def due(self) -> bool:
        """A checkpoint should be made now; false while one is being written."""
        return self._clock() >= self._due_at

    def start(self) -> None:
        """The run begins: what a checkpoint will cost is not known yet."""
        self._due_at = self._clock() + self._interval_s

    def begin(self) -> None:
        """A checkpoint is being made from now on."""
        self._began = self._clock()
        self._due_at = math.inf

    def written(self, at: float) -> None:
        """The checkpoint that was begun last has been stored for good since `at`, on the same clock."""
        self._due_at = at + max(self._interval_s, PAUSE * (at - self._began))
