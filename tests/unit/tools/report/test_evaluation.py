"""The page's section about the evaluation of a version: its numbers, its charts, and what it says without rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pg_tensile.client.evaluation import Evaluation
from pg_tensile.tools.report.evaluation import evaluation_of
from pg_tensile.tools.report.evaluation_charts import MOST_FEATURES, evaluation_charts
from pg_tensile.tools.report.page import render
from tests.browser import Browser
from tests.unit.records import HOSTILE, facts_in, record
from tests.unit.tools.report.test_report import Page

CHARTS = {"chart-importance", "chart-calibration", "chart-residuals"}


def score(metric: str, value: float | None, quantile: float | None = None, **columns: Any) -> dict[str, Any]:
    """Build a row of evaluate_model."""
    row = {"group_value": None, "metric": metric, "label": None, "predicted": None, "quantile": quantile}
    return row | {"value": value, "baseline": None} | columns


CALIBRATION = [
    score(f"calibration_{name}", value, quantile)
    for quantile, values in ((0.5, (0.12, 0.1, 40)), (1.0, (0.7, 0.65, 60)))
    for name, value in zip(("probability", "frequency", "rows"), values, strict=True)
]
CLASSIFIED = [
    score("rows", 100.0),
    score("accuracy", 0.75, baseline=0.625),
    score("roc_auc", None),
    score("log_loss", float("nan")),
    score("confusion", 60.0, label="a", predicted="b"),
    *CALIBRATION,
]
ESTIMATED = [
    score("rows", 1234.0),
    score("rmse", 2.5),
    *(score("residual_quantile", 10 * (quantile - 0.5), quantile) for quantile in (0.95, 0.05, 0.5)),
]


def importance(count: int = 3, name: str = "feature", metric: str = "log_loss") -> list[dict[str, Any]]:
    """Build rows of feature_importance."""
    return [
        {"feature": f"{name} {i}", "importance": 0.5 / (i + 1), "deviation": 0.01 * i, "metric_used": metric}
        for i in range(count)
    ]


def evaluated(
    scores: list[dict[str, Any]], features: list[dict[str, Any]] | None = None, query: str = "TABLE rows"
) -> Evaluation:
    return Evaluation(query, 3, scores, features)


def test_the_facts_are_the_rows_of_sql() -> None:
    facts = facts_in(render(record(evaluation=evaluated(CLASSIFIED, importance()))))["evaluation"]
    assert (facts["query"], facts["version"]) == ("TABLE rows", 3)
    assert facts["metrics"] == {"rows": 100.0, "accuracy": 0.75, "roc_auc": None, "log_loss": None}
    assert facts["baselines"] == {"rows": None, "accuracy": 0.625, "roc_auc": None, "log_loss": None}
    assert facts["calibration"] == [
        {"quantile": 0.5, "probability": 0.12, "frequency": 0.1, "rows": 40},
        {"quantile": 1.0, "probability": 0.7, "frequency": 0.65, "rows": 60},
    ]
    assert facts["residuals"] == [] and facts["importance_metric"] == "log_loss"
    assert facts["importance"] == [
        {name: row[name] for name in ("feature", "importance", "deviation")} for row in importance()
    ]


def test_residuals_are_in_order() -> None:
    facts = facts_in(render(record(evaluation=evaluated(ESTIMATED, importance(metric="r2")))))["evaluation"]
    assert [row["quantile"] for row in facts["residuals"]] == [0.05, 0.5, 0.95]
    assert [row["value"] for row in facts["residuals"]] == pytest.approx([-4.5, 0.0, 4.5])
    assert facts["calibration"] == []


@pytest.mark.parametrize(("scores", "chart"), [(CLASSIFIED, "calibration"), (ESTIMATED, "residuals")])
def test_the_section_has_the_charts_and_tables_of_its_task(scores: list[dict[str, Any]], chart: str) -> None:
    page = Page(render(record(evaluation=evaluated(scores, importance()))))
    assert page.identifiers() & CHARTS == {"chart-importance", f"chart-{chart}"}
    assert {"scores", "importances"} <= page.identifiers()
    shown = page.shown()
    assert "Version 3" in shown and "TABLE rows" in shown and "feature 2" in shown
    assert ("0.625" in shown) == (chart == "calibration"), "no baseline"


def test_the_bars_and_their_spread_are_the_importances() -> None:
    rows = [row | {"deviation": 0.3} for row in importance(2)]
    charts = evaluation_charts(evaluation_of(evaluated(CLASSIFIED, rows)))
    (bars,) = charts["importance"].renderers
    columns = bars.data_source.data
    assert columns["importance"].tolist() == [row["importance"] for row in rows]
    assert columns["upper"].tolist() == [row["importance"] + row["deviation"] for row in rows]
    assert columns["lower"].tolist() == [row["importance"] - row["deviation"] for row in rows]
    span = charts["importance"].x_range
    assert span.start < min(0.0, *columns["lower"]) and max(columns["upper"]) < span.end
    assert columns["place"] == [2, 1], "the most important feature is not on top"


def test_of_many_features_the_most_important_are_drawn_and_all_are_listed() -> None:
    text = render(record(evaluation=evaluated(CLASSIFIED, importance(MOST_FEATURES + 5))))
    shown = Page(text).shown()
    assert f"The {MOST_FEATURES} most important of {MOST_FEATURES + 5} are drawn." in shown
    assert f"feature {MOST_FEATURES + 4}" in shown
    charts = evaluation_charts(evaluation_of(evaluated(CLASSIFIED, importance(MOST_FEATURES + 5))))
    assert len(charts["importance"].renderers[0].data_source.data["place"]) == MOST_FEATURES


def test_a_version_that_is_not_deployed_has_no_importances() -> None:
    text = render(record(evaluation=evaluated(CLASSIFIED)))
    assert "computed for the deployed version" in Page(text).shown()
    assert facts_in(text)["evaluation"]["importance"] is None
    assert Page(text).identifiers() & CHARTS == {"chart-calibration"}


def test_importances_that_are_not_defined_are_left_out() -> None:
    rows = [row | {"importance": None, "deviation": None} for row in importance()]
    page = Page(render(record(evaluation=evaluated(CLASSIFIED, rows))))
    assert "not defined on these rows" in page.shown() and "chart-importance" not in page.identifiers()


def test_without_rows_there_is_no_section() -> None:
    text = render(record())
    assert "Evaluation" not in Page(text).texts["h2"] and facts_in(text)["evaluation"] is None
    text = render(record(evaluation=evaluated(CLASSIFIED)))
    heads = Page(text).texts["h2"]
    assert heads.index("Evaluation") == heads.index("Learning curves") + 1


def test_hostile_names_and_queries_stay_text() -> None:
    features = importance(name=HOSTILE)
    text = render(record(evaluation=evaluated(CLASSIFIED, features, query=HOSTILE)))
    page = Page(text)
    assert "evil" not in page.identifiers() and "<b id=evil" in page.text("pre")
    assert facts_in(text)["evaluation"]["query"] == HOSTILE


def test_a_browser_draws_the_charts(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for scores in (CLASSIFIED, ESTIMATED):
        path.write_text(render(record(evaluation=evaluated(scores, importance()))), "utf-8")
        page = browser.page(390, 900, "dark")
        page.open(path, "document.documentElement.dataset.charts")
        assert page.complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        drawn = "[...document.querySelectorAll('.chart')].map((e) => [e.id, e.getBoundingClientRect().height])"
        heights = {name: height for name, height in page.evaluate(drawn) if name in CHARTS}
        assert len(heights) == 2 and min(heights.values()) > 100, json.dumps(heights)
