"""Calibrating the host device with a tiny network, and the processes that keep it busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.execution.measuring.busy_processes import BusyProcesses
from pg_tensile.execution.measuring.operators import AGAIN, ROUNDS, Calibration
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import load, mlp
from pg_tensile.planning.latency.load import BUSY, LoadMeter

LIMIT_BYTES = 1 << 30


@cache
def captured(batch: int) -> Captured:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * 64, 10),
    )
    spec = StepSpec(F.cross_entropy, optimizer=OptimizerSpec("adamw", 1e-3))
    return capture(model, [torch.empty(batch, 3, 16, 16)], [torch.zeros(batch, dtype=torch.int64)], spec)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    host = HostDevice(RTX_A6000.with_link(1e9))
    yield host
    host.close()


def calls_of(*graphs: Captured) -> set[tuple[str, str]]:
    return {(op.target, op.signature) for graph in graphs for op in list(graph.trace.operators)[1:-1]}


def is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline, "a busy process outlives its parent"
        time.sleep(0.02)


# ---- measuring ----


@pytest.fixture
def quiet(monkeypatch) -> None:
    monkeypatch.setattr(LoadMeter, "read", lambda meter: 0.0)


@pytest.mark.long
def test_a_calibration_measures_every_call_and_its_models_predict_them(device, quiet):
    graphs = [captured(2), captured(4), captured(8)]
    calibration = Calibration(graphs, device, LIMIT_BYTES, loads=(0,))
    progress = list(calibration.run())
    assert [(step.done, step.total) for step in progress] == [(done, 3 * ROUNDS) for done in range(3 * ROUNDS + 1)]
    assert progress[-1].samples == len(calibration.samples)
    assert {(sample.target, sample.signature) for sample in calibration.samples} == calls_of(*graphs)
    assert all(np.isfinite(s.latency_us) and s.latency_us > 0 and 0 <= s.load <= 1 for s in calibration.samples)
    assert not calibration.skipped

    models = mlp.train(calibration.samples, device.profile)
    measured = {(s.target, s.signature): s.latency_us for s in calibration.samples}
    trace = captured(4).trace
    predicted = models.predict(trace, device.profile)[1:-1]
    real = np.array([measured[op.target, op.signature] for op in list(trace.operators)[1:-1]])
    assert np.median(np.abs(np.log(predicted / real))) < 0.7  # moments differ; the roofline is off by more


@pytest.mark.long
def test_what_does_not_fit_as_a_whole_is_measured_call_by_call(device):
    """A network is captured, and each of its calls measured."""
    graph = captured(8)
    sizes = graph.trace.tensor_bytes
    limit = int(sizes.sum()) // 2
    calibration = Calibration([graph], device, limit, loads=(0,))
    list(calibration.run())
    sampled = {(sample.target, sample.signature) for sample in calibration.samples}
    assert sampled == calls_of(graph)

    small = Calibration([graph], device, int(sizes.max()), loads=(0,))
    list(small.run())
    sampled = {(sample.target, sample.signature) for sample in small.samples}
    assert sampled
    assert sampled < calls_of(graph)
    assert "aten.native_batch_norm.default" in small.skipped


def loads_seen(monkeypatch, loads: list[float]) -> None:
    """Let each visit to a graph see one of these loads, the last one from then on; a meter is read twice a visit."""
    readings = iter(load for seen in loads for load in (0.0, seen))
    monkeypatch.setattr(LoadMeter, "read", lambda meter: next(readings, loads[-1]))


def visits_of(calibration: Calibration) -> int:
    return len(list(calibration.run())) - 1


def test_what_was_measured_beside_others_is_measured_again(device, monkeypatch):
    """All visits but those of the last round are disturbed, and so is the second graph's visit in it."""
    graphs = [captured(2), captured(4)]
    calibration = Calibration(graphs, device, LIMIT_BYTES, loads=(0,))
    monkeypatch.setattr(calibration._random, "sample", lambda graphs, count: list(graphs))
    loads_seen(monkeypatch, [*[0.6, 0.6] * (ROUNDS - 1), 0.02, 0.6, 0.03])
    assert visits_of(calibration) == 2 * ROUNDS + 1
    loads = {
        call: {s.load for s in calibration.samples if (s.target, s.signature) == call} for call in calls_of(*graphs)
    }
    assert {load for seen in loads.values() for load in seen} == {0.02, 0.03}


@pytest.mark.long
def test_a_load_that_lasts_ends_the_attempts(device, monkeypatch):
    """Every attempt is made."""
    calibration = Calibration([captured(2), captured(4)], device, LIMIT_BYTES, loads=(0,))
    loads_seen(monkeypatch, [2 * BUSY])
    assert visits_of(calibration) == 2 * (ROUNDS + AGAIN)
    assert {sample.load for sample in calibration.samples} == {2 * BUSY}


def test_the_time_limit_ends_it_and_what_was_measured_stays(device):
    calibration = Calibration([captured(2), captured(4)] * 20, device, LIMIT_BYTES, limit_s=1.5, loads=(0,))
    progress = list(calibration.run())
    assert 1 < len(progress) < 40 * ROUNDS
    assert progress[-1].done == progress[-1].total == 40 * ROUNDS
    assert calibration.samples


def test_a_calibration_changes_neither_random_numbers_nor_constants(device):
    state = torch.get_rng_state()
    list(Calibration([captured(2)], device, LIMIT_BYTES, loads=(0,)).run())
    assert (torch.get_rng_state() == state).all()


def test_there_is_nothing_to_calibrate_without_graphs(device):
    with pytest.raises(MeasurementError, match="nothing to calibrate"):
        Calibration([], device, LIMIT_BYTES)


# ---- load ----


def test_busy_processes_are_a_load_and_end_with_the_calibration(device, monkeypatch):
    started: list[int] = []
    popen = subprocess.Popen

    def noted(*arguments, **options):
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", noted)
    calibration = Calibration([captured(2), captured(4)], device, LIMIT_BYTES, loads=(1,))
    run = calibration.run()
    next(run)
    next(run)
    assert len(started) == 1
    assert is_alive(started[0])
    run.close()
    assert not is_alive(started[0])
    cores = len(os.sched_getaffinity(0))
    assert all(sample.load > 0.3 / cores for sample in calibration.samples)


def test_busy_processes_end_with_a_parent_that_is_killed():
    program = (
        "import time; from pg_tensile.execution.measuring.busy_processes import BusyProcesses\n"
        "with BusyProcesses(1, 'cpu') as busy:\n"
        "    print(busy._processes[0].pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        busy = int(parent.stdout.readline())
        assert is_alive(busy)
        parent.send_signal(signal.SIGKILL)
    wait_until_gone([busy])


def test_a_busy_process_that_cannot_start_is_an_error():
    with pytest.raises(MeasurementError, match="did not start"), BusyProcesses(1, "no such device"):
        pass


def test_own_work_is_no_load(monkeypatch):
    times = iter([load._Times(10.0, 2.0, 20.0), load._Times(15.0, 6.0, 30.0), load._Times(18.0, 9.0, 34.0)])
    monkeypatch.setattr(load, "_processor_times", lambda: next(times))
    meter = LoadMeter()
    assert [meter.read(), meter.read()] == [0.1, 0.0]


def test_a_device_that_cannot_be_asked_is_idle():
    assert LoadMeter(lambda: 0.25).read() == 0.25
