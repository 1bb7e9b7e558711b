"""Results of benchmarks, as a run leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import Results

RUN = {
    "revision": "abc", "date": "2026-01-01", "device": "host", "cpu": "EPYC", "cores": 2, "memory_bytes": 2**34,
    "torch": "2", "python": "3",
}  # fmt: skip


def results_with(folder: Path, *rows: dict[str, Any], scenario: str = "all") -> Results:
    """Return results with the rows of one scenario."""
    results = Results(folder / "results.json")
    results.replace(scenario, rows, RUN)
    return results
