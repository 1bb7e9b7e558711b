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
Row = dict[str, Any]  # one policy's result, as the command writes it (pg_tensile.tools.bench.report.Row)
Done = subprocess.CompletedProcess[str]


def run_bench(arguments: Sequence[str]) -> tuple[Done, list[Row]]:
    """Run the command in the clone, where the models of benchmarks are, and return its end and its rows."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        done = run_module("pg_tensile", "bench", *arguments, "--json", file.name)
        return done, [json.loads(line) for line in Path(file.name).read_text().splitlines()]


def run_program(module: str, arguments: Sequence[str]) -> tuple[Done, list[Row]]:
    """Run a module that prints its rows as lines of JSON, and return its end and its rows."""
    done = run_module(module, *arguments)
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_module(module: str, *arguments: str) -> Done:
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
