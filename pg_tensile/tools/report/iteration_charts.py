"""Charts of one iteration: device memory with and without the plan, and below it the activity of compute, executor and
link. Both share one time axis, so that zooming affects both.

Details too small to be seen are merged or left out, so that the page of a large iteration stays small. Numbers are
never derived from what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import BasicTickFormatter, ColumnDataSource, CustomJSHover, HoverTool, Range1d
from numpy.typing import NDArray

from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.plan.actions import REQUESTING, WAITING
from pg_tensile.planning.simulator.simulator import Timeline, Transfer
from pg_tensile.text import size
from pg_tensile.tools.report.chart_style import (
    ALONG,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASES,
    RED,
    new_chart,
    operator_names,
    unit_of,
)
from pg_tensile.tools.report.iteration import Instruction, Iteration, tensor_name
from pg_tensile.tools.report.markup import clean

MOST_STEPS = 20_000  # of a line of memory
MOST_BARS = 4_000  # of the compute lane, about
MOST_TRANSFERS = 4_000  # in each direction, and as many waits
COMPUTE, EXECUTOR, OUT, IN = 3, 2, 1, 0  # y positions of the lanes
LANES = {COMPUTE: "compute", EXECUTOR: "executor", OUT: "link out", IN: "link in"}
FORWARD_TO_REPEATED = (*PHASES.values(), ORANGE)  # colours of steps: the phases, and recomputation
HEIGHT = 0.72  # of a bar


class Limit(NamedTuple):
    """A horizontal line in the chart of memory."""

    nbytes: int
    colour: str
    dash: str


def iteration_charts(iteration: Iteration, limits: Sequence[Limit]) -> tuple[dict[str, Any], list[str]]:
    """Return the figures "footprint" and "lanes", and notes on what is drawn in fewer pieces."""
    end = max(iteration.timeline.iteration_us, iteration.vanilla.iteration_us, 1e-3) / 1e3
    along = Range1d(start=0, end=end, bounds=(0, end))
    names = operator_names(iteration.trace)
    notes: list[str] = []
    footprint = _footprint(iteration, limits, along, names, notes)
    lanes = new_chart(200, ALONG, bar=False, x_range=along, y_range=Range1d(start=-0.6, end=3.6))
    lanes.yaxis.ticker = sorted(LANES)
    lanes.yaxis.major_label_overrides = LANES
    lanes.ygrid.grid_line_color = None
    _add_compute(lanes, iteration, names, notes)
    _add_link(lanes, iteration, notes)
    for chart in (footprint, lanes):
        chart.xaxis.axis_label = "ms since the iteration began"
        chart.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    return {"footprint": footprint, "lanes": lanes}, notes


# ---- memory ----------------------------------------------------------------------------------------------------------


def _footprint(
    iteration: Iteration, limits: Sequence[Limit], along: Range1d, names: CustomJSHover, notes: list[str]
) -> Any:
    tops = [iteration.planned_bytes.max(), iteration.vanilla_bytes.max(), *(limit.nbytes for limit in limits)]
    unit_bytes, unit = unit_of(float(max(tops)))
    chart = new_chart(300, ALONG, x_range=along, y_range=Range1d(start=0, end=1.08 * float(max(tops)) / unit_bytes))
    chart.yaxis.axis_label = f"{unit} on the device"
    chart.yaxis.formatter = BasicTickFormatter(use_scientific=False)
    left, rows = _levels(iteration.vanilla, iteration.vanilla_bytes, notes)
    vanilla = ColumnDataSource({"left": left, "held": _small(iteration.vanilla_bytes[rows] / unit_bytes)})
    left, rows = _levels(iteration.timeline, iteration.planned_bytes, notes)
    operator = iteration.timeline.steps[rows]
    columns: dict[str, Any] = {"left": left, "right": np.append(left[1:], left[-1]), "operator": operator}
    columns["held"] = _small(iteration.planned_bytes[rows] / unit_bytes)
    columns["without"] = _small(iteration.vanilla_bytes[operator] / unit_bytes)
    planned = ColumnDataSource(columns)
    chart.step(x="left", y="held", mode="after", source=vanilla, line_color=GREY, line_width=1.5)
    chart.varea_step(x="left", y1=0, y2="held", step_mode="after", source=planned, fill_color=BLUE, fill_alpha=0.25)
    chart.step(x="left", y="held", mode="after", source=planned, line_color=BLUE, line_width=1.5)
    for limit in limits:
        level = limit.nbytes / unit_bytes
        chart.line([0, along.end], [level, level], line_color=limit.colour, line_dash=limit.dash, line_width=2)
    # Invisible quads carry the tooltips, as hovering does not work on a step glyph
    seen = chart.quad(left="left", right="right", bottom=0, top="held", source=planned, fill_alpha=0, line_alpha=0)
    tooltips = [
        ("operator", "@operator @operator{target}"),
        ("module", "@operator{module}"),
        ("begins at", "@left{0,0.000} ms"),
        ("planned", f"@held{{0,0.0}} {unit}"),
        ("without a plan", f"@without{{0,0.0}} {unit}"),
    ]
    chart.add_tools(_pointing([seen], tooltips, {"@operator": names}, mode="vline"))
    return chart


def _levels(timeline: Timeline, held: NDArray[np.int64], notes: list[str]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (start of each drawn step in ms, its index); the last step is repeated to close the line."""
    chosen = thinned(timeline.step_start_us, held, MOST_STEPS)
    if len(chosen) < len(held):
        notes.append(f"Of {len(held):,} levels of memory {len(chosen):,} are drawn: of each stretch the highest.")
    left = np.append(timeline.step_start_us[chosen], timeline.iteration_us) / 1e3
    return _small(left), np.append(chosen, chosen[-1])


def _small(numbers: Any) -> NDArray[np.float32]:
    """Return numbers for drawing as float32, which keeps the page small."""
    return np.asarray(numbers, np.float32)


def thinned(start_us: NDArray[np.float64], held: NDArray[Any], most: int) -> NDArray[Any]:
    """Return the indices to draw: all, or the highest `held` in each of `most` equal intervals of time."""
    if len(held) <= most:
        return np.arange(len(held))
    stretch = np.minimum(start_us / max(start_us[-1], 1e-9) * most, most - 1).astype(np.int64)
    order = np.lexsort((-held, stretch))
    return np.sort(order[np.diff(stretch[order], prepend=-1) != 0])


# ---- lanes -----------------------------------------------------------------------------------------------------------


def _add_compute(chart: Any, iteration: Iteration, names: CustomJSHover, notes: list[str]) -> None:
    timeline = iteration.timeline
    start, end, steps = timeline.step_start_us, timeline.step_end_us, timeline.steps
    does = np.where(iteration.repeated, len(PHASES), iteration.trace.phase[steps])
    first, last = merged(start, end, does, MOST_BARS)
    if len(first) < len(steps):
        notes.append(
            f"{len(steps):,} operators are drawn as {len(first):,} bars: what is too short to be seen, together."
        )
    bars = []
    for kind, colour in enumerate(FORWARD_TO_REPEATED):
        own = does[first] == kind
        left, right = start[first[own]] / 1e3, end[last[own]] / 1e3
        columns: dict[str, Any] = {"left": _small(left), "right": _small(right), "ms": _small(right - left)}
        columns["operator"] = steps[first[own]]
        columns["steps"] = (last - first + 1)[own].astype(np.int32)
        bars.append(_bars(chart, COMPUTE, columns, colour))
    tooltips = [
        ("operator", "@operator @operator{target}"),
        ("module", "@operator{module}"),
        ("takes", "@ms{0,0.000} ms"),
        ("operators in this bar", "@steps"),
    ]
    chart.add_tools(_pointing(bars, tooltips, {"@operator": names}))


def merged(
    start_us: NDArray[np.float64], end_us: NDArray[np.float64], does: NDArray[Any], most: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (first step, last step) of each bar.

    Each step has a bar of its own, unless there are more than `most`: then steps that are shorter than 1 / `most` of
    the iteration share a bar with their neighbours of the same colour (`does`)."""
    count = len(start_us)
    if count <= most:
        return np.arange(count), np.arange(count)
    shortest = max(float(end_us[-1]), 1e-9) / most
    long = end_us - start_us >= shortest
    apart = (np.diff(does) != 0) | (np.diff((start_us / shortest).astype(np.int64)) != 0) | long[1:] | long[:-1]
    apart |= start_us[1:] - end_us[:-1] > 1e-3  # the compute waits in between
    first = np.flatnonzero(np.append(True, apart))
    return first, np.append(first[1:], count) - 1


def _add_link(chart: Any, iteration: Iteration, notes: list[str]) -> None:
    """Draw the transfers, and the executor's requests and waits."""
    requests = [step for step in iteration.instructions if step.kind in REQUESTING]
    waits = [step for step in iteration.instructions if step.kind in WAITING and step.end_us > step.start_us]
    copies = list(zip(iteration.timeline.transfers, requests, strict=True))
    waits = _longest(waits, waits, "waits", notes)
    lanes, drawn = [], []
    for row, direction in ((OUT, Direction.OUT), (IN, Direction.IN)):
        one_way = [copy for copy in copies if copy[0].direction == direction]
        one_way = _longest(one_way, [transfer for transfer, _ in one_way], f"transfers {direction.name.lower()}", notes)
        drawn += [request for _, request in one_way]
        own = [transfer for transfer, _ in one_way]
        sizes = {"bytes": [size(transfer.bytes) for transfer in own]}
        lanes.append(_bars(chart, row, _columns(iteration, own) | sizes, GREEN))
    red = _bars(chart, EXECUTOR, _columns(iteration, waits), RED)
    asked = chart.scatter(
        x="left",
        y=EXECUTOR,
        marker="dash",
        angle=math.pi / 2,
        size=14,
        source=ColumnDataSource(_columns(iteration, drawn)),
        line_color=GREEN,
        line_width=1.5,
        fill_color=None,
    )
    for renderers, tooltips in (
        (lanes, [("tensor", "@tensor @name"), ("bytes", "@bytes"), ("takes", "@ms{0,0.000} ms")]),
        ([red], [("waits for", "@tensor @name"), ("time", "@ms{0,0.000} ms")]),
        ([asked], [("requests", "@tensor @name"), ("at", "@left{0,0.000} ms")]),
    ):
        chart.add_tools(_pointing(renderers, tooltips))


def _longest(transfers: list[Any], times: Sequence[Transfer | Instruction], what: str, notes: list[str]) -> list[Any]:
    """Return all transfers, or beyond MOST_TRANSFERS the longest one in each of as many equal intervals of time."""
    if len(transfers) <= MOST_TRANSFERS:
        return transfers
    start, end = np.array([(interval.start_us, interval.end_us) for interval in times]).T
    order = np.argsort(start, kind="stable")
    chosen = order[thinned(start[order], (end - start)[order], MOST_TRANSFERS)]
    notes.append(f"Of {len(transfers):,} {what} {len(chosen):,} are drawn: of each stretch of time the longest.")
    return [transfers[index] for index in chosen]


def _columns(iteration: Iteration, things: Sequence[Transfer | Instruction]) -> dict[str, Any]:
    """Return the columns of transfers or instructions, with times in ms."""
    left = np.array([thing.start_us for thing in things], np.float64) / 1e3
    right = np.array([thing.end_us for thing in things], np.float64) / 1e3
    return {
        "left": _small(left),
        "right": _small(right),
        "ms": _small(right - left),
        "tensor": np.array([thing.tensor for thing in things], np.int32),
        "name": [clean(tensor_name(iteration.trace, thing.tensor)) for thing in things],
    }


def _bars(chart: Any, row: int, columns: dict[str, Any], colour: str) -> Any:
    source = ColumnDataSource(columns)
    return chart.hbar(y=row, left="left", right="right", height=HEIGHT, source=source, color=colour, line_width=0.5)


def _pointing(
    renderers: list[Any], tooltips: list[tuple[str, str]], formatters: dict[str, Any] | None = None, mode: str = "mouse"
) -> Any:
    options: Any = {"mode": mode, "formatters": formatters or {}}
    return HoverTool(renderers=renderers, tooltips=tooltips, limit=1, point_policy="follow_mouse", **options)
