"""The paper's tables and figures, and what stands beside them, as the command measures them.

Long: experiments are run as the command runs them, in processes of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.experiments import networks, suite
from benchmarks.experiments.cases import (
    BEYOND,
    EXPERIMENTS,
    FULL,
    METHODS,
    PEERS,
    QUICK,
    SAVINGS,
    Case,
    Run,
    runs,
)
from benchmarks.experiments.networks import PAPER
from benchmarks.experiments.paper import PUBLISHED
from benchmarks.optimum.best import MOST_OPERATORS
from pg_tensile.tools.bench.options import DeviceChoice
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.cli.bench import parse
from pg_tensile.tools.cli.main import main

pytestmark = pytest.mark.long

HOST = DeviceChoice("host")
TINY = (*networks.SMALL_RESNET.arguments(2), "--rounds", "1", "--warmup", "0", "--iterations", "1", "--light", "a test")


@pytest.mark.parametrize("size", [QUICK, FULL])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_case_is_one_that_the_command_takes(name, size):
    cases = EXPERIMENTS[name].cases(size)
    assert len({case.title for case in cases}) == len(cases)
    for case in cases:
        for arguments in case.jobs:
            policies = parse(["bench", *arguments, "--policies", ",".join(case.policies)]).policies
            assert policies[0].name == "none" and len(policies) == len(set(policies)) == len(case.policies)


def test_the_papers_numbers_have_their_rows():
    found = set()
    for name, experiment in EXPERIMENTS.items():
        for case in experiment.cases(FULL):
            for policy in parse(["bench", *case.jobs[0], "--policies", ",".join(case.policies)]).policies:
                row = {"experiment": name, "case": case.title, "policy": policy.name, "label": policy.label}
                row |= {"latencies": policy.latencies}
                if suite.published(row) is not None:
                    found.add((name, case.title, suite.what(row)))
    assert found == set(PUBLISHED)


def test_savings_asks_every_method_for_all_of_them():
    titles = [case.title for case in EXPERIMENTS["savings"].cases(FULL)]
    assert titles == [*(network.title for network in PAPER), "mixed"]
    for case in EXPERIMENTS["savings"].cases(FULL):
        assert set(PEERS if len(case.jobs) == 1 else PEERS[:3]) < set(case.policies)
        for saved in SAVINGS:
            for swept in (method for method, swept in METHODS.items() if swept):
                assert swept.format(f"{100 - saved}%") in case.policies
        assert sum(policy.startswith("joint") for policy in case.policies) == len(SAVINGS) + len(BEYOND)


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [QUICK, FULL])
def test_experiments_share_the_runs_of_what_they_both_measure(size):
    found = runs(EXPERIMENTS, size)
    assert len({run.case.title for run in found}) == len(found)
    measured = {}
    for run in found:
        assert run.case.policies[0] == "none" and len(set(run.case.policies)) == len(run.case.policies)
        for name, policies in run.wanted.items():
            assert set(policies) <= set(run.case.policies)
            measured[name, run.case.title] = (run.case.jobs, policies)
    asked = {
        (name, case.title): (case.jobs, case.policies)
        for name, experiment in EXPERIMENTS.items()
        for case in experiment.cases(size)
    }
    assert measured == asked
    assert len(found) < len(asked)


def test_one_case_can_be_chosen():
    (run,) = runs(["savings", "table3", "fig7"], FULL, "ResNet-50")
    assert set(run.wanted) == {"savings", "table3"}


def test_rows_go_to_the_experiments_that_want_them():
    case = Case("a case", (TINY,), ("none", "vdnn", "joint:budget=80%"))
    wanted: dict[str, tuple[str, ...]] = {"table3": ("none", "vdnn"), "savings": ("none", "joint:budget=80%")}
    rows = list(suite.measure(Run(case, wanted, simulated=True), HOST, Progress()))
    assert [(row["experiment"], row["policy"]) for row in rows] == [
        *(("table3", "none"), ("table3", "vdnn")),
        *(("savings", "none"), ("savings", "joint")),
    ]
    assert rows[0] | {"experiment": ""} == rows[2] | {"experiment": ""}


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_experiment_is_measured_row_by_row(jobs, tmp_path, monkeypatch, capsys):
    case = Case(
        "a case",
        ((*TINY, "--timeline"),) * jobs,
        ("none", "vdnn", "joint:early_update=true:budget=80%", "joint:budget=1%"),
    )
    monkeypatch.setitem(EXPERIMENTS, "table3", EXPERIMENTS["table3"]._replace(cases=lambda size: [case]))
    path = tmp_path / "rows.json"
    plots = ("--plots", str(tmp_path / "plots"))
    assert main(["bench", "table3", "--quick", "--json", str(path), *plots]) == 1  # 1 % is not possible
    none, vdnn, joint, failed = map(json.loads, path.read_text().splitlines())
    assert [row["experiment"] for row in (none, vdnn, joint, failed)] == ["table3"] * 4
    assert none["msr"] == 0 and vdnn["msr"] > 0 and joint["msr"] >= 0.2 and joint["bit_identical"]
    assert failed["error"] and failed["eor"] is None
    drawn = {file.name for file in (tmp_path / "plots").iterdir()}
    assert "pareto-table3.svg" in drawn and ("memory-table3.svg" in drawn) == (jobs == 1)
    printed = capsys.readouterr().out
    assert "table3: A single task" in printed and "joint:early at 80%" in printed and "vdnn" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        *(["table5"], ["table1", "--device", "tpu"], ["fig6", "--json", "no/such/folder"]),
        *(
            ["table1", "--case", "ResNet-51"],
            ["table1", "--rounds", "0"],
            ["table1", "--plots", "/proc/no/such"],
            ["savings", "--batch", "many"],
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert "pg-tensile: " in capsys.readouterr().err


def test_a_case_that_does_not_run_is_a_row(tmp_path: Path) -> None:
    gone = ("--model", str(tmp_path / "gone.py:Net"), "--input", "float32:4")
    (row,) = suite.run_case(Case("gone", (gone,), ("none",)), "host", Progress())
    assert "gone" in row["error"]


# ---- beside the best plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", networks.TINY, ids=lambda network: network.title)
def test_the_best_plan_can_be_searched_for(network, tmp_path):
    path = tmp_path / "rows.json"
    policies = ("--policies", "none,joint:budget=70%,optimum:budget=70%:limit_s=2", "--early-update")
    status = main(["bench", *network.arguments(), *policies, "--device", "sim:RTX_A6000", "--json", str(path)])
    none, joint, best = map(json.loads, path.read_text().splitlines())
    assert status == 0 and joint["operators"] <= MOST_OPERATORS
    assert best["eor"] <= joint["eor"] * (1 + 1e-6)
    assert none["least_eor"] == pytest.approx(1) and best["least_eor"] <= best["eor"] * (1 + 1e-6)
    assert best["device_peak_bytes"] <= best["budget_bytes"]
