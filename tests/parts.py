"""A plugin for pytest: a part of the long tests beside the others, and a summary of the run as a file.

`--long-part 1/4` leaves out the long tests that are not in part 1 of the parts 0 to 3; with `-m long` nothing else
runs. A file's long tests are in one part. Files are dealt out by the seconds that they took (tests/seconds.json), so
that the parts take about equally long.

`--summary FILE` writes JSON: `{"passed": 812, "skipped": 0, "seconds": 95.2, "failed": [[test, is it long], …]}`. No
file is written if the run was interrupted or could not begin.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.test_seconds import SECONDS, SHORTEST

started = time.monotonic()


def deal(files: Mapping[str, float], parts: int) -> dict[str, int]:
    """Return the part of each file, by seconds of each file: the longest first, to the part that has least."""
    sums = [0.0] * parts
    part_of = {}
    for file in sorted(files, key=lambda file: (-files[file], file)):
        part = sums.index(min(sums))
        part_of[file] = part
        sums[part] += files[file]
    return part_of


def part_option(text: str) -> tuple[int, int]:
    """Read `1/4`. Raises ValueError, for which argparse prints a usage message."""
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(text)
    return part, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-part", type=part_option, metavar="PART/PARTS", help="run a part of the long tests")
    parser.addoption("--summary", type=Path, metavar="FILE", help="write counts and failed tests to a file, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--long-part")
    if chosen is None:
        return
    part, parts = chosen
    seconds = json.loads(SECONDS.read_text())["long"]
    files = {item.path.relative_to(config.rootpath).as_posix() for item in items if item.get_closest_marker("long")}
    part_of = deal({file: seconds.get(file, SHORTEST) for file in files}, parts)

    def runs(item: pytest.Item) -> bool:
        file = item.path.relative_to(config.rootpath).as_posix()
        return not item.get_closest_marker("long") or part_of[file] == part

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    path: Path | None = config.getoption("--summary")
    if path is None or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    stats = terminalreporter.stats
    failed = {
        report.nodeid: "long" in report.keywords for report in (*stats.get("failed", ()), *stats.get("error", ()))
    }
    counts = {outcome: len(stats.get(outcome, ())) for outcome in ("passed", "skipped")}
    summary = counts | {"seconds": round(time.monotonic() - started, 1), "failed": sorted(failed.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")
