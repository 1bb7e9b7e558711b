"""The benchmark of several sessions: medians of rounds, checks and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.server.serving import checks, median_of, rows_of, tables
from tests.unit.measured import results_with

SESSIONS = ("p50_us", "p99_us", "per_s", "session_cpu_us", "predictor_cpu_us")


def measured(p50_of_eight: float, p99: float) -> dict[str, Any]:
    """Return a round in which eight sessions and a load have these times."""
    sessions = {f"{name}_{count}": 100.0 for name in SESSIONS for count in (1, 8)} | {"p50_us_8": p50_of_eight}
    beside = {"p50_us": 90.0, "p99_us": p99, "longest_us": 20_000.0, "seconds": 1.5}
    return {
        "sessions": sessions,
        "beside": {"loading": beside, "loading and planning": beside | {"p99_us": 10.0}},
        "standbys": {
            "polling": {"per_s_1": 1000.0, "per_s_2": 1100.0, "per_s_3": 1200.0},
            "sleeping": {"per_s_1": 800.0, "per_s_2": 1900.0, "per_s_3": 2000.0},
        },
    }


def test_medians_of_rounds_are_checked_and_shown(tmp_path: Path) -> None:
    rounds = [measured(140.0, 4000.0), measured(160.0, 6000.0), measured(1000.0, 4900.0)]
    median = median_of(rounds)
    assert median["sessions"]["p50_us_8"] == 160.0 and median["beside"]["loading"]["p99_us"] == 4900
    other = {key: median[key] for key in ("sessions", "beside")}
    results = results_with(tmp_path, *rows_of({"this": median, "main": other}))
    assert [check.holds for check in checks(results)] == [False, True, True]
    lines = tables(results)
    assert "| abc | 8 | 160 | 100 | 100 | 100 | 100 |" in lines
    assert "| main | loading | 90 | 4,900 | 20,000 | 1.5 |" in lines
    assert "| two, of the primary and a standby | 1,100 | 1,900 |" in lines
