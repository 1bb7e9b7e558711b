"""Time that a run still takes: the work that is left, counted in training steps, times what a step took recently.

All of a run's work is counted in steps, validation and whatever else lies between two epochs included, so that the
whole estimate follows the speed at once when other jobs come or go.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pg_tensile.execution.training.course import Course
    from pg_tensile.execution.training.refit import Refit
    from pg_tensile.execution.training.settings import Settings

RECENT_S = 15.0  # time constant of the mean duration of a step
PERIOD_S = 1.0
PAUSES = 5  # between epochs, of which the median counts; of two the shorter, because the first one also loads code
FORWARD = 1 / 3  # part of a training step that its forward pass takes: the backward pass computes two products for one


class TimeLeft(NamedTuple):
    """Seconds until a run ends: at most, if nothing stops it early, and at least, if nothing improves any more.

    Both are estimates; they are equal if nothing can stop the run early."""

    most_s: float
    least_s: float


class Period(NamedTuple):
    """A number of steps in a row, and the time that they took."""

    steps: int
    seconds: float


class Position(NamedTuple):
    """Position of a run in its first training, the one with validation.

    `epochs`: number of finished epochs; `rest_steps`: steps that are left of the present one; `epoch_steps`: those of
    a later one; `validation_steps`: duration of a validation in steps, as far as can be known before the first."""

    epochs: int
    rest_steps: int
    epoch_steps: int
    validation_steps: float


class Pace:
    """Duration of a run's steps recently, and of the pauses between its epochs.

    Steps of PERIOD_S together count by their mean, and periods by their length: quick steps are more numerous than slow
    ones, and would else count for longer, though they have passed as long ago."""

    def __init__(self) -> None:
        self._steps = 0
        self._period = Period(0, 0.0)  # the present one
        self._mean_s = self._weight = 0.0  # of the earlier ones; a weight below 1 while there are few
        self._pauses: deque[float] = deque(maxlen=PAUSES)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step recently; None before the first one."""
        mean_s, weight = self._with(self._period)
        return mean_s / weight if weight else None

    @property
    def pause_steps(self) -> float | None:
        """Duration of the pause between two epochs, in steps; None before the first one."""
        return median_low(self._pauses) if self._pauses else None

    def add_step(self, seconds: float) -> None:
        """Take note of a step. The first one, which also loads code, counts only until there is another."""
        if self._steps == 1:
            self._period, self._mean_s, self._weight = Period(0, 0.0), 0.0, 0.0
        self._steps += 1
        if seconds >= PERIOD_S:  # a period of its own
            self._end_period()
        self._period = Period(self._period.steps + 1, self._period.seconds + seconds)
        if self._period.seconds >= PERIOD_S:
            self._end_period()

    def add_pause(self, seconds: float) -> None:
        """Take note of the time between the last step of an epoch and the beginning of the next epoch."""
        if self.step_s:
            self._pauses.append(seconds / self.step_s)

    def _end_period(self) -> None:
        self._mean_s, self._weight = self._with(self._period)
        self._period = Period(0, 0.0)

    def _with(self, period: Period) -> tuple[float, float]:
        """Return mean and weight of the periods before and this one."""
        if not period.steps:
            return self._mean_s, self._weight
        kept = math.exp(-period.seconds / RECENT_S)
        return kept * self._mean_s + (1 - kept) * period.seconds / period.steps, kept * self._weight + 1 - kept


def time_left(
    pace: Pace, position: Position, settings: Settings, course: Course, refit: Refit | None
) -> TimeLeft | None:
    """Return the time until the run ends, or None before the first step; `refit`: its training on all rows."""
    if pace.step_s is None:
        return None
    evaluation = 0.0 if refit is None else FORWARD * refit.rows / refit.batch_size  # before and after that
    if refit is not None and refit.epoch is not None and course.kept is not None:
        most = least = (course.kept.epoch - refit.epoch) * refit.epoch_steps - refit.step + evaluation
    else:
        pause = position.validation_steps if pace.pause_steps is None else pace.pause_steps
        epoch = position.epochs + 1  # the present one

        def work(end: int, kept: int) -> float:
            first = position.rest_steps + pause + (end - epoch) * (position.epoch_steps + pause)
            return first if refit is None else first + kept * refit.epoch_steps + 2 * evaluation

        most = work(settings.epochs, settings.epochs)
        least = work(course.earliest_end(epoch), 1 if course.kept is None else course.kept.epoch)
    limit_s = math.inf if settings.max_time_s is None else max(0.0, settings.max_time_s - course.seconds)
    return TimeLeft(min(most * pace.step_s, limit_s), min(least * pace.step_s, limit_s))
