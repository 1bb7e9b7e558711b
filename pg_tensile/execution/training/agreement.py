"""Agreement of the ranks of a run, after every step: its loss, whether to stop or to save, and the time.

Whatever decides how a run continues has to be the same on all ranks, or one waits for the others in a collective that
they never reach. So each rank tells the others what it has seen, in one small exchange, and all act on the same sums. A
single rank has nobody to ask: its observer is polled where the run says so, and its clock is the machine's.
"""

from __future__ import annotations

import time

from pg_tensile.execution.distributed.group import Group
from pg_tensile.execution.training.checkpoint_schedule import CheckpointSchedule
from pg_tensile.execution.training.observer import Observer, StopTraining


class Agreement:
    """What the ranks of `group` have agreed on last."""

    def __init__(self, group: Group, observer: Observer, schedule: CheckpointSchedule) -> None:
        self._group = group
        self._observer = observer
        self._schedule = schedule
        self._stop: StopTraining | None = None  # what this rank's observer has asked for
        self._agreed_stop: StopTraining | None = None
        self._agreed_due = False
        self._now = 0.0

    def exchange(self, loss: float = 0.0, share: float = 1.0) -> float:
        """Ask all ranks, and return the sum of their losses, each times its `share` of the rows."""
        if self._group.size == 1:
            return loss
        self.hear()
        mine = (
            loss * share,
            self._stop is not None,
            self._stop is not None and not self._stop.checkpoint,
            self._schedule.due,
            time.monotonic() if self._group.rank == 0 else 0.0,
        )
        total, stops, unsaved, due, self._now = self._group.summed([float(number) for number in mine])
        self._agreed_stop = StopTraining(checkpoint=unsaved == 0) if stops else None
        self._agreed_due = due == self._group.size  # the slowest writer of checkpoints decides
        return total

    def hear(self) -> None:
        """Poll the observer. A request to stop takes effect at once for a single rank, else at the next exchange."""
        try:
            self._observer.poll()
        except StopTraining as stop:
            if self._group.size == 1:
                raise
            self._stop = stop

    def poll(self) -> None:
        """Raise StopTraining if the run is to stop: on all ranks at the same step."""
        if self._group.size == 1:
            self._observer.poll()
        elif self._agreed_stop is not None:
            raise self._agreed_stop

    @property
    def due(self) -> bool:
        """True if a checkpoint should be made now."""
        return self._schedule.due if self._group.size == 1 else self._agreed_due

    def clock(self) -> float:
        """Return the time in seconds: for several ranks that of rank 0 at the last exchange."""
        return time.monotonic() if self._group.size == 1 else self._now
