"""The runner of all benchmarks: scenarios, files of results, going on, documents, and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import documents, runner
from benchmarks.checks import Check, Goal
from benchmarks.experiments import networks
from benchmarks.results import FAILURES, Results, decoded, encoded, kind_of
from benchmarks.runner import Options, Run, Section, goals_section, time_left
from benchmarks.scenarios import Scenario, run_scenario, scenario_section
from benchmarks.sections import COMMANDS, SECTIONS, load
from tests.unit.measured import RUN, results_with

NAMES = ("one", "two", "three")


def rows(run: Run) -> Iterator[dict[str, Any]]:
    for name in run.scenarios(NAMES):
        yield {"value": len(name), "share": 1 / 3, "same": None}
        if name == "two":
            yield {"table": "more", "value": run.quick}


def tables(results: Results) -> list[str]:
    return [f"{row['scenario']}: {row['value']}" for row in results.rows()]


def checks(results: Results) -> list[Check]:
    return [Check("a", row["scenario"], str(row["value"]), "3", row["value"] == 3) for row in results.rows()]


SECTION = Section("A title", rows, tables, checks, lambda _: NAMES)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((command, "FOLDER"), (command, "QUICK_FOLDER"), (documents, "PAGES"), (documents, "PLOTS")):
        monkeypatch.setattr(module, name, tmp_path / name)
    monkeypatch.setattr(runner, "this_run", lambda device: RUN | {"device": device})


def measured(section: Section = SECTION, **options: Any) -> tuple[bool, Results]:
    held = command.run_section("a", section, Options(**options))
    return held, Results(command.FOLDER / "a.json")


def test_a_section_has_a_file_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    held, results = measured()
    assert not held and [row["value"] for row in results.rows()] == [3, 3, 5]
    assert results.rows("more") == [{"scenario": "two", "run": 0, "value": False}] and results.kind == "host"
    assert results.rows()[0] == {"run": 0, "share": 0.333333, "same": None, "scenario": "one", "value": 3}
    page = (documents.PAGES / "a.md").read_text()
    assert page.startswith("# A title\n\n<!-- a: begin, written by benchmarks/documents.py -->\n")
    assert "Measured on `host`: EPYC, 2 cores, 16 GiB, PyTorch 2, Python 3, revision abc (2026-01-01).\n" in page
    assert "2 of 3 checks hold.\n- **does not hold**: three: 5, asked for 3\n" in page and "one: 3\ntwo: 3\n" in page
    assert "2 of 3 checks hold" in capsys.readouterr().out


def test_a_page_keeps_what_is_written_by_hand() -> None:
    documents.PAGES.mkdir()
    begin, end = documents.marks("a")
    (documents.PAGES / "a.md").write_text(f"# By hand\n\n{begin}\nearlier\n{end}\n\nMore.\n")
    measured()
    page = (documents.PAGES / "a.md").read_text()
    assert page.startswith("# By hand\n") and page.endswith(f"{end}\n\nMore.\n") and "earlier" not in page


def test_a_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another revision has measured is kept only if that is asked for; other scenarios keep their rows."""
    measured(only="t")  # two and three
    monkeypatch.setattr(runner, "this_run", lambda device: RUN | {"revision": "def", "date": "2026-02-01"})

    def revisions(**options: Any) -> dict[str, list[str]]:
        _, results = measured(**options)
        return {name: [run["revision"] for run in runs] for name, runs in results.measured().items()}

    assert revisions(keep=True) == {"two": ["abc"] * 2, "three": ["abc"], "one": ["def"]}
    assert revisions(resume=True, only="w") == {"three": ["abc"], "one": ["def"], "two": ["def"] * 2}
    monkeypatch.setattr(runner, "this_run", lambda device: RUN | {"revision": "def", "date": "2026-02-02"})
    assert revisions(resume=True)["three"] == ["def"]
    _, results = measured(resume=True)
    assert {run["date"] for run in results.runs} == {"2026-02-01", "2026-02-02"}  # nothing was left to measure


def test_a_section_that_fails_keeps_the_scenarios_before(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(run: Run) -> Iterator[dict[str, Any]]:
        for name in run.scenarios(NAMES):
            yield {"value": 3}
            if name == "two":
                raise ValueError("no more")

    held, results = measured(SECTION._replace(rows=failing))
    assert not held and set(results.measured()) == {"one"} and "no more" in capsys.readouterr().err
    assert "- not measured: two\n- not measured: three\n" in (documents.PAGES / "a.md").read_text()


def test_time_left_is_told_of_scenarios_whose_seconds_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    def known(run: Run) -> Iterator[dict[str, Any]]:
        for _ in run.scenarios({"one": (1, 2), "two": (3, 4)}, {"two": 1e6}):
            yield {"value": 3}

    measured(SECTION._replace(rows=known))
    told = [line for line in capsys.readouterr().err.splitlines() if " rows in " in line]
    assert len(told) == 2 and "left" in told[0] and "left" not in told[1]


def test_there_may_be_no_time() -> None:
    _, results = measured(minutes=-1.0)
    assert not results.runs and not documents.PAGES.exists()


def test_a_quick_run_writes_elsewhere() -> None:
    measured(quick=True)
    assert not command.FOLDER.exists() and not documents.PAGES.exists()
    assert Results(command.QUICK_FOLDER / "a.json").rows("more")[0]["value"] is True
    assert (command.QUICK_FOLDER / "a.md").read_text().endswith("one: 3\ntwo: 3\nthree: 5\n")


def test_another_device_has_files_of_its_own() -> None:
    measured(device="cuda:1")
    assert (command.FOLDER / "a-cuda.json").exists() and (documents.PAGES / "a-cuda.md").exists()
    assert [documents.section_of(stem) for stem in ("a-cuda", "a", "memory-flow")] == ["a", "a", "memory-flow"]
    assert [kind_of(device) for device in ("sim:A", "cuda:1", "cpu", "host")] == ["model", "cuda", "host", "host"]


def test_a_table_is_written_as_columns() -> None:
    table: list[dict[str, Any]] = [{"a": 1, "b": True, "c": [1.5]}, {"a": 2, "b": True}, {"a": 3, "b": True, "c": None}]
    text = encoded(table)
    assert json.loads(text)["same"] == {"b": True} and text.count("\n") == 5
    assert decoded(json.loads(text)) == [{"c": None} | row for row in table]
    assert json.loads(encoded(table[:1]))["columns"] == ["a", "b", "c"]


def test_runs_without_rows_are_not_written(tmp_path: Path) -> None:
    results = results_with(tmp_path, {"value": 1})
    results.replace("all", [{"value": 2}], RUN | {"revision": "def"})
    results.write()
    assert [run["revision"] for run in Results(results.path).runs] == ["def"]
    assert Results(results.path).rows() == [{"scenario": "all", "run": 0, "value": 2}]


def test_a_scenario_is_a_run_of_the_command_or_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """A scenario that fails is a failed check, and is measured again where a run goes on."""
    arguments = (*networks.TINY[3].arguments(), "--policies", "none")
    fine = Scenario("a", "simulated", (*arguments, "--device", "sim:RTX_A6000"))
    function = Scenario("a", "function", ('[{"value": 1}]',), work=json.loads)
    wrong = [Scenario("a", "wrong", ()), Scenario("a", "raises", ("x",), work=json.loads)]
    wrong.append(Scenario("a", "empty", ("[]",), work=json.loads))
    (row,) = run_scenario(fine, "host")
    assert row["table"] == "a" and row["label"] == "none" and "model" not in row and "versions" not in row
    assert run_scenario(function, "host") == [{"table": "a", "value": 1}]
    for scenario, words in zip(wrong, ("--model", "JSONDecodeError", "no rows"), strict=True):
        (failure,) = run_scenario(scenario, "host")
        assert failure["table"] == FAILURES and words in failure["error"]
    section = scenario_section("B", lambda kind, quick: [fine, wrong[1]], lambda results: [], lambda results: [])
    held, results = measured(section, keep=True)
    assert not held and set(results.measured()) == {fine.name} and results.titled("a")[0][0] == "simulated"
    assert "not measured" not in capsys.readouterr().out
    assert "**does not hold**: a: raises: JSONDecodeError" in (documents.PAGES / "a.md").read_text()


def test_goals_are_checks_and_lines(tmp_path: Path) -> None:
    goals = (Goal("us", "time, µs", ".0f", most=150), Goal("rate", "rows/s", ","), Goal("times", "×", ".1f", least=4))
    section = goals_section("C", "c", lambda run: {"us": 149.6, "rate": 1000, "times": 3.9}, goals)
    _, results = measured(section)
    assert [check.holds for check in section.checks(results)] == [True, False]
    assert section.tables(results)[2:-1] == [
        "| time, µs | 150 | below 150 |  |", "| rows/s | 1,000 |  |  |", "| × | 3.9 | at least 4 | **missed** |",
    ]  # fmt: skip


def test_a_run_says_how_long_it_takes() -> None:
    assert time_left(600.0, 0.0, 0.0) == ", about 10 min left"
    assert time_left(300.0, 600.0, 300.0) == ", about 10 min left"
    assert time_left(0.0, 600.0, 300.0) == time_left(20.0, 0.0, 0.0) == ""


def test_sections_are_chosen_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    name, names, options = command.parse(["plans", "--section", "methods", "core", "--quick", "--only", "VGG"])
    assert (name, names) == ("plans", ["methods", "core"]) and options == Options(quick=True, only="VGG", minutes=inf)
    assert command.parse(["answers"])[1] == [*COMMANDS["answers"]] and command.parse(["tables"])[1] == [*SECTIONS]
    with pytest.raises(SystemExit, match="2"):
        command.parse(["plans", "--section", "soak"])
    assert "no such section of plans: soak" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["plans", "--list"])
    assert capsys.readouterr().out.startswith("methods        All methods, side by side\n")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_a_title_and_names_of_its_own(name: str) -> None:
    section = load(name)
    assert section.title[0].isupper()
    for kind in ("host", "cuda", "model"):
        expected = [*section.expected(kind)]
        assert len(set(expected)) == len(expected)
