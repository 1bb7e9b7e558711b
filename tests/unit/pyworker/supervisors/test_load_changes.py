"""When a change of a device's load alone is a reason to plan, by a clock of the test."""

from __future__ import annotations

import pytest

from pyworker.supervisors.scheduling.load_changes import CLEAR, LASTING, PART, PAUSE, LoadChanges


class Device:
    """The device "cpu" with job 1, and a clock."""

    def __init__(self, load: float, seconds: float = 0.0) -> None:
        self.now = 1000.0
        self.changes = LoadChanges(lambda: self.now)
        self.changes.record("cpu", {1: load}, seconds)

    def turn(self, load: float | None, seconds: float = 1.0) -> bool:
        """Let time pass under a load; return whether that is a reason to plan."""
        self.now += seconds
        return bool(self.changes.clear_changes("cpu", {} if load is None else {1: load}))

    def turns(self, load: float, seconds: int) -> list[bool]:
        return [self.turn(load) for _ in range(seconds)]


def after_pause(load: float) -> Device:
    """A device whose plans were made long ago."""
    device = Device(load)
    assert not any(device.turns(load, int(PAUSE)))
    return device


@pytest.mark.parametrize(("before", "now"), [(0.1, 0.8), (0.8, 0.1)])
def test_a_lasting_change_is_a_reason_in_either_direction(before: float, now: float) -> None:
    device = after_pause(before)
    assert device.turns(now, int(LASTING) + 1) == [False] * int(LASTING) + [True]
    (reason,) = device.changes.clear_changes("cpu", {1: now})
    assert reason == f"the load of cpu by others than job 1 has changed from {before:.0%} to {now:.0%}"
    device.changes.record("cpu", {1: now}, 0.0)
    assert not any(device.turns(now, 100))  # once planned with it, it is no reason any more


def test_a_small_change_and_a_short_peak_are_no_reasons() -> None:
    device = after_pause(0.3)
    assert not any(device.turns(0.3 + 0.9 * CLEAR, 100))
    for _ in range(20):
        assert not any(device.turns(1.0, int(LASTING)))
        assert not device.turn(0.4)


def test_a_load_that_goes_to_and_fro_is_no_reason() -> None:
    device = after_pause(0.5)
    assert not any(any(device.turns(load, int(LASTING))) for _ in range(20) for load in (0.0, 1.0))


def test_the_next_round_follows_after_a_pause_that_grows_with_the_time_of_planning() -> None:
    assert Device(0.0).turns(1.0, 60).index(True) == int(PAUSE) - 1
    slow = Device(0.0, seconds=2 * PAUSE / PART)
    assert slow.turns(1.0, 60).index(True) == int(2 * PAUSE) - 1


def test_what_is_not_known_or_not_planned_is_no_reason() -> None:
    device = after_pause(0.0)
    assert not any(device.turn(None) for _ in range(100))
    for _ in range(2):
        device.now += 100
        assert device.changes.clear_changes("cpu", {2: 1.0}) == device.changes.clear_changes("other", {1: 1.0}) == []
    device.changes.forget("cpu")
    assert not any(device.turns(1.0, 100))
