"""The look of figures of benchmarks: a style for each method, panels, legends, axes.

Functions import matplotlib themselves, because it is needed, and has to be installed, only for drawing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.figures.points import Result, Row, method
from pg_tensile.text import printable
from pg_tensile.tools.bench.options import PEER, VANILLA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

LOG_FROM = 4.0  # ratio of an axis's largest to its smallest value from which on it is logarithmic
DIGITS = (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)  # of the ticks of a logarithmic axis
WIDTH, PANEL = 9.0, 2.4  # inches: a page of GitHub's, at 100 pixels an inch; the height of a panel
TITLE_CHARACTERS = 100  # of a line across all panels
LABEL_CHARACTERS, LEGEND_COLUMNS = 32, 4
# Okabe and Ito, Color Universal Design (2008); without their yellow, which is faint on white
BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY, PALE = "#666666", "#d9d9d9"
THIN = 0.8  # points, of the line through a method's results
DASHED: dict[str, Any] = {"color": BLACK, "linewidth": THIN, "linestyle": "--", "zorder": 1.5}  # references
MARKERS = "osD^v<>PXphd8H*"
SETTINGS: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.labelsize": 9,
    "grid.color": "#e8e8e8",
    "legend.frameon": False,
    "lines.markersize": 5.5,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text, not outlines: a fifth of the size
    "svg.hashsalt": "pg_tensile",
    "text.parse_math": False,  # a $ in a title is a $
}


class Style(NamedTuple):
    """A colour for each policy; its variants differ in marker and line (a linestyle of matplotlib's)."""

    colour: str
    marker: str
    line: Any = "-"


DOTS, SPARSE = (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1))
STYLES = {  # in the order of legends
    VANILLA: Style(BLACK, "*"),
    "optimum:early_update=true": Style(BLACK, "d"),
    "optimum": Style(BLACK, "D", DOTS),
    "joint:early_update=true": Style(BLUE, "o"),
    "joint": Style(BLUE, "s", DOTS),
    "joint:latencies=roofline:early_update=true": Style(BLUE, "<", "-."),
    "joint:latencies=roofline": Style(BLUE, ">", SPARSE),
    "tensile:early_update=true": Style(VERMILION, "P"),
    "tensile": Style(VERMILION, "X", DOTS),
    "tensile:latencies=roofline:early_update=true": Style(VERMILION, "<", "-."),
    "tensile:latencies=roofline": Style(VERMILION, ">", SPARSE),
    "capuchin": Style(GREEN, "s"),
    "vdnn": Style(PURPLE, "v"),
    "vdnn:which=all": Style(PURPLE, "^", DOTS),
    "lru": Style(ORANGE, "D"),
    "swap_all": Style(GREY, "v"),
    "recompute_all": Style(GREY, "^", DOTS),
    "peer:checkpoint": Style(SKY, "X"),
    "peer:memory_budget": Style(SKY, "p"),
    "peer:save_on_cpu": Style(SKY, "d"),
    "peer:unified_memory": Style(SKY, "8"),
}
WORDS = {
    "early_update=true": "early updates",
    "latencies=roofline": "cold start",
    "latencies=models": "cold start by models",
    "which=all": "all layers",
}


def styles(rows: Iterable[Row]) -> dict[str, Style]:
    """Return a style for each method of the rows, in the order of legends.

    A method that is not in STYLES has its policy's colour and a marker that no other method of this colour has.
    """
    methods = {method(row) for row in rows}
    chosen = {name: style for name, style in STYLES.items() if name in methods}
    for name in sorted(methods - chosen.keys()):
        colour = STYLES.get(name.partition(":")[0], Style(GREY, "")).colour
        used = {style.marker for style in (*STYLES.values(), *chosen.values()) if style.colour == colour}
        chosen[name] = Style(colour, next((marker for marker in MARKERS if marker not in used), MARKERS[0]), SPARSE)
    return chosen


def named(name: str) -> str:
    """Return a method's name for legends: "joint, early updates", "checkpoint (PyTorch)"."""
    if name == VANILLA:
        return "vanilla"
    if name.startswith(PEER):
        return f"{name.removeprefix(PEER)} (PyTorch)"
    return ", ".join(WORDS.get(part, part) for part in name.split(":"))


# ---- text, panels, legends ------------------------------------------------------------------------------------------


def fitted(text: str, characters: int, lines: int = 2) -> str:
    """Wrap the text into at most `lines` lines of so many characters, cut with … if it is longer."""
    return "\n".join(textwrap.wrap(printable(text), characters, max_lines=lines, placeholder="…"))


def new_panels(titles: Sequence[str], shared: bool, height: float = PANEL) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title, at most three in a row. `shared`: whether all have the same axes."""
    from matplotlib.figure import Figure

    across = {1: 1, 2: 2, 4: 2}.get(len(titles), 3)
    down = -(-len(titles) // across)
    figure = Figure(figsize=(WIDTH, 0.5 + height * max(down, 3 / (1 + across))), layout="constrained")
    grid = figure.subplots(down, across, sharex=shared, sharey=shared, squeeze=False).flatten().tolist()
    for axes in grid[len(titles) :]:
        axes.remove()
    for number, (axes, title) in enumerate(zip(grid, titles, strict=False)):
        axes.set_title(fitted(title, TITLE_CHARACTERS // across))
        if number + across >= len(titles):  # no panel below it
            axes.tick_params(labelbottom=True)
    return figure, grid[: len(titles)]


def legend(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    """Draw the legend above the panels, in at most LEGEND_COLUMNS columns; the figure grows by its lines."""
    for handle in handles:
        handle.set_label(fitted(str(handle.get_label()), LABEL_CHARACTERS, lines=1))
    across = min(len(handles), LEGEND_COLUMNS)
    figure.legend(handles=handles, loc="outside upper center", ncols=across)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(handles) // across))


def entries(shown: Sequence[Result], styles_of: Mapping[str, Style]) -> list[Line2D]:
    """Return the legend's entries: these methods, and the meaning of hollow markers if there are any."""
    from matplotlib.lines import Line2D

    methods = {result.method for result in shown}
    lines = [
        Line2D([], [], color=style.colour, marker=style.marker, ls=style.line, linewidth=THIN, label=named(name))
        for name, style in styles_of.items()
        if name in methods
    ]
    if not all(result.right for result in shown):
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": GREY, "linestyle": ""}
        lines.append(Line2D([], [], marker="o", label="hollow: wrong results", **hollow))
    return lines


def draw_line(axes: Axes, points: Iterable[tuple[float, float, bool]], style: Style) -> None:
    """Draw a method's points (x, y, right) with a thin line through them."""
    ordered = sorted(points)
    across, up = [point[0] for point in ordered], [point[1] for point in ordered]
    axes.plot(across, up, color=style.colour, linestyle=style.line, linewidth=THIN)
    for x, y, good in ordered:
        face = style.colour if good else "white"
        axes.plot(x, y, marker=style.marker, markerfacecolor=face, markeredgecolor=style.colour, zorder=3)


def set_ticks(axis: Axis, places: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def scale_eor(panels: Iterable[Axes], values: Sequence[float]) -> None:
    """Make the axes logarithmic if the values need it."""
    low, high = min(values), max(values)
    if high < LOG_FROM * low:
        return
    scales = [[digit * 10.0**power for power in range(-9, 9) for digit in digits] for digits in DIGITS]
    inside = [[tick for tick in scale if low / 1.1 <= tick <= high * 1.1] for scale in scales]
    for axes in panels:
        axes.set_yscale("log")
        set_ticks(axes.yaxis, next((ticks for ticks in inside if len(ticks) <= 8), inside[-1]))
