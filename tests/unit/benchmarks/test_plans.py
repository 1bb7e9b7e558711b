"""Checks of the rows of plans' sections, and their tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import planning_speed
from benchmarks.experiments import networks
from benchmarks.experiments.paper import PUBLISHED
from benchmarks.plans import busy, cold, core, finetuning, systems, tensile
from benchmarks.results import Results
from benchmarks.runner import Options, Run
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.workload import find_callable
from pg_tensile.tools.cli.bench import parse
from pg_tensile.tools.cli.main import main
from tests.unit.measured import results_with


@pytest.mark.parametrize("device", ["host", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("driver", [core, tensile, finetuning], ids=["core", "tensile", "finetuning"])
def test_the_scenarios_of_benchmarks_can_be_run(driver, device, quick):
    found = driver.scenarios(device, quick)
    assert len({scenario.name for scenario in found}) == len(found)
    for scenario in found:
        parsed = parse(["bench", *scenario.arguments])
        assert parsed.link_gbps is None or device == "host"
        assert find_callable(parsed.model) is not None


def test_the_other_systems_are_measured_by_functions_whose_rows_make_tables(tmp_path):
    found = systems.scenarios("host", quick=False)
    assert {scenario.section for scenario in found} == {system.section for system in systems.SYSTEMS}
    assert len({scenario.name for scenario in found}) == len(found)
    assert all(callable(scenario.work) for scenario in [*found, *systems.scenarios("host", quick=True)])
    row = {"case": "accuracy", "quick": False, "batch": 128, "learning_rate": 2e-3}
    row |= {"accuracy": 0.91, "base_accuracy": 0.99, "table": "batch"}
    results = results_with(tmp_path, row, scenario="batch: accuracy")
    assert "| 128 | 0.002 | 91.00% | 99.00% |" in systems.tables(results)
    assert [check.holds for check in systems.checks(results)] == [False]


def test_core_sees_what_does_not_hold():
    good: dict[str, Any] = {
        "policy": "none",
        "error": None,
        "bit_identical": True,
        "peak_bytes": 10,
        "predicted_peak_bytes": 10,
    }
    good |= {"device_peak_bytes": 100, "allocator_peak_bytes": 102, "step_ms_median": 300.0, "simulated_ms": 310.0}
    bad = ({"bit_identical": False}, {"peak_bytes": 11}, {"allocator_peak_bytes": 104}, {"simulated_ms": 340.0})
    assert all(check.holds for check in core.row_checks("fidelity", "x", good))
    for change in ({"error": "no"}, *bad):
        assert [check.holds for check in core.row_checks("fidelity", "x", good | change)].count(False) == 1
    assert core.overhead_check("x", {"vanilla_step_ms_median": 1.02, "eager_step_ms_median": 1.0}, 1.02).holds
    assert not core.overhead_check("x", {"vanilla_step_ms_median": 1.03, "eager_step_ms_median": 1.0}, 1.02).holds


def tensile_row(**values: Any) -> dict[str, Any]:
    """Return the row of one of the paper's networks."""
    row = Row("m", "joint", "host", 16, label="joint", budget="73%", latencies="measured", keywords={"lanes": 1})
    memory = {"vanilla_peak_bytes": 1000, "peak_bytes": 725, "device_peak_bytes": 730, "budget_bytes": 730}
    times = {"step_ms_median": 1149.0, "vanilla_step_ms_median": 1000.0, "bit_identical": True}
    more = {"first_step_ms": 1500.0, "vanilla_first_step_ms": 1200.0, "simulated_ms": 1149.0, "planning_ms": 80.0}
    moved = {"stall_ms": 1.0, "bytes_out": 10, "bytes_in": 10, "recomputes": 3}
    return json.loads(row.with_values(**memory, **times, **more, **moved, **values).to_json())


def test_tensile_sees_what_does_not_hold():
    def broken(**values: Any) -> int:
        return [check.holds for check in tensile.row_checks("VGG-16", tensile_row() | values)].count(False)

    assert [check.holds for check in tensile.row_checks("VGG-16", tensile_row())] == [True] * 5
    for change in (
        {"simulated_ms": 1300.0},
        {"simulated_ms": 1100.0},
        {"step_ms_median": 1151.0, "simulated_ms": 1151.0},
        {"device_peak_bytes": 731},
        {"peak_bytes": 731},
        {"error": "none found"},
    ):
        assert broken(**change) == 1
    other, slow = {"policy": "tensile", "label": "tensile"}, {"step_ms_median": 9000.0, "simulated_ms": 9000.0}
    assert broken(**other, **slow) == broken(**other, error="none found") == 0
    assert broken(**other, device_peak_bytes=731) == broken(**other, bit_identical=False) == 1
    assert broken(budget="50%", peak_bytes=500, **slow) == 0  # its EOR is only reported


def test_cold_sees_what_does_not_hold():
    good = tensile_row() | {"latencies": "models", "latency_error": 0.09}
    assert [check.holds for check in cold.row_checks("VGG-16", good)] == [True] * 3
    for change in ({"bit_identical": False}, {"first_step_ms": 1600.0}, {"latency_error": 0.11}, {"error": "no plan"}):
        assert [check.holds for check in cold.row_checks("VGG-16", good | change)].count(False) == 1
    assert [check.holds for check in cold.row_checks("VGG-16", good | {"latencies": "roofline"})] == [True]


def test_busy_sees_what_does_not_hold(tmp_path):
    good = tensile_row() | {"budget": "50%", "step_ms_median": 1090.0, "vanilla_step_ms_median": 1000.0}
    assert [check.holds for check in busy.row_checks("quiet", "GPT", good)] == [True] * 3
    for change in ({"bit_identical": False}, {"device_peak_bytes": 10**9}, {"step_ms_median": 1110.0}):
        assert [check.holds for check in busy.row_checks("quiet", "GPT", good | change)].count(False) == 1
    assert [check.holds for check in busy.row_checks("quiet", "GPT", good | {"error": "no plan"})] == [False]
    found = busy.scenarios("host", quick=False)
    assert len({scenario.name for scenario in found}) == 2 * len(busy.NETWORKS) == 6
    assert all(find_callable(parse(["bench", *scenario.arguments]).model) for scenario in found)
    results = results_with(tmp_path, good | {"table": "quiet"}, scenario="quiet: GPT")
    assert "| GPT | quiet | 50% |" in "\n".join(busy.tables(results))


def test_finetuning_sees_what_does_not_hold(tmp_path):
    good = tensile_row() | {"budget": "50%", "label": "joint"}
    assert [check.holds for check in finetuning.row_checks("MiniLM", good)] == [True, True]
    for change in ({"bit_identical": False}, {"device_peak_bytes": 10**9}, {"error": "no plan"}):
        assert [check.holds for check in finetuning.row_checks("MiniLM", good | change)].count(False) == 1
    small = {"budget": "35%", "error": "no plan"}  # it may be less than the weights
    assert list(finetuning.row_checks("MiniLM", good | small)) == []
    rows = [row | {"table": "fine-tuning"} for row in (good, good | small)]
    results = results_with(tmp_path, *rows, scenario="fine-tuning: MiniLM")
    text = "\n".join(finetuning.tables(results))
    assert "| MiniLM | 50% |" in text and "| MiniLM | 35% | no plan |" in text


@pytest.mark.long
def test_cold_plans_with_models_for_shapes_that_they_have_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(cold, "SECONDS", 2.0)
    monkeypatch.setattr(cold, "BATCHES", (2, 8))
    monkeypatch.setattr(cold, "chosen", lambda quick: (networks.SMALL_RESNET,))
    monkeypatch.setattr(cold, "models_path", lambda kind: tmp_path / f"{kind}.bin")
    threads = torch.get_num_threads()
    run = Run(Results(tmp_path / "cold.json"), "host", Options())
    (made,) = cold.calibrate(run)
    assert made["graphs"] == 2 and made["samples"] > 0
    (scenario,) = cold.scenarios("host", quick=True)
    json_path = tmp_path / "rows.json"
    assert main(["bench", *scenario.arguments, "--rounds", "1", "--json", str(json_path)]) == 0
    torch.set_num_threads(threads)
    none, models, roofline = map(json.loads, json_path.read_text().splitlines())
    assert none["latency_error"] is None and models["bit_identical"] and 0 < models["latency_error"] < 2
    assert models["latency_error"] != roofline["latency_error"] > 0
    rows = [row | {"table": "cold start"} for row in (none, models, roofline)]
    results = results_with(tmp_path, made | {"table": "planning"}, *rows, scenario=scenario.name)
    assert sum("ResNet-20" in line for line in cold.tables(results)) == 2


def test_every_goal_of_tensile_is_measured():
    for network in networks.PAPER:
        asked = tensile.scenario(tensile.SECTION, network)
        choices = parse(["bench", *asked.arguments]).policies
        joint = [tensile_row() | {"budget": str(each.budget), "latencies": each.latencies} for each in choices]
        found = [tensile.goal_of(network.title, row) for row in joint if row["budget"] != "None"]
        assert set(tensile.GOALS[network.title]) <= set(found)
        paper = PUBLISHED["table3", network.title, "tensile"]
        assert tensile.GOALS[network.title][0].percent == round(100 * (paper.msr or 0))
        assert all(each.early_update for each in choices if each.name == "joint")
        assert asked.seconds > 60


def test_tables_have_a_row_for_each_plan(tmp_path):
    papers = tensile_row() | {"policy": "tensile", "label": "tensile:lanes=1", "table": tensile.PAPERS}
    results = results_with(tmp_path, papers, papers | {"error": "too large"}, scenario="the paper's policy: VGG-16")
    rows = [tensile_row() | {"table": "memory"}, tensile_row() | {"policy": "none", "table": "memory"}]
    results.replace("memory: VGG-16", rows, results.runs[0])
    lines = tensile.joint_table(results) + tensile.tensile_table(results)
    assert [line for line in lines if "1.149 | ≤ 1.15 | 1.63" in line]
    assert sum("VGG-16" in line for line in lines) == 3 and [line for line in lines if "| too large |" in line]


@pytest.mark.parametrize("policy", ["joint", "tensile"])
def test_planning_is_measured_with_plans_that_save_half(policy):
    found = planning_speed.measure_policy(policy, 300, 2, 1)
    assert found.error is None and found.saved is not None and found.saved >= 0.5 and found.events > 0
    failed = planning_speed.measure_policy("no such policy", 100)
    checks = tensile.planning_checks([found._asdict(), failed._asdict()])
    assert [check.holds for check in checks] == [True, False]
