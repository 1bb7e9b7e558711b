"""The style of the charts. A figure sets the colours of its data; those of axes and grids follow the page's style
sheet, light or dark (page.js).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bokeh.models import CustomJSHover, HoverTool
from bokeh.plotting import figure

from pg_tensile.planning.trace.trace import Trace
from pg_tensile.text import UNITS
from pg_tensile.tools.report.iteration import short
from pg_tensile.tools.report.markup import clean

# Okabe and Ito's colours, distinguishable with any colour vision, on white and on black
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
GREY = "#8c8c8c"
PHASES = {"forward": SKY, "backward": BLUE, "optimizer": PURPLE}

ALONG = "xbox_zoom,xpan,xwheel_zoom,reset,save"  # tools of charts that share the iteration's time
ACROSS = "box_zoom,pan,wheel_zoom,reset,save"
LEFT, RIGHT = 68, 12  # px beside the frames, the same in all charts so that common x axes are aligned
OPERATOR = """
    if (format == "module") return modules[module[value]] || "–"
    return targets[target[value]]
"""


def new_chart(height: int, tools: str = "", bar: bool = True, **options: Any) -> Any:
    """Return a figure as wide as its container. `bar` is whether to show the toolbar."""
    drag = tools.partition(",")[0] or None
    chart: Any = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        active_drag=drag,
        active_scroll=None,
        toolbar_location="above" if tools and bar else None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=LEFT,
        min_border_right=RIGHT,
        lod_threshold=None,
        **options,
    )
    chart.toolbar.logo = None
    chart.axis.axis_label_text_font_style = "normal"
    chart.axis.minor_tick_line_color = None
    return chart


def pointing(renderers: Sequence[Any], *tooltips: tuple[str, str], **formatters: CustomJSHover) -> HoverTool:
    """Return a hover tool with tooltips; `formatters` are by column."""
    tooltip: Any = {f"@{column}": formatter for column, formatter in formatters.items()}
    return HoverTool(renderers=list(renderers), tooltips=list(tooltips), formatters=tooltip, limit=1)


def operator_names(trace: Trace) -> CustomJSHover:
    """Return a formatter for tooltips: {target} and {module} of a column of operators."""
    return CustomJSHover(
        args={
            "targets": [clean(short(target)) for target in trace.target.values],
            "target": trace.target.codes,
            "modules": [clean(module) for module in trace.module.values],
            "module": trace.module.codes,
        },
        code=OPERATOR,
    )


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return (bytes of the unit, its name) of the largest unit, by powers of 1024, that is at most `nbytes`."""
    power = min(int(math.log2(max(nbytes, 1)) // 10), len(UNITS) - 1)
    return 1024**power, UNITS[power]
