"""A plugin for pytest that writes the time of each test: `pytest -p scripts.test_times --times FOLDER`.

Each process of the run (each worker of xdist) moves itself into a control group of its own, which everything that it
starts inherits, servers that have detached themselves included. It appends a line of JSON for each test to
FOLDER/<worker>.jsonl:

    test     node id; "collection" for what comes before the first test
    wall     seconds, of its set-up and tear-down too
    own      CPU seconds of the process of the tests, its threads included
    others   CPU seconds of servers, jobs and all other processes in the group

Needs root and control groups, version 1 (cpuacct) or 2. The tests that run do not know of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


class ControlGroup:
    """A new control group that counts the CPU time of its processes.

    name: one level below the root of the hierarchy. Raises OSError without the rights or a hierarchy.
    """

    def __init__(self, name: str) -> None:
        first = CGROUPS / "cpuacct"
        self.folder = (first if first.is_dir() else CGROUPS) / name
        self.folder.mkdir()

    def enter(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def cpu_seconds(self) -> float:
        usage = self.folder / "cpuacct.usage"
        if usage.exists():
            return int(usage.read_text()) / 1e9
        fields = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    def remove(self) -> None:
        """Remove the group. Processes that are left in it move to the group above."""
        parent = self.folder.parent / "cgroup.procs"
        for pid in (self.folder / "cgroup.procs").read_text().split():
            try:
                parent.write_text(pid)
            except ProcessLookupError:
                continue
        self.folder.rmdir()


class Recorder:
    """Hooks that write a line for each test."""

    def __init__(self, path: Path, group: ControlGroup) -> None:
        self.path = path
        self.group = group
        self.last = (time.perf_counter(), time.process_time(), group.cpu_seconds())
        self.first = True

    def record(self, test: str) -> None:
        now = (time.perf_counter(), time.process_time(), self.group.cpu_seconds())
        wall, own, everything = (b - a for a, b in zip(self.last, now, strict=True))
        self.last = now
        row = {"test": test, "wall": round(wall, 4), "own": round(own, 4), "others": round(max(everything - own, 0), 4)}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        self.record("collection" if self.first else "between tests")
        self.first = False
        result = yield
        self.record(item.nodeid)
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
