"""Checks of benchmarks' rows, and continuation of a stopped run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import (
    bench_busy,
    bench_cold,
    bench_core,
    bench_finetuning,
    bench_planning,
    bench_systems,
    bench_tensile,
    scenarios,
)
from benchmarks.experiments import networks
from benchmarks.experiments.paper import PUBLISHED
from pg_tensile.tools.bench.report import Row
from pg_tensile.tools.bench.workload import find_callable
from pg_tensile.tools.cli.bench import parse
from pg_tensile.tools.cli.main import main


@pytest.mark.parametrize("device", ["host", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("driver", [bench_core, bench_tensile, bench_finetuning], ids=["core", "tensile", "finetuning"])
def test_the_scenarios_of_benchmarks_can_be_run(driver, device, quick):
    found = driver.BENCHMARK.scenarios(device, quick)
    assert len({scenario.name for scenario in found}) == len(found)
    for scenario in found:
        parsed = parse(["bench", *scenario.arguments])
        assert parsed.link_gbps is None or device == "host"
        assert find_callable(parsed.model) is not None
    begin, end = scenarios.marks(driver.BENCHMARK.name, device)
    page = scenarios.DOCUMENT.read_text()
    assert 0 < page.index(begin) < page.index(end)


def test_the_other_systems_are_measured_by_programs_whose_rows_make_tables(tmp_path):
    found = bench_systems.scenarios("host", quick=False)
    assert {scenario.section for scenario in found} == {system.section for system in bench_systems.SYSTEMS}
    assert len({scenario.name for scenario in found}) == len(found)
    (quick,) = [each for each in bench_systems.scenarios("host", quick=True) if each.section == "batch"]
    assert quick.program == "benchmarks.systems.batch" and quick.arguments == ("--quick",)
    begin, end = scenarios.marks("systems", "host")
    assert 0 < scenarios.DOCUMENT.read_text().index(begin) < scenarios.DOCUMENT.read_text().index(end)
    results = scenarios.Results(tmp_path / "systems-host.json", "host", fresh=False)
    row = {
        "case": "accuracy",
        "quick": False,
        "batch": 128,
        "learning_rate": 2e-3,
        "accuracy": 0.91,
        "base_accuracy": 0.99,
    }
    results.scenarios["batch: accuracy"] = {"arguments": [], "seconds": 1.0, "rows": [row]}
    assert "| 128 | 0.002 | 91.00% | 99.00% |" in bench_systems.tables(results)
    assert [check.holds for check in bench_systems.checks(results)] == [False]
    first = results.data["versions"]["revision"]
    assert scenarios.revisions(results) == [first]
    results.scenarios["batch: choice"] = {"arguments": [], "seconds": 1.0, "revision": "0", "rows": []}
    assert scenarios.revisions(results) == sorted(["0", first])


def test_a_program_that_fails_is_a_row_with_its_error():
    scenario = scenarios.Scenario("a", "b", ("-c",), program="json.tool")
    failed = scenarios.run_scenario(scenario, "host")
    assert failed["rows"] == [] and "error" in failed


def test_bench_core_sees_what_does_not_hold():
    good: dict[str, Any] = {
        "policy": "none",
        "error": None,
        "bit_identical": True,
        "peak_bytes": 10,
        "predicted_peak_bytes": 10,
    }
    good |= {"device_peak_bytes": 100, "allocator_peak_bytes": 102, "step_ms_median": 300.0, "simulated_ms": 310.0}
    bad = ({"bit_identical": False}, {"peak_bytes": 11}, {"allocator_peak_bytes": 104}, {"simulated_ms": 340.0})
    assert all(check.holds for check in bench_core.row_checks("fidelity", "x", good))
    for change in ({"error": "no"}, *bad):
        assert [check.holds for check in bench_core.row_checks("fidelity", "x", good | change)].count(False) == 1
    assert bench_core.overhead_check("x", {"vanilla_step_ms_median": 1.02, "eager_step_ms_median": 1.0}, 1.02).holds
    assert not bench_core.overhead_check("x", {"vanilla_step_ms_median": 1.03, "eager_step_ms_median": 1.0}, 1.02).holds


def tensile_row(**values: Any) -> dict[str, Any]:
    """Return the row of one of the paper's networks, as bench-tensile reads it."""
    row = Row("m", "joint", "host", 16, label="joint", budget="73%", latencies="measured", keywords={"lanes": 1})
    memory = {"vanilla_peak_bytes": 1000, "peak_bytes": 725, "device_peak_bytes": 730, "budget_bytes": 730}
    times = {"step_ms_median": 1149.0, "vanilla_step_ms_median": 1000.0, "bit_identical": True}
    more = {"first_step_ms": 1500.0, "vanilla_first_step_ms": 1200.0, "simulated_ms": 1149.0, "planning_ms": 80.0}
    moved = {"stall_ms": 1.0, "bytes_out": 10, "bytes_in": 10, "recomputes": 3}
    return json.loads(row.with_values(**memory, **times, **more, **moved, **values).to_json())


def test_bench_tensile_sees_what_does_not_hold():
    def broken(**values: Any) -> int:
        return [check.holds for check in bench_tensile.row_checks("VGG-16", tensile_row() | values)].count(False)

    assert [check.holds for check in bench_tensile.row_checks("VGG-16", tensile_row())] == [True] * 5
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


def test_bench_cold_sees_what_does_not_hold():
    good = tensile_row() | {"latencies": "models", "latency_error": 0.09}
    assert [check.holds for check in bench_cold.row_checks("VGG-16", good)] == [True] * 3
    for change in ({"bit_identical": False}, {"first_step_ms": 1600.0}, {"latency_error": 0.11}, {"error": "no plan"}):
        assert [check.holds for check in bench_cold.row_checks("VGG-16", good | change)].count(False) == 1
    assert [check.holds for check in bench_cold.row_checks("VGG-16", good | {"latencies": "roofline"})] == [True]


def test_bench_busy_sees_what_does_not_hold(tmp_path):
    good = tensile_row() | {"budget": "50%", "step_ms_median": 1090.0, "vanilla_step_ms_median": 1000.0}
    assert [check.holds for check in bench_busy.row_checks("quiet", "GPT", good)] == [True] * 3
    for change in ({"bit_identical": False}, {"device_peak_bytes": 10**9}, {"step_ms_median": 1110.0}):
        assert [check.holds for check in bench_busy.row_checks("quiet", "GPT", good | change)].count(False) == 1
    assert [check.holds for check in bench_busy.row_checks("quiet", "GPT", good | {"error": "no plan"})] == [False]
    found = bench_busy.scenarios("host", quick=False)
    assert len({scenario.name for scenario in found}) == 2 * len(bench_busy.NETWORKS) == 6
    assert all(find_callable(parse(["bench", *scenario.arguments]).model) for scenario in found)
    results = scenarios.Results(tmp_path / "busy-host.json", "host", fresh=False)
    results.scenarios["quiet: GPT"] = {"arguments": [], "seconds": 1.0, "rows": [good]}
    assert "| GPT | quiet | 50% |" in "\n".join(bench_busy.tables(results))


def test_bench_finetuning_sees_what_does_not_hold(tmp_path):
    good = tensile_row() | {"budget": "50%", "label": "joint"}
    assert [check.holds for check in bench_finetuning.row_checks("MiniLM", good)] == [True, True]
    for change in ({"bit_identical": False}, {"device_peak_bytes": 10**9}, {"error": "no plan"}):
        assert [check.holds for check in bench_finetuning.row_checks("MiniLM", good | change)].count(False) == 1
    small = {"budget": "35%", "error": "no plan"}  # it may be less than the weights
    assert list(bench_finetuning.row_checks("MiniLM", good | small)) == []
    results = scenarios.Results(tmp_path / "finetuning-host.json", "host", fresh=False)
    results.scenarios["fine-tuning: MiniLM"] = {"arguments": [], "seconds": 1.0, "rows": [good, good | small]}
    text = "\n".join(bench_finetuning.tables(results))
    assert "| MiniLM | 50% |" in text and "| MiniLM | 35% | no plan |" in text


@pytest.mark.long
def test_bench_cold_plans_with_models_for_shapes_that_they_have_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_cold, "SECONDS", 2.0)
    monkeypatch.setattr(bench_cold, "BATCHES", (2, 8))
    monkeypatch.setattr(bench_cold, "chosen", lambda quick: (networks.SMALL_RESNET,))
    monkeypatch.setattr(bench_cold, "models_path", lambda kind: tmp_path / f"{kind}.bin")
    threads = torch.get_num_threads()
    (made,) = bench_cold.calibrate("host", quick=False)
    assert made["graphs"] == 2 and made["samples"] > 0
    (scenario,) = bench_cold.scenarios("host", quick=True)
    json_path = tmp_path / "rows.json"
    assert main(["bench", *scenario.arguments, "--rounds", "1", "--json", str(json_path)]) == 0
    torch.set_num_threads(threads)
    none, models, roofline = map(json.loads, json_path.read_text().splitlines())
    assert none["latency_error"] is None and models["bit_identical"] and 0 < models["latency_error"] < 2
    assert models["latency_error"] != roofline["latency_error"] > 0
    results = scenarios.Results(tmp_path / "cold-host.json", "host", fresh=False)
    results.data["planning"] = [made]
    results.scenarios[scenario.name] = {"arguments": [], "seconds": 1.0, "rows": [none, models, roofline]}
    assert sum("ResNet-20" in line for line in bench_cold.tables(results)) == 2


def test_every_goal_of_bench_tensile_is_measured():
    for network in networks.PAPER:
        asked = bench_tensile.scenario(bench_tensile.SECTION, network)
        choices = parse(["bench", *asked.arguments]).policies
        joint = [tensile_row() | {"budget": str(each.budget), "latencies": each.latencies} for each in choices]
        found = [bench_tensile.goal_of(network.title, row) for row in joint if row["budget"] != "None"]
        assert set(bench_tensile.GOALS[network.title]) <= set(found)
        paper = PUBLISHED["table3", network.title, "tensile"]
        assert bench_tensile.GOALS[network.title][0].percent == round(100 * (paper.msr or 0))
        assert all(each.early_update for each in choices if each.name == "joint")
        assert asked.seconds > 60


def test_a_benchmark_goes_on_where_it_was_and_writes_tables(tmp_path, monkeypatch):
    path = tmp_path / "tensile-host.json"
    results = scenarios.Results(path, "host", fresh=False)
    tensile = tensile_row() | {"policy": "tensile", "label": "tensile:lanes=1"}
    rows = [tensile_row(), tensile_row() | {"policy": "none"}]
    papers = [tensile, tensile | {"error": "too large"}]
    results.scenarios["memory: VGG-16"] = {"arguments": [], "seconds": 1.0, "rows": rows}
    results.scenarios["the paper's policy: VGG-16"] = {"arguments": [], "seconds": 1.0, "rows": papers}
    results.save()
    assert scenarios.Results(path, "host", fresh=False).rows("memory") == [("VGG-16", row) for row in rows]
    assert not scenarios.Results(path, "host", fresh=True).scenarios
    lines = bench_tensile.joint_table(results) + bench_tensile.tensile_table(results)
    assert [line for line in lines if "1.149 | ≤ 1.15 | 1.63" in line]
    assert sum("VGG-16" in line for line in lines) == 3 and [line for line in lines if "| too large |" in line]
    monkeypatch.setattr(scenarios, "code_fingerprint", lambda: "other")
    assert not scenarios.Results(path, "host", fresh=False).scenarios
    assert scenarios.Results(path, "host", fresh=False, keep=True).rows("memory") == [("VGG-16", row) for row in rows]


def test_a_benchmark_tells_how_long_it_takes():
    two = [scenarios.Scenario("a", name, (), 300.0) for name in "bc"]
    assert scenarios.time_left(two, []) == ", about 10 min left"
    assert scenarios.time_left(two[1:], [(600.0, 300.0)]) == ", about 10 min left"
    assert scenarios.time_left([], [(600.0, 300.0)]) == scenarios.time_left([two[0]._replace(seconds=0.0)], []) == ""


@pytest.mark.parametrize("policy", ["joint", "tensile"])
def test_planning_is_measured_with_plans_that_save_half(policy):
    found = bench_planning.measure_policy(policy, 300, 2, 1)
    assert found.error is None and found.saved is not None and found.saved >= 0.5 and found.events > 0
    failed = bench_planning.measure_policy("no such policy", 100)
    checks = bench_tensile.planning_checks([found._asdict(), failed._asdict()])
    assert [check.holds for check in checks] == [True, False]
