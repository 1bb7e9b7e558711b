"""Large tables: the table has the function that it says, and its verdicts are those of the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.answers.tables import MIB, TABLES, checks, many, tables
from benchmarks.results import Results
from benchmarks.synthetic_table import FEATURES, synthetic_table
from tests.unit.measured import results_with

TASK = {
    "seconds": 50.0,
    "epochs": 30,
    "metric": "r2",
    "first_seconds": 2.0,
    "first_after_start_seconds": 6.0,
    "score": 0.9,
    "endless_score": 0.905,
    "lightgbm_seconds": 1.0,
    "peer_seconds": 2.0,
    "peer_score": 0.8,
    "p50_us": 100.0,
    "p99_us": 200.0,
    "client_p50_us": 200.0,
    "client_p99_us": 300.0,
    "rows_per_s": 200_000,
}
MEMORY = {"seconds": 3.0, "rows_per_s": 1000, "rss_bytes": 400 * MIB, "anonymous_bytes": 300 * MIB}


def results() -> dict[str, list[dict[str, Any]]]:
    """Results that reach all goals."""
    interval = {"coverage": 0.9, "inside": 0.905, "width": 1.0, "validation_rows": 8000, "spread": 0.004}
    return {
        "tasks": [{"task": task, **TASK} for task in ("regression", "classification")],
        "intervals": [{"quantiles": quantiles, **interval} for quantiles in (False, True)],
        "attributions": [{"sum": 1e-16, "base": 1e-7}],
        "evaluations": [
            {"task": task, "rows": rows, **MEMORY}
            for task in ("regression", "classification")
            for rows in (50_000, 5_000_000)
        ],
        "trainings": [
            {"rows": rows, "cache_mib": cache, **MEMORY}
            for rows, cache in ((40_000, 64), (1_000_000, 64), (1_000_000, 4096))
        ],
    }


def stored(folder: Path, measured: dict[str, list[dict[str, Any]]]) -> Results:
    return results_with(folder, *({"table": table} | row for table, rows in measured.items() for row in rows))


def broken(measured: Results) -> list[str]:
    return [check.section for check in checks(measured) if not check.holds]


def test_results_that_reach_the_goals_hold(tmp_path: Path) -> None:
    assert broken(stored(tmp_path, results())) == []


@pytest.mark.parametrize(
    ("path", "value", "section"),
    [
        (("tasks", 1, "seconds"), 61.0, "training"),
        (("tasks", 0, "first_seconds"), 5.1, "training"),
        (("tasks", 0, "endless_score"), 0.91, "training"),
        (("tasks", 0, "p50_us"), 300.0, "predictions"),
        (("tasks", 0, "client_p50_us"), 301.0, "predictions"),
        (("tasks", 1, "rows_per_s"), 149_999, "predictions"),
        (("intervals", 1, "inside"), 0.889, "intervals"),
        (("attributions", 0, "base"), 2e-5, "attributions"),
        (("evaluations", 3, "anonymous_bytes"), 1300 * MIB, "evaluation"),
        (("trainings", 1, "anonymous_bytes"), 800 * MIB, "trainings"),
    ],
)
def test_a_missed_goal_is_named(path: tuple[Any, ...], value: float, section: str, tmp_path: Path) -> None:
    measured = results()
    *parents, key = path
    part: Any = measured
    for parent in parents:
        part = part[parent]
    part[key] = value
    assert broken(stored(tmp_path, measured)) == [section]


def test_a_page_has_all_tables(tmp_path: Path) -> None:
    page = "\n".join(tables(stored(tmp_path, results())))
    assert page.count("\n| --- |") == len(TABLES)
    assert "200,000" in page and "mean and quantiles" in page and "training, one epoch" in page


def test_a_table_is_repeated_as_often_as_needed() -> None:
    assert many(100, "rows", 40).endswith("generate_series(1, 3) LIMIT 100")


def test_the_table_has_a_function_of_its_features_and_is_the_same_every_time() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    frame = synthetic_table(3000)
    assert frame.equals(synthetic_table(3000)) and not frame.equals(synthetic_table(3000, seed=1))
    assert list(frame) == [*FEATURES, "amount", "late"]
    assert frame["n10"].isna().any() and not frame["amount"].isna().any()
    numbers = frame[[name for name in FEATURES if name.startswith("n")]]
    regressor = HistGradientBoostingRegressor(random_state=0).fit(numbers[:2000], frame["amount"][:2000])
    assert regressor.score(numbers[2000:], frame["amount"][2000:]) > 0.3
    classifier = HistGradientBoostingClassifier(random_state=0).fit(numbers[:2000], frame["late"][:2000])
    share = np.mean(frame["late"][2000:] == "late")
    assert classifier.score(numbers[2000:], frame["late"][2000:]) > max(share, 1 - share) + 0.05
