"""Several jobs at once: real processes, each with a model of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pg_tensile import policies
from pg_tensile.bench.options import BenchOptions
from pg_tensile.bench.progress import Progress
from pg_tensile.bench.together import Jobs, run_together
from pg_tensile.cli import parse
from pg_tensile.errors import MeasurementError

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum(1)


def broken():
    raise ValueError("no such thing")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def job(model: str = "Net", kwargs: str = "{}", asked: str = "none") -> BenchOptions:
    step = ("--model", f"nets.py:{model}", "--kwargs", kwargs, "--input", "float32:128", "--batch", "256")
    return parse(["bench", *step, "--policies", asked, "--early-update", "--threads", "1", "--link", "2"])


def test_jobs_train_together_within_one_budget_and_get_the_same_weights(folder, monkeypatch):
    def fails(*_: Any) -> None:
        raise ValueError("no plan today")

    monkeypatch.setitem(policies.POLICIES, "fails", fails)
    asked = "none,joint:budget=75%,fails:budget=50%,swap_all,none"
    jobs = [job(asked=asked), job(kwargs='{"depth": 6}')]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 2, 3, Progress())
    none, joint, failed, all_out = rows
    assert none.eor == 1 and none.msr == 0
    assert none.peak_bytes == none.vanilla_peak_bytes and none.bytes_moved == 0 and none.error is None
    assert joint.error is None and joint.bit_identical and joint.bytes_moved + joint.eor > 0
    assert joint.device_peak_bytes <= joint.budget_bytes == int(0.75 * none.vanilla_peak_bytes)
    assert joint.msr >= 0.25 and len(joint.job_eors) == len(joint.step_ms) == 2
    assert sum(joint.step_ms) / sum(none.step_ms) == pytest.approx(joint.eor)
    assert failed.error == "ValueError: no plan today" and failed.peak_bytes is failed.eor is None
    assert all_out.bit_identical and all_out.bytes_moved > joint.bytes_moved
    assert all_out.link_gbps == 2.0 and all_out.jobs == ["nets.py:Net"] * 2


def test_a_plan_that_is_too_large_is_an_error(folder):
    jobs = [job(asked="swap_all:budget=1%")]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 1, 2, Progress())
    none, row = rows
    assert none.error is None and "more than the budget of" in row.error and row.bit_identical is None


def test_a_job_that_cannot_be_measured_is_named(folder):
    with Jobs([job(), job("broken")]) as processes, pytest.raises(MeasurementError, match=r"job 2 failed: .*no such"):
        processes.measure()


def test_a_process_that_dies_is_named_and_none_is_left(folder):
    with Jobs([job()]) as processes:
        (process,) = processes._processes
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(MeasurementError, match="the process of job 1 ended"):
            processes.measure()
    with Jobs([job(), job()]) as processes:
        started = list(processes._processes)
    assert not any(process.is_alive() for process in started)
