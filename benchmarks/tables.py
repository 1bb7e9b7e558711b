"""Tables of benchmarks as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COSTS = ("peak, MiB", "step, ms", "times `none`", "moved, MiB", "recomputed")


def costs(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells below COSTS for a row of the command: what a plan takes, or why there is none."""
    if row["error"] is not None:
        return (row["error"], *[""] * (len(COSTS) - 1))
    moved = (row["bytes_out"] + row["bytes_in"]) / 2**20
    times = row["step_ms_median"] / row["vanilla_step_ms_median"]
    numbers = (f"{row['device_peak_bytes'] / 2**20:.0f}", f"{row['step_ms_median']:.0f}", f"{times:.2f}")
    return (*numbers, f"{moved:.0f}", f"{row['recomputes']:,}")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown; none without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings), *lines, ""] if lines else []
