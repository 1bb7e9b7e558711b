"""Begin and end of automatic calibrations, by the machine's load, the clock, and the jobs that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyworker.supervisors import auto_calibration, machine_load
from pyworker.supervisors.auto_calibration import CHECK_S, NEVER, AutoCalibration
from pyworker.supervisors.machine_load import Load, MachineLoad

TIMES = {"idle_s": 30.0, "pause_s": 60.0, "device_seconds": 240, "most_s": 480.0, "most_load": 0.5}


class Controller:
    """A controller's server with one device to calibrate, whose clock and load are set by hand; it is its own plpy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.load = 1000.0, Load(0.0, 0.0)
        self.enabled = True
        self.jobs: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.lines: list[str] = []
        self._numbers = iter(range(1, 100))
        self.plpy = self
        monkeypatch.setattr(auto_calibration.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(MachineLoad, "read", lambda meter: self.load)
        self.calibration = AutoCalibration(self)  # type: ignore[arg-type]

    def rows(self, sql: str, types: object = (), *values: object) -> list[dict[str, Any]]:
        if "_uncalibrated" in sql:
            return [{"device": "cpu", "cause": "it has not been calibrated"}]
        if "_times" in sql:
            return [TIMES]
        if "pg_settings" in sql:
            return [{"value": ""}]
        return self.jobs if "ended_at IS NULL" in sql else [{"state": "cancelled", "error": None, "sqlstate": None}]

    def setting(self, name: str) -> str:
        return "on" if self.enabled else "off"

    def number(self, name: str) -> int:
        return 1

    def call(self, function: str, *values: Any) -> Any:
        if function.startswith("tensile_internal._calibrate"):
            self.jobs = [{"id": next(self._numbers), "automatic": True, "device": "cpu"}]
            return self.jobs[0]["id"]
        if function.startswith("tensile_internal._stop"):
            self.stopped.append(values[1])
        return 1  # a free slot

    def attempt(self, what: str, function: str, *values: Any) -> Any:
        return self.call(function, *values)

    def commit(self) -> None:
        pass

    def log(self, line: str) -> None:
        self.lines.append(line)

    def turn(self, seconds: float = 0.0) -> float:
        self.now += seconds
        return self.calibration.turn()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(monkeypatch)


def test_it_begins_after_half_a_minute_and_says_so_once(controller: Controller) -> None:
    assert controller.turn() == 30.0 and not controller.jobs
    assert controller.turn(30) == CHECK_S and controller.jobs
    (line,) = controller.lines
    assert '"cpu"' in line and "at most 8 minutes" in line and "pg_tensile.auto_calibrate = off prevents it" in line
    controller.jobs = []  # somebody has cancelled it
    assert controller.turn() > 0
    controller.turn(3600)
    assert controller.jobs and len(controller.lines) == 1


def test_a_busy_machine_puts_it_off(controller: Controller) -> None:
    """Whatever keeps it busy, at whatever priority: nothing of the server's runs then."""
    controller.load = Load(0.6, 0.0)
    for _ in range(10):
        assert controller.turn(30) == 30.0 and not controller.jobs
    controller.load = Load(0.4, 0.4)
    assert controller.turn(29) > 0 and not controller.jobs
    controller.turn(1)
    assert controller.jobs


def test_it_stops_when_others_need_the_machine(controller: Controller) -> None:
    """Its own processes have the lowest priority, and do not count."""
    controller.turn(30)
    controller.load = Load(1.0, 0.4)
    assert controller.turn(CHECK_S) == CHECK_S and not controller.stopped
    controller.load = Load(1.0, 0.7)
    assert controller.turn(CHECK_S / 2) == CHECK_S and not controller.stopped  # too short to say
    assert controller.turn(CHECK_S / 2) == NEVER
    assert controller.stopped == ["the machine is busy: 70%"]
    controller.jobs, controller.load = [], Load(0.0, 0.0)
    assert controller.turn() >= 60  # the pause after an interruption


def test_it_stops_at_the_end_of_its_time(controller: Controller) -> None:
    controller.turn(30)
    controller.turn(480)
    assert not controller.stopped
    controller.turn(CHECK_S)
    assert controller.stopped == ["it has taken longer than 480 seconds"]


def test_a_job_stops_it_at_once_and_so_does_the_setting(controller: Controller) -> None:
    controller.turn(30)
    controller.jobs.append({"id": 50, "automatic": False, "device": None})
    assert controller.turn() == NEVER and controller.stopped == ["job 50 was submitted"]
    controller.jobs.pop()
    controller.enabled = False
    assert controller.turn() == NEVER and controller.stopped[1:] == ["pg_tensile.auto_calibrate was switched off"]


def test_the_time_of_one_that_an_earlier_controller_has_begun_counts_from_now(controller: Controller) -> None:
    controller.jobs = [{"id": 7, "automatic": True, "device": "cpu"}]
    assert controller.turn() == CHECK_S
    controller.turn(CHECK_S)
    assert not controller.stopped
    controller.turn(480)
    assert len(controller.stopped) == 1


# ---- the load ----


def test_the_load_is_of_all_processors_and_tells_low_priorities_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    later = "cpu  130 90 20 1100 40 0 0 0 9 0\n"
    lines = iter(["cpu  100 50 10 1000 20 0 0 0 5 0\ncpu0 1 2 3", later, later])
    monkeypatch.setattr(Path, "read_text", lambda path: next(lines))
    meter = MachineLoad()
    assert meter.read() == (0.4, 0.2)
    assert meter.read() == (0.0, 0.0)  # no tick since


def test_where_the_kernel_does_not_tell_the_machine_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(machine_load.Path, "read_text", missing)
    assert MachineLoad().read() == (0.0, 0.0)


def test_the_load_of_this_machine_is_a_share() -> None:
    meter = MachineLoad()
    sum(range(10**6))
    load = meter.read()
    assert 0 <= load.urgent <= load.busy <= 1
