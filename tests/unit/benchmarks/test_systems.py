"""Checks of the rows of the benchmarks of three more systems and of the server."""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.checks import Timing, fidelity_checks, simulator_checks
from benchmarks.plans import cold, core, finetuning, gpu, methods, tensile
from benchmarks.server import db, jobs
from benchmarks.systems import inference, swapadvisor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.training.prediction import Served
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import roofline
from pg_tensile.tools.bench import report
from pg_tensile.tools.bench.row import Row
from tests.unit.executing import FAST
from tests.unit.measured import results_with


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).eval()


def test_the_balanced_link_is_the_references_and_not_the_hosts() -> None:
    host, example = replace(FAST, flops_per_s=1e11, bytes_per_s=2e10), torch.randn(4, 64)
    measured, balanced = inference.links(host, model(), example, step_us=5_000.0)
    with closing(HostDevice(host)) as device, closing(Served(model(), [example], device)) as served:
        reference_us = roofline.total_us(served.trace(), RTX_A6000)
        assert reference_us != pytest.approx(roofline.total_us(served.trace(), host))
    assert measured == ("measured", host, None)
    assert balanced[0] == "balanced" and balanced[2] == pytest.approx(reference_us)
    assert balanced[1].in_bytes_per_s * 5_000.0 == pytest.approx(RTX_A6000.in_bytes_per_s * reference_us)


def inference_row(**values: Any) -> dict[str, Any]:
    """Within an eighth of the parameters: 200 MB come in at 0.2 GB/s, and the model takes 0.1 s in one piece."""
    row = {
        "where": "library", "link": "balanced", "share": 0.12, "identical": True, "peak_bytes": 90, "budget_bytes": 100,
        "latency_ms": 1050.0, "whole_ms": 100.0, "link_ms": 1000.0, "reference_us": 800.0, "step_us": 100_000.0,
        "link_bytes_per_s": 200_000_000,
    }  # fmt: skip
    return row | values


@pytest.mark.parametrize(
    ("values", "broken"),
    [
        ({}, 0),
        ({"latency_ms": 1200.0}, 1),  # slower than the link explains
        ({"latency_ms": 110.0}, 1),  # as if there were no link
        ({"latency_ms": 110.0, "link_ms": 12.0, "link_bytes_per_s": 16_900_000_000}, 1),  # the host's own roofline
        ({"identical": False}, 1),
        ({"peak_bytes": 101}, 1),
    ],
)
def test_speed_of_inference_is_checked(values: dict[str, Any], broken: int) -> None:
    found = inference.checks([inference_row(**values)])
    assert len(found) == 4 and [check.holds for check in found].count(False) == broken


def test_simulated_times_of_ranked_plans_are_checked_one_by_one() -> None:
    times = {"simulated_ms": [1000.0, 961.0, 959.0, 1121.0], "measured_ms": [1000.0] * 4}
    row = {"case": "a", "policy": "ranking", "plans": 4, "in_rank": 4, "error": None, **times}
    found = [
        check for check in swapadvisor.checks([row]) if "ranked plan" in check.what and "simulated time" in check.what
    ]
    assert [check.holds for check in found] == [True, True, False, False]


def test_simulated_times_of_methods_are_checked_once_a_measurement() -> None:
    row = {
        "experiment": "savings", "case": "VGG-16", "policy": "none", "label": "none", "budget": None, "error": None,
        "step_ms_median": 1000.0, "simulated_ms": 1472.0, "latencies": "measured", "early_update": False,
    }  # fmt: skip
    peer = row | {"policy": "peer:checkpoint", "label": "peer:checkpoint"}
    small = row | {"experiment": "optimum", "case": "MLP"}
    found = methods.measurements([row, row | {"experiment": "table3"}, peer, small])
    assert list(found.values()) == [row | {"experiment": "table3"}]
    (check,) = fidelity_checks("fidelity", "VGG-16", 1472.0, 1000.0)
    assert not check.holds and check.found == "+47.20%"
    assert not list(fidelity_checks("fidelity", "short", 300.0, 150.0))


@pytest.mark.parametrize(
    ("simulated_ms", "holding"),
    [
        ([1000.0, 950.0, 1050.0, 880.0, 1120.0], [True, True]),
        ([1000.0, 1000.0, 1000.0, 879.0, 1000.0], [True, False]),
        ([1000.0, 1000.0, 1000.0, 1121.0, 1000.0], [True, False]),
        ([949.0, 949.0, 1051.0, 1000.0, 1000.0], [False, True]),
    ],
)
def test_simulated_times_of_a_benchmark_are_checked_together(simulated_ms: list[float], holding: list[bool]) -> None:
    """The median and the worst deviation count, of either sign; steps that are short or have no time do not."""
    long = [Timing(f"net {number}", ms, 1000.0) for number, ms in enumerate(simulated_ms)]
    others = [Timing("short", 199.0, 100.0), Timing("failed", 1000.0, None), Timing("peer", None, 1000.0)]
    median, worst = simulator_checks("fidelity", [*others, *long])
    assert [median.holds, worst.holds] == holding and median.what == "simulated time, 5 steps, median"
    if not worst.holds:
        assert worst.found == "12.1% off (net 3)"
    assert not list(simulator_checks("fidelity", others))
    assert len(list(simulator_checks("gpu", others, longer_ms=0.0))) == 2


@pytest.mark.parametrize("module", [cold, core, finetuning, gpu, tensile])
def test_every_benchmark_of_plans_checks_their_simulated_times(module: Any, tmp_path: Path) -> None:
    """A row of each benchmark, with a simulated time that is off."""
    section = getattr(module, "SECTION", {cold: "cold start", core: "fidelity"}.get(module))
    row: dict[str, Any] = dict.fromkeys(Row.__dataclass_fields__) | {
        "policy": "none", "label": "none", "latencies": "measured", "bit_identical": True,
        "step_ms_median": 1000.0, "simulated_ms": 1200.0,
        "device_peak_bytes": 1, "allocator_peak_bytes": 1, "peak_bytes": 1, "predicted_peak_bytes": 1,
    }  # fmt: skip
    results = results_with(tmp_path, row | {"table": section}, scenario=f"{section}: net")
    found = {check.what: check for check in module.checks(results)}
    worst = found["simulated time, 1 steps, worst"]
    assert not worst.holds and worst.found.startswith("20.0% off (net, none")


def test_goals_in_the_server_that_are_missed_are_seen(tmp_path: Path) -> None:
    rates = {"jobs": 1, "jobs_per_hour": 90, "scripts_per_hour": 100, "times_as_many": 0.9}
    row = {"jobs": "2 alike", "together": 1.2, "most_granted_bytes": 9, "budget_bytes": 8, "bit_identical": False}
    assert [check.holds for check in db.checks(results_with(tmp_path, rates))] == [False]
    assert [check.holds for check in db.checks(results_with(tmp_path, rates | {"times_as_many": 1.0}))] == [True]
    assert [check.holds for check in jobs.checks(results_with(tmp_path, row))] == [False] * 3
    good = row | {"together": 1.1, "most_granted_bytes": 8, "bit_identical": True}
    assert [check.holds for check in jobs.checks(results_with(tmp_path, good))] == [True] * 3


def test_results_and_pages_are_no_change_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a benchmark writes while it runs do not count as changes of its revision."""
    paths = [tmp_path / name for name in ("benchmarks/results/a.json", "docs/page.md", "benchmarks/a.py")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    first = report.revision()
    assert first is not None and len(first) == 12
    paths[0].write_text("2\n")
    paths[1].write_text("2\n")
    assert report.revision() == first
    paths[2].write_text("2\n")
    assert report.revision() == first + "+"
    monkeypatch.setattr(report, "ROOT", tmp_path.parent)
    assert report.revision() is None
