"""The time that a run still takes: what counts as recent, and estimates beside what it then takes by its clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.training import agreement
from pg_tensile.execution.training import trainer as training
from pg_tensile.execution.training.course import Course
from pg_tensile.execution.training.observer import Progress
from pg_tensile.execution.training.run_steps import StepResult
from pg_tensile.execution.training.settings import EarlyStopping, Settings
from pg_tensile.execution.training.time_left import RECENT_S, Pace, Position, time_left
from tests.examples import examples
from tests.unit.execution.training.test_training import Recorder, trainer
from tests.unit.rows import Prepared, every_type

STEP_S, EVALUATION_S = 0.25, 0.15  # of a batch of 32 rows, and of one of 64, by the clock of these tests


# ---- the pace ----


def test_the_first_step_counts_only_until_there_is_another() -> None:
    pace = Pace()
    assert pace.step_s is None
    pace.add_step(30.0)
    assert pace.step_s == 30.0
    pace.add_step(0.5)
    assert pace.step_s == 0.5


@pytest.mark.parametrize("slow_s", [0.01, 2.0, 100.0])
def test_another_speed_shows_within_some_times_that_are_recent(slow_s: float) -> None:
    pace = Pace()
    for _ in range(1000):
        pace.add_step(0.01)
    for _ in range(1 + int(4 * RECENT_S / slow_s)):
        pace.add_step(slow_s)
    assert pace.step_s == pytest.approx(slow_s, rel=0.05)


def test_pauses_are_counted_in_steps_and_one_of_them_may_be_odd() -> None:
    pace = Pace()
    pace.add_pause(3.0)  # nothing to count it in
    assert pace.pause_steps is None
    pace.add_step(0.5)
    for seconds in (10.0, 1.0, 1.0):
        pace.add_pause(seconds)
    assert pace.pause_steps == 2.0
    pace.add_step(1.0)
    pace.add_step(1.0)
    pace.add_pause(2.0)
    assert pace.pause_steps == 2.0


@examples(50, long=400)
@given(
    st.integers(1, 100),
    st.none() | st.builds(EarlyStopping, st.integers(1, 30)),
    st.none() | st.floats(0.1, 1e4),
    st.lists(st.floats(0, 1), min_size=0, max_size=100),
    st.data(),
)
def test_what_is_left_shrinks_and_the_least_is_never_more_than_the_most(
    epochs: int, stopping: EarlyStopping | None, limit_s: float | None, losses: list[float], data: st.DataObject
) -> None:
    settings = Settings(epochs=epochs, batch_size=1, early_stopping=stopping, max_time_s=limit_s)
    course, pace = Course(settings, lambda: 0.0), Pace()
    pace.add_step(1.0)
    before = float("inf")
    for epoch, loss in enumerate(losses[:epochs]):
        if course.end(epoch) is not None:
            break
        rest = data.draw(st.integers(0, 7))
        for steps in (7, rest):
            left = time_left(pace, Position(epoch, steps, 7, 2.0), settings, course, None)
            assert left is not None and 0 <= left.least_s <= left.most_s <= before
            before = left.most_s
        course.epoch_ended(epoch + 1, loss, {}, dict)


# ---- a run ----


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.step_s = STEP_S


class Timed(Recorder):
    """An observer that knows when it heard of what."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(free=True)
        self._clock = clock
        self.heard: list[tuple[float, Progress]] = []

    def progress(self, progress: Progress) -> None:
        self.heard.append((self._clock.now, progress))


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return every_type(400).prepare()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (training, agreement):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def run(prepared: Prepared, clock: Clock, slower_from: float | None = None, **settings: Any) -> tuple[Any, Timed]:
    """Train with steps that take STEP_S by the clock; four times as long after `slower_from` seconds."""
    observer = Timed(clock)
    made, _ = trainer(prepared, observer, {"type": "mlp", "hidden": [8]}, **settings)
    train, evaluate = made._steps.train, made._steps.evaluate

    def slow_train(*arguments: Any) -> StepResult:
        slow = slower_from is not None and clock.now >= slower_from
        clock.now += STEP_S * (4 if slow else 1)
        return train(*arguments)

    def slow_evaluate(*arguments: Any) -> StepResult:
        clock.now += EVALUATION_S
        return evaluate(*arguments)

    made._steps.train = slow_train  # type: ignore[method-assign, assignment]
    made._steps.evaluate = slow_evaluate  # type: ignore[method-assign, assignment]
    return made.run(), observer


class Told(NamedTuple):
    """An estimate at a time of the clock: seconds at most and at least, and the phase of the run."""

    at: float
    most_s: float
    least_s: float
    phase: str


def after_first_epoch(observer: Timed) -> list[Told]:
    told = []
    for at, each in observer.heard:
        if each.epoch > 1 or each.phase == "refitting":
            assert each.time_left_s is not None and each.least_time_left_s is not None
            told.append(Told(at, each.time_left_s, each.least_time_left_s, each.phase))
    assert told
    return told


def test_nothing_is_known_before_the_first_step(prepared: Prepared, clock: Clock) -> None:
    _, observer = run(prepared, clock, epochs=2)
    first, second = (each for _, each in observer.heard[:2])
    assert first.time_left_s is None and first.step_s is None
    assert second.time_left_s is not None and second.step_s == STEP_S


def test_the_time_left_of_a_run_of_all_epochs_is_that_which_it_takes(prepared: Prepared, clock: Clock) -> None:
    outcome, observer = run(prepared, clock, epochs=6)
    assert outcome.reason == "epochs"
    for told in after_first_epoch(observer):
        if told.phase == "training":
            assert told.most_s == told.least_s == pytest.approx(clock.now - told.at)


def test_the_time_left_follows_the_speed(prepared: Prepared, clock: Clock) -> None:
    """Beside another job that comes when the run has taken 60 s, it knows better some seconds later."""
    _, observer = run(prepared, clock, slower_from=60.0, epochs=60)
    ratios = {at: most_s / (clock.now - at) for at, most_s, _, _ in after_first_epoch(observer) if at < clock.now - 30}
    assert all(ratio < 0.5 for at, ratio in ratios.items() if at < 60)
    assert all(0.85 < ratio < 1.15 for at, ratio in ratios.items() if at > 60 + 2 * RECENT_S)


@pytest.mark.parametrize("refit", [False, True])
def test_a_run_that_stops_early_takes_at_least_and_at_most_what_was_told(
    prepared: Prepared, clock: Clock, refit: bool
) -> None:
    """The training on all rows is part of it: its time is known exactly once it has begun."""
    stopping = EarlyStopping(2, min_delta=0.02)
    outcome, observer = run(prepared, clock, epochs=40, learning_rate=0.05, early_stopping=stopping, refit=refit)
    assert outcome.reason == "early_stopping" and (outcome.refitted_rows is not None) == refit
    refitting = []
    for at, most_s, least_s, phase in after_first_epoch(observer):
        assert least_s <= 1.05 * (clock.now - at) + 3 * EVALUATION_S
        assert most_s >= 0.95 * (clock.now - at)
        if phase == "refitting":
            refitting.append(at)
            assert most_s == least_s == pytest.approx(clock.now - at, abs=STEP_S)
    assert bool(refitting) == refit


def test_a_time_limit_is_the_most_that_is_left(prepared: Prepared, clock: Clock) -> None:
    outcome, observer = run(prepared, clock, epochs=1000, max_time_s=30.0)
    assert outcome.reason == "max_time"
    for at, most_s, least_s, _ in after_first_epoch(observer):
        assert most_s == least_s == pytest.approx(max(0.0, 30.0 - at))
