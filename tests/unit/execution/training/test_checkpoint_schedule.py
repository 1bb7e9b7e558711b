"""When checkpoints are made: on a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.training.checkpoint_schedule import PAUSE, CheckpointSchedule


class Clock:
    """Seconds, as the test has it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started(interval_s: float) -> tuple[CheckpointSchedule, Clock]:
    clock = Clock()
    schedule = CheckpointSchedule(interval_s, clock)
    schedule.start()
    return schedule, clock


def pause_after(schedule: CheckpointSchedule, clock: Clock, cost_s: float) -> float:
    """Seconds from the end of a checkpoint that takes `cost_s` to when the next one is due, to a tenth."""
    schedule.begin()
    clock.now += cost_s
    schedule.written(clock.now)
    ended = clock.now
    while not schedule.due:
        clock.now = round(clock.now + 0.1, 6)
    return clock.now - ended


def test_none_is_due_before_the_run_has_started() -> None:
    assert not CheckpointSchedule(0).due


def test_the_first_one_is_due_after_the_interval() -> None:
    schedule, clock = started(60)
    clock.now += 59.9
    assert not schedule.due
    clock.now += 0.1
    assert schedule.due


@pytest.mark.parametrize(
    ("interval_s", "cost_s", "pause_s"),
    [(60, 1, 60), (60, 3, 60), (60, 5, 5 * PAUSE), (0.1, 2, 2 * PAUSE), (0, 2, 2 * PAUSE), (10, 0, 10)],
)
def test_the_longer_of_interval_and_cost_counts(interval_s: float, cost_s: float, pause_s: float) -> None:
    schedule, clock = started(interval_s)
    assert pause_after(schedule, clock, cost_s) == pytest.approx(pause_s, abs=0.11)


def test_a_cost_counts_for_the_next_pause_only() -> None:
    schedule, clock = started(10)
    assert pause_after(schedule, clock, 8) == pytest.approx(8 * PAUSE, abs=0.11)
    assert pause_after(schedule, clock, 0.1) == pytest.approx(10, abs=0.11)


def test_none_is_due_while_one_is_being_written() -> None:
    schedule, clock = started(1)
    schedule.begin()
    clock.now += 1e6
    assert not schedule.due


def test_the_pause_begins_when_it_was_written_not_when_the_run_heard_of_it() -> None:
    """A step may take longer than the checkpoint."""
    schedule, clock = started(0)
    schedule.begin()
    clock.now += 1
    stored = clock.now
    clock.now += 15
    schedule.written(stored)
    clock.now = stored + PAUSE - 0.01
    assert not schedule.due
    clock.now = stored + PAUSE
    assert schedule.due


@given(
    st.floats(0, 100),
    st.floats(0.001, 60),
    st.lists(st.floats(0.001, 30), min_size=1, max_size=20),
)
def test_writing_takes_a_twentieth_at_most_and_little_is_lost(
    interval_s: float, step_s: float, costs: list[float]
) -> None:
    """A run of steps that saves whenever that is due, killed at any time."""
    schedule, clock = started(interval_s)
    written = saved = clock.now
    most = 0.0  # that a kill could have cost since the checkpoint before
    for number, cost_s in enumerate(costs):
        if not schedule.due:
            waits = schedule._due_at - clock.now
            clock.now += step_s * -(-waits // step_s)
        most = clock.now + cost_s - saved
        allowed = interval_s + step_s if not number else max(interval_s, PAUSE * costs[number - 1]) + step_s
        before = 0.0 if not number else costs[number - 1]
        assert most <= allowed + before + cost_s + 1e-6
        if number:
            assert costs[number - 1] <= 0.05 * (clock.now - written + costs[number - 1]) + 1e-9
        saved = clock.now
        schedule.begin()
        clock.now += cost_s
        written = clock.now
        schedule.written(clock.now)
