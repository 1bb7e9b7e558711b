"""Reports of latencies: what was measured beside a busy machine is measured again, up to a limit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pg_tensile.execution.runtime.measure import Measurement, Measurements
from pg_tensile.planning.latency.load import BUSY
from pg_tensile.planning.trace.trace import Trace
from pyworker.children import latency_reports
from pyworker.children.latency_reports import EARLY_INTERVAL_S, MEASURE_INTERVAL_S, MOST_EARLY, LatencyReports
from tests.unit.handmade import network

QUIET, LOADED = BUSY / 2, 2 * BUSY


class Job:
    """A job whose iteration is measured at each request: `us` by operator. Its clock and its load are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace = network(3).with_latencies(np.full(network(3).operator_count, 10.0))
        self.now, self.load, self.us = 1000.0, QUIET, 10.0
        self.sent: list[dict[str, Any]] = []
        self.averages: list[np.ndarray] = []
        self.measured_at: list[float] = []
        self._readings = iter(range(1, 1000))
        self._measurements = Measurements(self.trace)
        monkeypatch.setattr(latency_reports.time, "monotonic", lambda: self.now)
        channel = SimpleNamespace(spec={"latency_weight": 0.2}, send=self._send)
        self.reports = LatencyReports(channel, SimpleNamespace(read=lambda: self.load))  # type: ignore[arg-type]
        self.reports.begin(self, self.trace.latency_us, QUIET)  # type: ignore[arg-type]

    def _send(self, type: object, header: dict[str, Any], buffers: list[bytes]) -> None:
        self.sent.append(header)
        self.averages.append(np.frombuffer(buffers[2], "<f4"))

    def traces(self) -> dict[str, Trace]:
        return {"train": self.trace}

    def measurement(self) -> Measurement:
        return self._measurements.result()

    def measure(self) -> None:
        self.measured_at.append(self.now)
        reading = np.full(self.trace.operator_count, self.us) + next(self._readings) * 1e-6
        self._measurements.add_latencies(np.arange(self.trace.operator_count), reading)

    def pass_time(self, seconds: float) -> None:
        """Tick often enough to notice each period that ends; times are multiples of 1/64 s and therefore exact."""
        for _ in range(round(seconds * 64)):
            self.now += 1 / 64
            self.reports.tick()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(monkeypatch)
    job.reports.tick()
    yield job


def gaps(times: list[float]) -> list[float]:
    return np.diff(times).tolist()


def test_a_quiet_machine_is_measured_at_intervals(job: Job) -> None:
    job.pass_time(4)
    assert gaps(job.measured_at) == [MEASURE_INTERVAL_S] * 4
    assert [header["load"] for header in job.sent] == [QUIET] * 4
    assert [header["average_load"] for header in job.sent] == [QUIET] * 4


def test_what_was_measured_beside_others_is_measured_again(job: Job) -> None:
    job.us = 70.0
    job.pass_time(1)
    job.us, job.load = 10.0, LOADED
    job.pass_time(1)
    assert len(job.sent) == 1 and job.measured_at[-1] == job.now
    job.load = QUIET
    job.pass_time(EARLY_INTERVAL_S)
    assert len(job.sent) == 2 and job.sent[-1]["load"] == QUIET
    np.testing.assert_allclose(job.averages, 10.0, rtol=1e-3)


def test_a_lasting_load_counts_after_some_attempts(job: Job) -> None:
    job.load, job.us = LOADED, 70.0
    job.pass_time(1 + MOST_EARLY * EARLY_INTERVAL_S)
    assert gaps(job.measured_at) == [MEASURE_INTERVAL_S] + [EARLY_INTERVAL_S] * MOST_EARLY
    assert [header["load"] for header in job.sent] == [LOADED]
    assert QUIET < job.sent[0]["average_load"] <= LOADED
    job.pass_time(3)
    assert gaps(job.measured_at)[-3:] == [MEASURE_INTERVAL_S] * 3
    assert len(job.sent) == 4
    assert job.averages[-1].max() > 50


def test_attempts_are_counted_anew_once_the_machine_was_quiet(job: Job) -> None:
    job.load = LOADED
    job.pass_time(1 + MOST_EARLY * EARLY_INTERVAL_S)
    job.load = QUIET
    job.pass_time(1)
    job.load = LOADED
    job.pass_time(1 + EARLY_INTERVAL_S)
    assert gaps(job.measured_at)[-2:] == [MEASURE_INTERVAL_S, EARLY_INTERVAL_S]
    assert len(job.sent) == 2


def test_a_lasting_change_shows_with_its_second_report(job: Job) -> None:
    job.pass_time(5)
    job.us = 30.0
    job.pass_time(2)
    assert job.averages[-1].max() < 10.1
    job.pass_time(1)
    assert job.averages[-1].min() > 12


def test_twins_replace_their_prediction_with_the_first_report(job: Job) -> None:
    job.reports.begin(job, np.full(job.trace.operator_count, 1000.0), QUIET)  # type: ignore[arg-type]
    job.pass_time(1)
    of_layers = job.averages[0][job.trace.target.codes == job.trace.target.values.index("layer")]
    np.testing.assert_allclose(of_layers, 10.0, rtol=1e-3)
    np.testing.assert_allclose(job.averages[0][0], 505.0, rtol=1e-3)


def test_an_epoch_that_ends_reports_what_there_is_once(job: Job) -> None:
    job.reports.report()
    job.reports.report()
    assert [header["samples"] for header in job.sent] == [1]
    assert job.sent[0]["load"] is None
    job.reports.end()
    job.pass_time(2)
    job.reports.report()
    assert len(job.sent) == 1


def test_steps_beside_a_quiet_device_are_those_of_the_job_alone(job: Job) -> None:
    """One that others have kept busy changes nothing of it, however long."""
    for step_s in (0.25, 0.3, 7.0):
        job.reports.add_step(step_s)
    job.pass_time(1)
    assert job.sent[-1]["alone_us"] == 0.3e6
    job.load = LOADED
    job.pass_time(1)
    for _ in range(20):
        job.reports.add_step(2.0)
        job.pass_time(1)
    assert job.sent[-1]["load"] == LOADED and job.sent[-1]["alone_us"] == 0.3e6
    job.load = QUIET
    job.pass_time(1)
    job.reports.add_step(0.4)
    job.pass_time(1)
    assert 0.3e6 < job.sent[-1]["alone_us"] < 0.4e6


def test_a_job_that_was_never_alone_does_not_know(job: Job) -> None:
    job.load = LOADED
    for _ in range(10):
        job.reports.add_step(0.3)
        job.pass_time(1)
    assert job.sent and all(header["alone_us"] is None for header in job.sent)
