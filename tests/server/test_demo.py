"""The demo as a newcomer runs it: twice in a row, then the commands that it suggests, then stop and remove.

Long: the demo trains five models, twice.
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
        assert "Loaded the tables" in first
        assert 'NOTICE:  model "price" is registered with the architecture ensemble' in " ".join(first.split("\n"))
        assert len(table_rows(first, "id")) == 5
        # It is as good as the demo says: a fifth of the guess's error at most, and close to gradient boosting's.
        _, _, guess, own = map(int, table_rows(first, "diamonds")[0])
        assert 2500 < guess < 3500 and own < guess / 5
        words = " ".join(first.split())
        assert f"misses a price by ${own:,} on average, the guess by ${guess:,}" in words
        boosted = re.search(r"gets \$([\d,]+) from the same rows", words)
        assert boosted is not None and own < 1.2 * int(boosted[1].replace(",", ""))
        cuts = table_rows(first, "cut")
        assert len(cuts) == 5 and all(0.8 < int(said) / int(real) < 1.25 for _, _, real, said in cuts)
        assert 5000 < int(first.splitlines()[first.splitlines().index("price") + 2]) < 12000
        # The first job takes much less memory than without a plan. The second may have ended by then.
        trained = table_rows(first, "model")[0]
        assert trained[0] == "price_2"
        needed, planned, peak, moved = map(megabytes, trained[1:])
        assert needed > 50 and peak <= planned < 0.7 * needed and moved > 0
        assert "The same, to the bit" in first
        digests = [row[3] for row in table_rows(first, "job")]
        assert len(digests) == 4 and digests[0] == digests[1] and digests[2] == digests[3]
        images, read = map(int, table_rows(first, "images")[0])
        assert images == 297 and read > 0.85 * images

        second = demo(folder)
        assert "Using the server of the last run" in second and "Loaded the tables" not in second

        top = next(line.split() for line in second.splitlines() if "pg-tensile top" in line)
        done = subprocess.run([*top, "--once"], capture_output=True, text=True)
        assert done.returncode == 0 and "No open jobs" in done.stdout, done.stderr
        psql = next(line.strip() for line in second.splitlines() if line.strip().startswith("psql "))
        statements = [line.strip() for line in second.splitlines() if re.match(r"    (SELECT|\\df) ", line)][-4:]
        assert len(statements) == 4
        for statement in statements:
            done = subprocess.run([*psql.split(), "-Atc", statement], capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout and not done.stderr, (statement, done.stderr)
        query = "SELECT model, deployed_version FROM tensile.models ORDER BY model"
        done = subprocess.run([*psql.split(), "-Atc", query], capture_output=True, text=True)
        assert done.stdout == "digit|4\nprice|2\nprice_2|4\n", done.stderr

        assert "Stopped the server" in demo(folder, "stop")
        assert not Cluster(folder).processes()
        assert cluster.running(), "the demo stopped another server"
    finally:
        demo(folder, "remove")
    assert not folder.exists()
