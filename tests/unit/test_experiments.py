"""The paper's tables and figures as the command measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pg_tensile.bench import experiments, networks
from pg_tensile.bench.experiments import EXPERIMENTS, PUBLISHED, Case
from pg_tensile.cli import main, parse


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_case_is_one_that_the_command_takes(name, quick):
    cases = EXPERIMENTS[name].cases(quick)
    assert len({case.title for case in cases}) == len(cases)
    for case in cases:
        for arguments in case.jobs:
            policies = parse(["bench", *arguments, "--policies", ",".join(case.policies)]).policies
            assert policies[0].name == "none" and len(policies) == len(set(policies)) == len(case.policies)


def test_the_papers_numbers_have_their_rows():
    found = set()
    for name, experiment in EXPERIMENTS.items():
        for case in experiment.cases(False):
            for policy in parse(["bench", *case.jobs[0], "--policies", ",".join(case.policies)]).policies:
                row = {"experiment": name, "case": case.title, "policy": policy.name, "latencies": policy.latencies}
                if experiments.published(row) is not None:
                    found.add((name, case.title, experiments.what(row)))
    assert found == set(PUBLISHED)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_experiment_is_measured_row_by_row(jobs, tmp_path, monkeypatch, capsys):
    tiny = (*networks.SMALL_RESNET.arguments(2), "--rounds", "1", "--warmup", "0", "--iterations", "1", "--light")
    case = Case("a case", (tiny,) * jobs, ("none", "vdnn", "joint:early_update=true:budget=80%", "joint:budget=1%"))
    tried = EXPERIMENTS["table3"]._replace(cases=lambda quick: [case])
    monkeypatch.setitem(EXPERIMENTS, "table3", tried)
    path = tmp_path / "rows.json"
    assert main(["bench", "table3", "--quick", "--json", str(path)]) == 1  # 1 % is not possible
    none, vdnn, joint, failed = map(json.loads, path.read_text().splitlines())
    assert [row["experiment"] for row in (none, vdnn, joint, failed)] == ["table3"] * 4
    assert none["msr"] == 0 and vdnn["msr"] > 0 and joint["msr"] >= 0.2 and joint["bit_identical"]
    assert failed["error"] and failed["eor"] is None
    printed = capsys.readouterr().out
    assert "table3: A single task" in printed and "joint:early at 80%" in printed and "vdnn" in printed


@pytest.mark.parametrize("arguments", [["table5"], ["table1", "--device", "tpu"], ["fig6", "--json", "no/such/folder"]])
def test_what_cannot_be_measured_is_refused(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert "hint:" in capsys.readouterr().err


def test_a_case_that_does_not_run_is_a_row(tmp_path: Path) -> None:
    gone = ("--model", str(tmp_path / "gone.py:Net"), "--input", "float32:4")
    (row,) = experiments.run_case(Case("gone", (gone,), ("none",)), "host", experiments.Progress())
    assert "gone" in row["error"]
