"""The demo as a newcomer runs it: twice in a row, then the commands that it suggests, then stop and remove.

Long: the demo trains two models from real tables, twice.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cluster import Cluster
from tests.repository import REPOSITORY
from tests.unit.records import facts_in

pytestmark = pytest.mark.long


def demo(folder: Path, *arguments: str) -> str:
    """Run the demo in `folder` and return its output; fail unless it exits with 0."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"DEMO_DIR": str(folder), "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table_rows(output: str, header: str, number: int = 0) -> list[list[str]]:
    """Return the cells of a table whose first column is `header`, row by row; `number` of such tables precede it."""
    lines = output.splitlines()
    start = [i for i, line in enumerate(lines) if re.match(rf"{header}\s+┃", line)][number]
    rows = []
    for line in lines[start + 2 :]:
        if "│" not in line:
            break
        rows.append([cell.strip() for cell in line.split("│")])
    return rows


def megabytes(pretty: str) -> float:
    """Convert a size of pg_size_pretty to megabytes."""
    number, unit = pretty.split()
    return int(number) * {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]


@pytest.mark.timeout(900)
def test_demo_runs_twice_and_goes_away(clusters_folder, cluster):
    folder = clusters_folder / "demo"
    first = demo(folder)
    try:
        assert "336,776 flights" in first
        assert 'NOTICE:  model "late_arrival" is registered with the architecture tabular' in " ".join(
            first.split("\n")
        )
        assert first.count("late_arrival   3/3") == 2 and first.count("digit         24/24") == 2
        assert len(table_rows(first, "model", 1)) == len(table_rows(first, "model", 2)) == 8  # events, operators
        assert "The same, to the bit" in first
        # The first job takes much less memory than without a plan. The second may have ended by then.
        late = table_rows(first, "model")[0]
        assert late[0] == "late_arrival"
        vanilla, planned, peak = (megabytes(cell) for cell in late[1:4])
        assert vanilla > 50 and peak <= planned < 0.8 * vanilla and megabytes(late[4]) > 0
        _, jobs, budget, granted = table_rows(first, "device")[0]
        assert jobs in ("1", "2") and planned <= megabytes(granted) <= megabytes(budget) < vanilla
        evaluated = dict(table_rows(first, "metric"))
        assert int(evaluated["rows"]) > 20_000 and 0.6 < float(evaluated["roc_auc"]) < 0.8
        compared = {name: values for name, *values in table_rows(first, "metric", 1)}
        assert compared.keys() == {"roc_auc", "log_loss", "brier"}
        for name, (own, other) in compared.items():
            assert float(own) == pytest.approx(float(evaluated[name]), abs=1e-4) and 0.1 < float(other) < 0.8, name
        frequencies = [int(row[1]) for row in table_rows(first, "predicted late, %")]
        assert len(frequencies) == 10 and frequencies[0] < frequencies[-1]
        importances = [float(row[1]) for row in table_rows(first, "feature")]
        assert len(importances) == 6 and importances == sorted(importances, reverse=True) and importances[0] > 0
        digests = [row[4] for row in table_rows(first, "job")]
        assert len(digests) == 4 and digests[0] == digests[1] and digests[2] == digests[3]
        routes = table_rows(first, "origin")
        assert len(routes) == 10
        shares = [int(row[3]) for row in routes]
        assert shares == sorted(shares, reverse=True) and all(0 < share < 100 for share in shares)
        images, read = (sum(int(row[i]) for row in table_rows(first, "digit")) for i in (1, 2))
        assert images == 297 and read > 0.85 * images

        second = demo(folder)
        assert "Using the server of the last run" in second and "336,776 flights" not in second

        page = (folder / "report.html").read_text("utf-8")
        facts = facts_in(page)
        assert facts["summary"]["saved_share"] > 0 and "<title>Job 5: late_arrival" in page
        assert facts["evaluation"]["metrics"]["rows"] == 5000 and facts["evaluation"]["version"] == 3
        assert len(facts["evaluation"]["calibration"]) == 10 and len(facts["evaluation"]["importance"]) == 16
        top = next(line.split() for line in second.splitlines() if "pg-tensile top" in line)
        done = subprocess.run([*top, "--once"], capture_output=True, text=True)
        assert done.returncode == 0 and "No open jobs" in done.stdout, done.stderr
        psql = next(line.strip() for line in second.splitlines() if line.strip().startswith("psql "))
        query = "SELECT string_agg(DISTINCT deployed_version::text, ',') FROM tensile.models"
        done = subprocess.run([*psql.split(), "-Atc", query], capture_output=True, text=True)
        assert done.stdout == "4\n", done.stderr

        assert "Stopped the server" in demo(folder, "stop")
        assert not Cluster(folder).processes()
        assert cluster.running(), "the demo stopped another server"
    finally:
        demo(folder, "remove")
    assert not folder.exists()
