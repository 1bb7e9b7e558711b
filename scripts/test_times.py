"""A plugin for pytest that writes the time of each test: `pytest -p scripts.test_times --times FOLDER`.

Each process of the run (each worker of xdist) moves itself into a control group of its own, which everything that it
starts inherits, servers that have detached themselves included. It appends a line of JSON for each test to
FOLDER/<worker>.jsonl, which `python -m scripts.test_times FOLDER` turns into tables:

    test     node id; "collection" for what comes before the first test
    long     whether it has the mark of long tests
    wall     seconds, of its set-up and tear-down too
    own      CPU seconds of the process of the tests, its threads included
    others   CPU seconds of servers, jobs and all other processes in the group

Needs root and control groups, version 1 (cpuacct) or 2. The tests that run do not know of it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from scripts.control_group import ControlGroup


class Recorder:
    """Hooks that write a line for each test."""

    def __init__(self, path: Path, group: ControlGroup) -> None:
        self.path = path
        self.group = group
        self.last = (time.perf_counter(), time.process_time(), group.cpu_seconds())
        self.first = True

    def record(self, test: str, long: bool = False) -> None:
        now = (time.perf_counter(), time.process_time(), self.group.cpu_seconds())
        wall, own, everything = (b - a for a, b in zip(self.last, now, strict=True))
        self.last = now
        times = {"wall": wall, "own": own, "others": max(everything - own, 0)}
        row = {"test": test, "long": long} | {name: round(value, 4) for name, value in times.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        self.record("collection" if self.first else "between tests")
        self.first = False
        result = yield
        self.record(item.nodeid, item.get_closest_marker("long") is not None)
        return result

    def pytest_unconfigure(self) -> None:
        self.record("end")
        self.group.remove()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, help="folder for the time of each test")


def pytest_configure(config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--times")
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    starts_workers = worker is None and config.getoption("numprocesses", None)
    below_a_test = worker is None and "PYTEST_CURRENT_TEST" in os.environ
    if folder is None or starts_workers or below_a_test:
        return
    folder.mkdir(parents=True, exist_ok=True)
    group = ControlGroup(f"pg_tensile-{worker or 'main'}-{os.getpid()}")
    group.enter()
    config.pluginmanager.register(Recorder(folder.resolve() / f"{worker or 'main'}.jsonl", group))


# ---- tables of a run -------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all workers."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def by_file(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return file, number of tests, and sums of wall, own and others, the largest CPU time first."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        total = sums.setdefault(row["test"].split("::")[0], [0, 0.0, 0.0, 0.0])
        for index, value in enumerate((1, row["wall"], row["own"], row["others"])):
            total[index] += value
    files = [[file, int(count), *(round(value, 1) for value in times)] for file, (count, *times) in sums.items()]
    return sorted(files, key=lambda row: -(row[3] + row[4]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the times of a run as a table, by file and by test.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--tests", type=int, default=40)
    arguments = parser.parse_args()
    rows = rows_of(arguments.folder)
    files = by_file(rows)
    total = ["all", *(round(sum(column), 1) for column in zip(*(row[1:] for row in files), strict=True))]
    print("| file | tests | wall | own CPU | others' CPU |\n| --- | --- | --- | --- | --- |")
    for row in [total, *files[: arguments.files]]:
        print(f"| {' | '.join(map(str, row))} |")
    print("\n| test | wall | own CPU | others' CPU |\n| --- | --- | --- | --- |")
    for test in sorted(rows, key=lambda test: -(test["own"] + test["others"]))[: arguments.tests]:
        print(f"| {test['test']} | {test['wall']:.1f} | {test['own']:.1f} | {test['others']:.1f} |")


if __name__ == "__main__":
    main()
