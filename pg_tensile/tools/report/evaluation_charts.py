"""Charts of the evaluation: importances of features, calibration of probabilities, quantiles of residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import BasicTickFormatter, ColumnDataSource
from bokeh.models.annotations import TeeHead, Whisker

from pg_tensile.tools.report.chart_style import BLUE, GREY, ORANGE, new_chart, pointing
from pg_tensile.tools.report.evaluation import Bin, Evaluation, Importance, Residual
from pg_tensile.tools.report.markup import clean

MOST_FEATURES = 20  # drawn: the most important ones
LONGEST_NAME = 24  # of a feature, on the chart's axis
BAR = 22  # px of a feature's bar


def evaluation_charts(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the figures "importance", "calibration" and "residuals", those for which there are numbers."""
    charts: dict[str, Any] = {}
    if evaluation is None:
        return charts
    if evaluation.importance:
        charts["importance"] = _importance(evaluation.importance[:MOST_FEATURES], str(evaluation.importance_metric))
    if evaluation.calibration:
        charts["calibration"] = _calibration(evaluation.calibration)
    if evaluation.residuals:
        charts["residuals"] = _residuals(evaluation.residuals)
    return charts


def _importance(features: Sequence[Importance], metric: str) -> Any:
    """Draw a bar for each feature, the most important one on top, with a standard deviation on both sides."""
    height = BAR * len(features) + 80
    chart = new_chart(height, x_axis_label=f"worsening of {metric.replace('_', ' ')}")
    places = list(range(len(features), 0, -1))
    ends = [0.0, *(row.importance + side * row.deviation for row in features for side in (-1, 1))]
    margin = 0.04 * (max(ends) - min(ends)) or 1.0
    chart.x_range.start, chart.x_range.end = min(ends) - margin, max(ends) + margin
    source = ColumnDataSource(
        {
            "place": places,
            "feature": [clean(row.feature) for row in features],
            "importance": np.array([row.importance for row in features], np.float64),
            "deviation": np.array([row.deviation for row in features], np.float64),
            "lower": np.array([row.importance - row.deviation for row in features], np.float64),
            "upper": np.array([row.importance + row.deviation for row in features], np.float64),
        }
    )
    bars = chart.hbar(y="place", right="importance", height=0.7, source=source, color=BLUE, fill_alpha=0.6)
    lower_head, upper_head = (TeeHead(size=6, line_color=ORANGE) for _ in range(2))
    whiskers = Whisker(
        base="place",
        lower="lower",
        upper="upper",
        lower_head=lower_head,
        upper_head=upper_head,
        dimension="width",
        source=source,
        line_color=ORANGE,
        level="overlay",
    )
    chart.add_layout(whiskers)
    chart.yaxis.ticker = places
    chart.yaxis.major_label_overrides = {
        place: _abbreviated(row.feature) for place, row in zip(places, features, strict=True)
    }
    chart.ygrid.grid_line_color = None
    chart.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    chart.add_tools(
        pointing(
            [bars], ("feature", "@feature"), ("importance", "@importance{0.0000}"), ("deviation", "@deviation{0.0000}")
        )
    )
    return chart


def _abbreviated(name: str) -> str:
    text = clean(name)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _calibration(bins: Sequence[Bin]) -> Any:
    """Draw the frequencies over the probabilities; right probabilities are on the diagonal."""
    chart = new_chart(320, x_axis_label="predicted probability", y_axis_label="share where it came true")
    chart.x_range.start = chart.y_range.start = 0
    chart.x_range.end = chart.y_range.end = 1
    chart.line([0, 1], [0, 1], line_color=GREY, line_dash="dashed")
    source = ColumnDataSource(
        {
            "probability": np.array([row.probability for row in bins], np.float64),
            "frequency": np.array([row.frequency for row in bins], np.float64),
            "rows": [row.rows for row in bins],
        }
    )
    chart.line(x="probability", y="frequency", source=source, line_color=BLUE, line_width=2)
    points = chart.scatter(x="probability", y="frequency", source=source, color=BLUE, size=7)
    chart.add_tools(
        pointing(
            [points], ("predicted", "@probability{0.000}"), ("came true", "@frequency{0.000}"), ("rows", "@rows{0,0}")
        )
    )
    return chart


def _residuals(residuals: Sequence[Residual]) -> Any:
    """Draw the cumulative distribution of target minus prediction through its quantiles."""
    chart = new_chart(320, x_axis_label="target minus prediction", y_axis_label="share of rows with at most that")
    chart.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    chart.y_range.start, chart.y_range.end = 0, 1
    chart.line([0, 0], [0, 1], line_color=GREY, line_dash="dashed")
    source = ColumnDataSource(
        {
            "value": np.array([row.value for row in residuals], np.float64),
            "quantile": np.array([row.quantile for row in residuals], np.float64),
        }
    )
    chart.line(x="value", y="quantile", source=source, line_color=BLUE, line_width=2)
    points = chart.scatter(x="value", y="quantile", source=source, color=BLUE, size=7)
    chart.add_tools(pointing([points], ("share of rows", "@quantile{0%}"), ("at most", "@value{0,0.000}")))
    return chart
