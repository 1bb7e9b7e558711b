"""A plugin for pytest that writes the result of each test to a file as soon as it has ended: `--each-test FILE`.

Each line is a JSON object: the test, `passed`, `failed` or `skipped`, its seconds, and the end of its report if it
failed. A run that is stopped has written those of the tests before.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPORT_CHARACTERS = 1500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--each-test", type=Path, metavar="FILE", help="write the result of each test to a file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--each-test")
    if path is not None and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to this process
        config.pluginmanager.register(EachTest(path))


class EachTest:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test's call, or whatever did not let it pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            row["report"] = report.longreprtext[-REPORT_CHARACTERS:]
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
