"""Charts of a job's life, from the facts: predicted and measured latencies, learning curves, the memory of its plans;
and the embedding of all charts into the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from bokeh.embed import components
from bokeh.models import BasicTickFormatter, ColumnDataSource, CustomJSHover
from bokeh.resources import Resources

from pg_tensile.planning.trace.trace import Strings
from pg_tensile.tools.report.chart_style import ACROSS, BLUE, GREY, ORANGE, PHASES, RED, new_chart, pointing, unit_of
from pg_tensile.tools.report.facts import Facts, Latency, LogLine
from pg_tensile.tools.report.iteration import short
from pg_tensile.tools.report.markup import clean

MOST_POINTS = 20_000  # of the scatter chart
MANY = 300  # ratio of largest to smallest value from which Bokeh's own ticks are dense enough
CURVES = ("loss", "accuracy", "f1", "rmse", "r2")
SPLITS = {"training": BLUE, "validation": ORANGE}


class Embedded(NamedTuple):
    """Embedded charts: the scripts that draw them, and by name the HTML element that each is drawn into."""

    scripts: str
    places: Mapping[str, str]


def embedded(charts: Mapping[str, Any]) -> Embedded:
    """Return the charts of one page with the library that they need inline, so that the page loads nothing."""
    if not charts:
        return Embedded("", {})
    library = Resources(mode="inline", minified=True, components=["bokeh"]).render_js()
    script, places = components(dict(charts))
    return Embedded(f"{library}\n{script}", places)


# ---- latency ---------------------------------------------------------------------------------------------------------


def latency_charts(rows: Sequence[Mapping[str, Any]], latency: Latency) -> tuple[dict[str, Any], list[str]]:
    """Return the figures "scatter" and "errors" of the rows of tensile.latency, and notes on what is left out.

    Without measurements there are no figures."""
    compared = [row for row in rows if (row["predicted_us"] or 0) > 0 and (row["measured_us"] or 0) > 0]
    charts: dict[str, Any] = {}
    notes: list[str] = []
    if len(compared) > MOST_POINTS:
        notes.append(f"Of {len(compared):,} measured operators the {MOST_POINTS:,} slowest are drawn.")
        compared = sorted(compared, key=lambda row: -row["measured_us"])[:MOST_POINTS]
    if compared:
        charts["scatter"] = _scatter(compared)
    if latency.measured:
        charts["errors"] = _errors(latency)
    return charts, notes


def _scatter(rows: Sequence[Mapping[str, Any]]) -> Any:
    chart = new_chart(320, ACROSS, x_axis_type="log", y_axis_type="log")
    chart.xaxis.axis_label, chart.yaxis.axis_label = "measured, µs", "predicted, µs"
    values = [row[name] for row in rows for name in ("predicted_us", "measured_us")]
    ends = [min(values), max(values)]
    if ends[1] < MANY * ends[0]:  # over few decades, Bokeh's own ticks are far apart at the lower end
        powers = range(math.floor(math.log10(ends[0])) - 1, math.ceil(math.log10(ends[1])) + 1)
        for axis in (*chart.xaxis, *chart.yaxis):
            axis.ticker = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            axis.formatter = BasicTickFormatter(use_scientific=False)
    chart.line(ends, ends, line_color=GREY, line_dash="dashed")
    targets = Strings.build(clean(short(row["target"])) for row in rows)
    columns = {
        "measured": np.array([row["measured_us"] for row in rows], np.float32),
        "predicted": np.array([row["predicted_us"] for row in rows], np.float32),
        "operator": np.array([row["operator"] for row in rows], np.int32),
        "target": targets.codes,
    }
    drawn = []
    for phase, colour in PHASES.items():
        own = np.array([row["phase"] == phase for row in rows])
        source = ColumnDataSource({name: column[own] for name, column in columns.items()})
        drawn.append(
            chart.scatter(x="measured", y="predicted", source=source, size=6, color=colour, alpha=0.8, line_color=None)
        )
    tooltips = [("operator", "@operator @target{name}")]
    tooltips += [(name, f"@{name}{{0,0.0}} µs") for name in ("measured", "predicted")]
    names = CustomJSHover(args={"targets": list(targets.values)}, code="return targets[value]")
    chart.add_tools(pointing(drawn, *tooltips, target=names))
    return chart


def _errors(latency: Latency) -> Any:
    edges = [100 * edge for edge in latency.error_edges]
    chart = new_chart(320, y_axis_label="operators", x_axis_label="relative error of the prediction, %")
    upper = [*edges[1:], edges[-1] + edges[1]]
    source = ColumnDataSource(
        {
            "left": edges,
            "right": upper,
            "count": latency.error_counts,
            "range": [f"{low:.0f} % to {high:.0f} %" for low, high in pairwise(edges)]
            + [f"{edges[-1]:.0f} % and more"],
        }
    )
    bars = chart.quad(
        left="left", right="right", bottom=0, top="count", source=source, color=BLUE, fill_alpha=0.6, line_width=1
    )
    chart.y_range.start = 0
    chart.yaxis.formatter = BasicTickFormatter(use_scientific=False)
    chart.xaxis.major_label_overrides = {edges[-1]: f"≥ {edges[-1]:.0f}"}
    chart.add_tools(pointing([bars], ("error", "@range"), ("operators", "@count{0,0}")))
    return chart


# ---- learning --------------------------------------------------------------------------------------------------------


def learning_charts(metrics: Sequence[Mapping[str, Any]], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a figure for each metric that the job has; `baseline` has its values without a model, if known."""
    present = [metric for metric in CURVES if any(row[metric] is not None for row in metrics)]
    return {metric: _curve(metrics, metric, (baseline or {}).get(metric)) for metric in present}


def _curve(metrics: Sequence[Mapping[str, Any]], metric: str, baseline: float | None) -> Any:
    chart = new_chart(240, x_axis_label="epoch", y_axis_label=metric)
    chart.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    chart.xaxis[0].ticker.min_interval = 1
    if baseline is not None:
        epochs = [row["epoch"] for row in metrics]
        ends, level = [min(epochs), max(epochs)], [baseline, baseline]
        chart.line(ends, level, line_color=GREY, line_width=1.5, line_dash="dashed")
    drawn = []
    for split, colour in SPLITS.items():
        own = [row for row in metrics if row["split"] == split and row[metric] is not None]
        source = ColumnDataSource(
            {
                "epoch": [row["epoch"] for row in own],
                "value": np.array([row[metric] for row in own], np.float64),
                "split": [split] * len(own),
            }
        )
        chart.line(x="epoch", y="value", source=source, line_color=colour, line_width=2)
        drawn.append(chart.scatter(x="epoch", y="value", source=source, color=colour, size=5))
    chart.add_tools(pointing(drawn, ("epoch", "@epoch"), ("split", "@split"), (metric, "@value{0.0000}")))
    return chart


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_charts(facts: Facts) -> dict[str, Any]:
    """Return the figure "plans", the memory of each plan over the job's life; no figure without plans."""
    planned = [line for line in facts.log if line.event == "planned" and line.planned_bytes is not None]
    return {"plans": _plans(planned, facts.seconds, facts.summary.vanilla_bytes)} if planned else {}


def _plans(planned: Sequence[LogLine], until: float, vanilla_bytes: int | None) -> Any:
    unit_bytes, unit = unit_of(max(vanilla_bytes or 0, *(line.granted_bytes or 0 for line in planned)))
    chart = new_chart(240, x_axis_label="seconds since the job was submitted", y_axis_label=f"{unit} on the device")
    for axis in (chart.xaxis, chart.yaxis):
        axis.formatter = BasicTickFormatter(use_scientific=False)
    if vanilla_bytes is not None:
        level = vanilla_bytes / unit_bytes
        chart.line([planned[0].seconds, until], [level, level], line_color=GREY, line_width=1.5)
    levels = ColumnDataSource(_plan_columns([*planned, replace(planned[-1], seconds=until)], unit_bytes))
    points = ColumnDataSource(_plan_columns(planned, unit_bytes))
    drawn = []
    for column, colour in (("granted", RED), ("planned", BLUE)):
        chart.step(x="seconds", y=column, mode="after", source=levels, line_color=colour, line_width=2)
        drawn.append(chart.scatter(x="seconds", y=column, source=points, color=colour, size=6))
    chart.y_range.start = 0
    tooltips = [("generation", "@generation"), ("because", "@reason")]
    tooltips += [(name, f"@{name}{{0,0.0}} {unit}") for name in ("planned", "granted")]
    chart.add_tools(pointing(drawn, *tooltips))
    return chart


def _plan_columns(planned: Sequence[LogLine], unit_bytes: int) -> dict[str, Any]:
    return {
        "seconds": [line.seconds for line in planned],
        "planned": [(line.planned_bytes or 0) / unit_bytes for line in planned],
        "granted": [(line.granted_bytes or 0) / unit_bytes for line in planned],
        "generation": [line.generation or 0 for line in planned],
        "reason": [clean(line.reason or "") for line in planned],
    }
