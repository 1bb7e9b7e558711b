"""Runs of the command `pg-tensile bench` in processes of their own, which leave nothing in memory for the next run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]  # one policy's result, as the command writes it (pg_tensile.tools.bench.row.Row), or another's
LIGHT = ("--light", "for tables of times, and one round shows that a method is slower than vanilla")
Done = subprocess.CompletedProcess[str]


def run_bench(arguments: Sequence[str]) -> tuple[Done, list[Row]]:
    """Run the command in the clone, where the models of benchmarks are, and return its end and its rows."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "pg_tensile", "bench", *arguments, "--json", file.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done, [json.loads(line) for line in Path(file.name).read_text().splitlines()]
