"""From nothing to a first prediction, by the commands of docs/install.md in clean folders of Debian.

scripts/install_guide.sh runs them: on Debian, as root or with sudo, with a network for Debian's packages and, the first
time, for those of Python. Its packages are those of build/packages, which `make packages` makes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.checks import Check, Goal
from benchmarks.command import ROOT
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table

DEBIANS = {15: "Debian 12", 17: "Debian 13", 18: "Debian's next release"}
WAYS = ("packages", "source")
SCENARIOS = {f"PostgreSQL {major}, {way}": (major, way) for major in DEBIANS for way in WAYS}
QUICK = "PostgreSQL 15, packages"
GOALS = (Goal("commands", "commands", "d", most=11), Goal("seconds", "seconds", ".0f", most=180.0))


def measure(run: Run) -> Iterator[dict[str, Any]]:
    for name in run.scenarios([QUICK] if run.quick else SCENARIOS):
        major, way = SCENARIOS[name]
        command = [str(ROOT / "scripts" / "install_guide.sh"), way, str(major)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured = json.loads(done.stdout)
        del measured["command_seconds"]
        yield {"major": major, "way": way} | measured


def checks(results: Results) -> list[Check]:
    """Check the packages, for which the goals are."""
    of_packages = [row for row in results.rows() if row["way"] == "packages"]
    return [
        goal.check("install", row)._replace(what=f"{row['scenario']}: {goal.what}")
        for row in of_packages
        for goal in GOALS
    ]


def expected(_: str) -> Sequence[str]:
    return list(SCENARIOS)


def tables(results: Results) -> list[str]:
    cells = [
        (
            f"PostgreSQL {row['major']}, {DEBIANS[row['major']]}",
            row["way"],
            str(row["commands"]),
            f"{row['seconds']:.0f}",
            *(f"{row[key]:.0f}" for key in ("debian_mb", "torch_mb", "other_wheels_mb")),
            f"{row['prediction']:.1f}",
        )
        for row in results.rows()
    ]
    titles = ("server", "from", "commands", "seconds", "Debian, MB", "PyTorch, MB", "other wheels, MB", "miles")
    return table(titles, cells)


BENCHMARK = Section("From nothing to a first prediction", measure, tables, checks, expected)
