"""`make first-gpu-run`: parts end by themselves, keep what they have found, and the page says what is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import parse as parse_benchmarks
from pg_tensile.tools.cli.bench import parse as parse_bench
from scripts.first_gpu_run import checks, page
from scripts.first_gpu_run.parts import PARTS, Where
from scripts.first_gpu_run.steps import GRACE_S, LEAST_S, ROWS, Outcome, Row, Step, run, run_steps
from tests.repository import REPOSITORY

WAITS = """
import sys, time
file = open(sys.argv[1], "a", buffering=1)
file.write('{"model": "first"}\\n')
try:
    time.sleep(600)
finally:
    file.write('{"model": "last"}\\n{"model": ')
"""


def step(name: str, *words: str) -> Step:
    return Step(name, words, 60)


def test_a_step_that_is_stopped_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    """It writes a row, waits, and writes a row and a half when it is interrupted; its time is over with the first."""
    (tmp_path / "waiting_module.py").write_text(WAITS)
    waiting = Step("waits", ("waiting_module", ROWS), 60, {"PYTHONPATH": str(tmp_path)})

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != waiting.limit_s:
                return super().wait(None)
            wait_until(lambda: any("first" in path.read_text() for path in tmp_path.glob("*-rows.json")))
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background jobs of a shell
    try:
        outcome = run(waiting, waiting.limit_s, tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.status, outcome.verdict) == (None, "stopped")
    assert outcome.rows == [{"model": "first"}, {"model": "last"}]
    assert "KeyboardInterrupt" in outcome.last[-1]


def test_a_step_that_fails_does_not_keep_the_next_from_running(tmp_path: Path) -> None:
    steps = [step("fails", "a_module_that_is_not_there"), step("passes", "platform")]
    failed, passed = run_steps(steps, 1000, tmp_path / "log")
    assert (failed.verdict, passed.verdict) == ("failed (1)", "passed")
    assert "a_module_that_is_not_there" in failed.last[-1] and passed.last
    log = (tmp_path / "log").read_text()
    assert "==== fails: python -m" in log and passed.last[-1] in log


def test_a_step_without_time_is_named(tmp_path: Path) -> None:
    (outcome,) = run_steps([step("late", "platform")], LEAST_S + GRACE_S - 1, tmp_path / "log")
    assert (outcome.verdict, outcome.seconds) == ("no time", 0)


def test_each_test_is_written_as_it_ends(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise RuntimeError('no device')\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_setup(broken): pass\n"
        "def test_skipped(): pytest.skip('no GPU')\n"
        "def test_last(): import os; os._exit(3)\n"
    )
    words = ["-p", "scripts.first_gpu_run.each_test", "--each-test", str(tmp_path / "rows"), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *words, str(tmp_path / "test_some.py")]
    assert subprocess.run(command, cwd=REPOSITORY, capture_output=True).returncode == 3
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    found = {row["test"].rpartition("::")[2]: row for row in rows}
    outcomes = {"test_good": "passed", "test_bad": "failed", "test_setup": "failed", "test_skipped": "skipped"}
    assert {name: row["outcome"] for name, row in found.items()} == outcomes
    assert "assert 1 == 2" in found["test_bad"]["report"] and "no device" in found["test_setup"]["report"]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cuda", "emulated"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part.number))
def test_steps_can_be_asked_for(part: Any, device: str, quick: bool) -> None:
    """Options of benchmarks are understood, and tests are there."""
    steps = part.steps(Where(device, quick))
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        module, *words = step.words
        assert ROWS in words
        if module == "pg_tensile":
            parse_bench(words)
        elif module == "benchmarks":
            parse_benchmarks(words)
        else:
            assert module == "pytest"
            assert all((REPOSITORY / word).exists() for word in words if word.startswith("tests/"))


# ---- checks ----------------------------------------------------------------------------------------------------------


def outcome_of(*rows: Row, name: str = "step", status: int | None = 0) -> Outcome:
    return Outcome(name, "python -m step", status, 1.0, ("the last line",), list(rows))


BENCHED: Row = {
    "policy": "joint",
    "label": "joint",
    "budget": "50%",
    "error": None,
    "bit_identical": True,
    "budget_bytes": 1000 << 20,
    "reserved_peak_bytes": 980 << 20,
    "allocator_retries": 0,
    "context_bytes": 500 << 20,
    "step_ms_median": 10.5,
    "vanilla_step_ms_median": 10.0,
    "eager_step_ms_median": 10.0,
    "eor": 1.05,
    "simulated_ms": 10.2,
    "stall_ms": 0.1,
    "scatter": 0.08,
    "scatter_causes": ["the clock fell from 1,980 to 1,400 MHz"],
    "out_gbps": 24.0,
    "in_gbps": 25.0,
    "overlap": 0.97,
    "conditions": [
        {
            "start": {"sm_clock_mhz": 1980, "temperature_c": 45, "power_w": None, "clocks_event_reasons": []},
            "end": {
                "sm_clock_mhz": 1400,
                "temperature_c": 71,
                "power_w": 690.2,
                "clocks_event_reasons": ["sw_power_cap"],
            },
        }
    ],
}


def broken(check: checks.Checks, *rows: Row, timed: bool = True, status: int | None = 0) -> set[str]:
    """Return what does not hold, without the names of rows."""
    found = check([outcome_of(*rows, status=status)], timed)
    return {check.what.rpartition(": ")[2] for check in found if not check.holds}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({}, set()),
        ({"bit_identical": False}, {"results"}),
        ({"reserved_peak_bytes": 1023 << 20}, {"reserved"}),
        ({"reserved_peak_bytes": 960 << 20}, {"used"}),
        ({"step_ms_median": 11.0}, {"step"}),
        ({"step_ms_median": 11.0, "budget": "35%"}, set()),
        ({"step_ms_median": 12.1, "budget": "35%"}, {"step"}),
        ({"error": "no plan"}, set()),
        ({"policy": "none", "budget": None, "budget_bytes": None, "step_ms_median": 10.2}, {"step, none over eager"}),
        ({"policy": "none", "budget": None, "budget_bytes": None, "step_ms_median": 10.05}, set()),
    ],
)
def test_plans_of_transformers_are_checked(values: Row, what: set[str]) -> None:
    row = BENCHED | values | ({"label": "none"} if values.get("policy") == "none" else {})
    assert broken(checks.transformers, row) == what


def test_times_of_an_emulated_device_are_not_checked() -> None:
    slow = BENCHED | {"step_ms_median": 99.0, "reserved_peak_bytes": 500 << 20}
    assert broken(checks.transformers, slow, timed=False) == set()


def test_tests_that_failed_or_were_not_reached_are_checked() -> None:
    passed, failed = {"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed", "report": ""}
    assert broken(checks.tests, passed) == set()
    assert broken(checks.tests, passed, failed) == {"failures"}
    assert broken(checks.tests, passed, status=None) == {"failures"}
    assert broken(checks.racefree, passed, status=9) == {"step"}


SHARED: Row = {
    "jobs": "2 small",
    "way": "turns",
    "seconds": 10.0,
    "bit_identical": True,
    "most_granted_bytes": 90,
    "budget_bytes": 90,
    "overhead_bytes": 10,
    "driver_bytes": [40, 41],
    "ledger_bytes": [45, 45],
}


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"seconds": 8.0}, set()),
        ({"seconds": 9.0}, {"2 small together, over turns"}),
        ({"seconds": 8.0, "bit_identical": False}, {"weights"}),
        ({"seconds": 8.0, "most_granted_bytes": 101}, {"granted"}),
        ({"seconds": 8.0, "driver_bytes": [40, 46]}, {"process 2 by the driver"}),
    ],
)
def test_jobs_that_share_a_device_are_checked(values: Row, what: set[str]) -> None:
    assert broken(checks.sharing, SHARED, SHARED | {"way": "together"} | values) == what


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_what_came_out_and_what_is_left(tmp_path: Path) -> None:
    part = PARTS[1]
    tested = {"test": "tests/a.py::test_b", "outcome": "failed", "seconds": 1.0, "report": "assert 1 == 2"}
    outcomes = [
        outcome_of(BENCHED, BENCHED | {"error": "no plan", "budget": "35%"}, name="GPT-2"),
        outcome_of(tested, name="tests", status=1),
        outcome_of({"model": "MLP", "cpu_ms": 0.25}, name="predictions"),
        Outcome("late", "python -m late", None, 0, (), []),
    ]
    facts = {"device": "cuda", "gpu": "none"}
    page.write(tmp_path, PARTS[0], facts, [], [])
    page.write(tmp_path, PARTS[2], facts | {"device": "emulated"}, [], [])
    page.write(tmp_path, part, facts, outcomes, part.checks(outcomes, True))
    text = (tmp_path / "part-2.md").read_text()
    assert text.startswith("# Part 2: ") and "- gpu: none" in text
    assert "| `joint` | 50% |" in text and "| `joint` | 35% | no plan |" in text
    assert "- `joint` at 50%: 1980 → 1400 MHz, 45 → 71 °C, sw_power_cap" in text
    assert "- `joint` at 50%: the clock fell from 1,980 to 1,400 MHz" in text
    assert "0 passed, 1 failed, 0 skipped." in text and "### tests/a.py::test_b" in text and "assert 1 == 2" in text
    assert "| MLP | 0.25 |" in text
    assert "- not measured: late" in text
    left = text.partition("## Parts that are still to run")[2]
    assert [part.number for part in PARTS if f"PART={part.number}`" in left] == [3, 4, 5, 6]
    kept = json.loads((tmp_path / "part-2.json").read_text())
    assert [step["name"] for step in kept["steps"]] == ["GPT-2", "tests", "predictions", "late"]
    assert kept["steps"][0]["rows"][0] == BENCHED
