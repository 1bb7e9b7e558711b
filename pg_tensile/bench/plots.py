"""Figures of benchmarks, from the rows that `pg-tensile bench … --json` writes.

`pareto`: what methods save and what they cost, with the Pareto front over all of them. `memory`: device memory over an
iteration (timeline.py). `series`: the paper's figures 6 and 7, against the number of workloads or the batch size. A
method has one colour and one marker in all of them; hollow markers are results that are wrong.

matplotlib is needed by those only who draw; `drawing` imports it and leaves its settings as they were.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pg_tensile.bench.options import PEER, VANILLA, parse_budget
from pg_tensile.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

Row = Mapping[str, Any]
WRONG = 1e-3  # a peer whose gradients differ by more of the largest element computes something else
LOG_FROM = 4.0  # the largest of an axis as a multiple of the smallest
CUT = 2.0  # times vanilla's iteration: of slower ones memory shows the beginning, so that all others can be read
DIGITS = (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)  # of the ticks of a logarithmic axis
T = TypeVar("T")
K = TypeVar("K")

# ---- looks ----------------------------------------------------------------------------------------------------------

WIDTH, PANEL = 9.0, 2.4  # inches: a page of GitHub's, at 100 pixels an inch; the height of a panel
MARGIN = 0.5  # inches of a panel that its title leaves free
PIXELS = 200  # an inch, in PNG
# Okabe and Ito, Color Universal Design (2008); without their yellow, which is faint on white
BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
GREY, PALE = "#666666", "#d9d9d9"
THIN = 0.8  # points, of the line through a method's results
DASHED: dict[str, Any] = {"color": BLACK, "linewidth": THIN, "linestyle": "--", "zorder": 1.5}  # what to compare with
MARKERS = "osD^v<>PXphd8H*"
SETTINGS: dict[Any, Any] = {
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
    """A style for each method of the rows, in the order of legends. What STYLES has not gets its policy's colour and a
    marker that nobody with this colour has."""
    methods = {method(row) for row in rows}
    found = {name: style for name, style in STYLES.items() if name in methods}
    for name in sorted(methods - found.keys()):
        colour = STYLES.get(name.partition(":")[0], Style(GREY, "")).colour
        used = {style.marker for style in (*STYLES.values(), *found.values()) if style.colour == colour}
        found[name] = Style(colour, next((marker for marker in MARKERS if marker not in used), MARKERS[0]), SPARSE)
    return found


def named(name: str) -> str:
    """A method for people: "joint, early updates", "checkpoint (PyTorch)"."""
    if name == VANILLA:
        return "vanilla"
    if name.startswith(PEER):
        return f"{name.removeprefix(PEER)} (PyTorch)"
    return ", ".join(WORDS.get(part, part) for part in name.split(":"))


# ---- rows -----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a method did in a case: memory saved in percent of vanilla's peak, and the time of a step as a multiple of
    vanilla's. `right`: what the function of that name says."""

    case: str
    method: str
    budget: str
    saved: float
    eor: float
    right: bool


class Curve(NamedTuple):
    """Device memory over an iteration (timeline.py). `limit`: the budget in bytes, None: there is none."""

    case: str
    method: str
    budget: str
    limit: int | None
    ms: Sequence[float]
    bytes: Sequence[int]


def results(rows: Iterable[Row]) -> list[Result]:
    """Of the rows that have the numbers and no error."""
    found = []
    for row in rows:
        msr, eor = number(row, "msr"), number(row, "eor")
        if not row.get("error") and msr is not None and eor is not None and eor > 0:
            found.append(Result(case(row), method(row), str(row.get("budget") or ""), 100 * msr, eor, right(row)))
    return found


def curves(rows: Iterable[Row]) -> list[Curve]:
    """Of the rows that have a timeline and no error."""
    found = []
    for row in rows:
        line = row.get("timeline") or {}
        if not row.get("error") and line.get("ms") and line.get("bytes"):
            budget = str(row.get("budget") or "")
            found.append(Curve(case(row), method(row), budget, budget_bytes(row), line["ms"], line["bytes"]))
    return found


def case(row: Row) -> str:
    return str(row.get("case") or row.get("model") or "")


def stem(row: Row) -> str:
    """The experiment, as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", str(row.get("experiment") or "bench"))


def method(row: Row) -> str:
    """What a row measured, whatever its budget (a share of activations to keep is one) and the time that planning may
    take."""
    label = str(row.get("label") or row.get("policy"))
    return label.partition("=")[0] if label.startswith(PEER) else re.sub(r":limit_s=[^:]*", "", label)


def number(row: Row, key: str) -> float | None:
    """None where there is none, or it is not finite."""
    value = row.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def right(row: Row) -> bool:
    """Whether the results are eager PyTorch's: a policy's to the bit, where they were compared; a peer's gradients
    about so. (An infinite difference is None in JSON.)"""
    if row.get("bit_identical") is not False:
        return True
    difference = number(row, "gradient_difference")
    return method(row).startswith(PEER) and difference is not None and difference <= WRONG


def budget_bytes(row: Row) -> int | None:
    """What a budget like "60%" or "1048576" is for this row."""
    vanilla = number(row, "vanilla_peak_bytes")
    if not row.get("budget") or vanilla is None:
        return None
    return parse_budget(str(row["budget"])).nbytes(int(vanilla))


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (saved, eor) for which no other point saves as much in less time, or more in as little; by what they
    save."""
    found: list[tuple[float, float]] = []
    for saved, eor in sorted(points, key=lambda each: (-each[0], each[1])):
        if not found or eor < found[-1][1]:
            found.append((saved, eor))
    return found[::-1]


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """In the order in which keys appear."""
    found: dict[K, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


# ---- text, panels, legends ------------------------------------------------------------------------------------------


def fitted(text: str, inches: float, lines: int = 1) -> str:
    """The text in so many lines of this width at most, cut with … where it is longer."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    for characters in range(min(len(plain), 200), 0, -1):
        found = textwrap.wrap(plain, characters, max_lines=lines, placeholder="…")
        if max(map(width, found), default=0.0) <= inches:
            return "\n".join(found)
    return ""


def width(text: str) -> float:
    """Inches that a line of text takes in bold."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(weight="bold")))
    font.set_size(SETTINGS["font.size"], 720)
    font.set_text(text)
    return font.get_width_height()[0] / 64 / 720  # it counts in 64ths of a pixel


def new_panels(titles: Sequence[str], shared: bool, height: float = PANEL) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, three in a row at most; `shared`: all have the same axes."""
    from matplotlib.figure import Figure

    across = {1: 1, 2: 2, 4: 2}.get(len(titles), 3)
    down = -(-len(titles) // across)
    figure = Figure(figsize=(WIDTH, 0.5 + height * max(down, 3 / (1 + across))), layout="constrained")
    grid = figure.subplots(down, across, sharex=shared, sharey=shared, squeeze=False).flatten().tolist()
    for axes in grid[len(titles) :]:
        axes.remove()
    for place, (axes, title) in enumerate(zip(grid, titles, strict=False)):
        axes.set_title(fitted(title, WIDTH / across - MARGIN, lines=2))
        if place + across >= len(titles):  # nothing below it
            axes.tick_params(labelbottom=True)
    return figure, grid[: len(titles)]


def legend(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    """Above the panels, in as many columns as there is room for. Makes the figure higher by its lines."""
    for handle in handles:
        handle.set_label(fitted(str(handle.get_label()), WIDTH / 2 - 0.8))
    widest = max(width(str(handle.get_label())) for handle in handles) + 0.6
    across = min(len(handles), int((WIDTH - 0.2) / widest))
    figure.legend(handles=handles, loc="outside upper center", ncols=across)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(handles) // across))


def entries(shown: Sequence[Result], known: Mapping[str, Style]) -> list[Line2D]:
    """Of the legend: these methods, and what hollow markers are if there are any."""
    from matplotlib.lines import Line2D

    methods = {result.method for result in shown}
    found = [
        Line2D([], [], color=style.colour, marker=style.marker, ls=style.line, linewidth=THIN, label=named(name))
        for name, style in known.items()
        if name in methods
    ]
    if not all(result.right for result in shown):
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": GREY, "linestyle": ""}
        found.append(Line2D([], [], marker="o", label="hollow: wrong results", **hollow))
    return found


def draw_line(axes: Axes, points: Iterable[tuple[float, float, bool]], style: Style) -> None:
    """A method's points (x, y, right) with a thin line through them."""
    ordered = sorted(points)
    across, up = [each[0] for each in ordered], [each[1] for each in ordered]
    axes.plot(across, up, color=style.colour, linestyle=style.line, linewidth=THIN)
    for x, y, good in ordered:
        face = style.colour if good else "white"
        axes.plot(x, y, marker=style.marker, markerfacecolor=face, markeredgecolor=style.colour, zorder=3)


def set_ticks(axis: Axis, places: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def scale_eor(panels: Iterable[Axes], values: Sequence[float]) -> None:
    """Logarithmic where the values need it."""
    low, high = min(values), max(values)
    if high < LOG_FROM * low:
        return
    scales = [[digit * 10.0**power for power in range(-9, 9) for digit in digits] for digits in DIGITS]
    inside = [[tick for tick in scale if low / 1.1 <= tick <= high * 1.1] for scale in scales]
    for axes in panels:
        axes.set_yscale("log")
        set_ticks(axes.yaxis, next((ticks for ticks in inside if len(ticks) <= 8), inside[-1]))


# ---- figures --------------------------------------------------------------------------------------------------------


def pareto(rows: Iterable[Row], known: Mapping[str, Style]) -> Figure | None:
    """What is saved against what it costs, a panel for each case. None where no method but vanilla has numbers."""
    from matplotlib.lines import Line2D

    shown = results(rows)
    if all(result.method == VANILLA for result in shown):
        return None
    cases = grouped(shown, lambda result: result.case)
    figure, panels = new_panels(list(cases), shared=True, height=1.2 * PANEL)
    for axes, own in zip(panels, cases.values(), strict=True):
        best = front((result.saved, result.eor) for result in own if result.right)
        if best:
            axes.plot(*zip(*best, strict=True), color=GREY, linewidth=1.2, drawstyle="steps-pre", zorder=1.5)
        for name, several in grouped(own, lambda result: result.method).items():
            draw_line(axes, ((result.saved, result.eor, result.right) for result in several), known[name])
    scale_eor(panels, [result.eor for result in shown])
    figure.supxlabel("memory saved (MSR), % of vanilla's peak")
    figure.supylabel("time of a step (EOR), vanilla = 1")
    line = Line2D([], [], color=GREY, linewidth=1.2, label="Pareto front")
    legend(figure, [*entries(shown, known), line])
    return figure


def memory(rows: Iterable[Row], known: Mapping[str, Style]) -> Figure | None:
    """Device memory over an iteration, a panel for each case: vanilla filled, the budget dashed. Of several budgets it
    is the smallest of those that most methods have. None where no row has a timeline."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels_of = of_one_budget(curves(rows))
    if not panels_of:
        return None
    figure, panels = new_panels(list(panels_of), shared=False)
    in_seconds = min(time_shown(own) for own in panels_of.values()) >= 2e3
    in_gigabytes = min(max(max(curve.bytes) for curve in own) for own in panels_of.values()) >= 1e9
    for axes, own in zip(panels, panels_of.values(), strict=True):
        draw_curves(axes, own, known, 1e-3 if in_seconds else 1.0, 1e-9 if in_gigabytes else 1e-6)
    cut = any(curve.ms[-1] > time_shown(own) for own in panels_of.values() for curve in own)
    unit = ("s" if in_seconds else "ms") + f", up to {CUT:g} times vanilla's" * cut
    figure.supxlabel(f"time in the iteration, {unit}")
    figure.supylabel(f"device memory, {'GB' if in_gigabytes else 'MB'}")
    shown = [curve for own in panels_of.values() for curve in own]
    methods = {curve.method for curve in shown}
    handles: list[Line2D | Patch] = [Patch(color=PALE, label=named(VANILLA))] if VANILLA in methods else []
    for name in (name for name in known if name in methods - {VANILLA}):
        handles.append(Line2D([], [], color=known[name].colour, linestyle=known[name].line, label=named(name)))
    if any(curve.limit is not None for curve in shown):
        handles.append(Line2D([], [], label="budget", **DASHED))
    legend(figure, handles)
    return figure


def of_one_budget(shown: Iterable[Curve]) -> dict[str, list[Curve]]:
    """By title: of each case the curves of one budget and those without any."""
    found: dict[str, list[Curve]] = {}
    for title, own in grouped(shown, lambda curve: curve.case).items():
        budgets = grouped((curve for curve in own if curve.budget), lambda curve: curve.budget)
        chosen = min(budgets, key=lambda each: (-len(budgets[each]), budgets[each][0].limit or 0), default="")
        heading = f"{title} at {chosen}" if chosen else title
        found[heading] = [curve for curve in own if curve.budget in ("", chosen)]
    return found


def time_shown(shown: Sequence[Curve]) -> float:
    """Milliseconds of a panel: until the last iteration ends, but no more than CUT of vanilla's."""
    vanilla_ms = max((curve.ms[-1] for curve in shown if curve.method == VANILLA), default=math.inf)
    return min(max(curve.ms[-1] for curve in shown), CUT * vanilla_ms)


def draw_curves(axes: Axes, shown: Sequence[Curve], known: Mapping[str, Style], per_ms: float, per_byte: float) -> None:
    """A panel; `per_ms`, `per_byte`: what a millisecond and a byte are on its axes."""
    for curve in shown:
        x, y = [ms * per_ms for ms in curve.ms], [nbytes * per_byte for nbytes in curve.bytes]
        if curve.method == VANILLA:
            axes.fill_between(x, y, step="post", color=PALE, linewidth=0, zorder=1)
        else:
            style = known[curve.method]
            axes.step(x, y, where="post", color=style.colour, linestyle=style.line, linewidth=1.0)
        if curve.limit is not None:
            axes.axhline(curve.limit * per_byte, **DASHED)
    axes.set_xlim(0, 1.02 * per_ms * time_shown(shown))
    axes.set_ylim(bottom=0)


class Abscissa(NamedTuple):
    """What a series is drawn against. `case`: where the titles of cases have the network and the number."""

    case: re.Pattern[str]
    label: str
    logarithmic: bool


SERIES = {
    "fig6": Abscissa(re.compile(r"(?P<number>\d{1,9}) × (?P<network>.+)"), "number of workloads", False),
    "fig7": Abscissa(re.compile(r"(?P<network>.+), batch (?P<number>\d{1,9})"), "batch size", True),
}


class Place(NamedTuple):
    """A result of a series."""

    network: str
    number: int
    result: Result


def series(rows: Iterable[Row], known: Mapping[str, Style], against: Abscissa) -> Figure | None:
    """A column for each network: what is saved, below it what that costs, and a line for each method and budget. None
    where no method but vanilla has numbers."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    matches = [(against.case.fullmatch(result.case), result) for result in results(rows) if result.method != VANILLA]
    shown = [Place(match["network"], int(match["number"]), result) for match, result in matches if match]
    if not shown:
        return None
    networks = grouped(shown, lambda place: place.network)
    figure = Figure(figsize=(WIDTH, 0.5 + 2 * PANEL), layout="constrained")
    grid = figure.subplots(2, len(networks), sharex=True, sharey="row", squeeze=False)
    for above, below, (network, own) in zip(*grid.tolist(), networks.items(), strict=True):
        above.set_title(fitted(network, (WIDTH - MARGIN) / len(networks) - 0.1, lines=2))
        above.axhline(0, **DASHED)
        below.axhline(1, **DASHED)
        for (name, _), several in grouped(own, lambda place: place.result[1:3]).items():
            draw_line(above, ((each.number, each.result.saved, each.result.right) for each in several), known[name])
            draw_line(below, ((each.number, each.result.eor, each.result.right) for each in several), known[name])
    for axes in grid.flat:
        if against.logarithmic:
            axes.set_xscale("log", base=2)
        set_ticks(axes.xaxis, sorted({place.number for place in shown}))
    scale_eor(grid[1], [1.0, *(place.result.eor for place in shown)])
    grid[0, 0].set_ylabel("memory saved (MSR), %")
    grid[1, 0].set_ylabel("time (EOR), vanilla = 1")
    figure.supxlabel(against.label)
    legend(figure, [*entries([place.result for place in shown], known), Line2D([], [], label="vanilla", **DASHED)])
    return figure


# ---- files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Inside, figures look as they should, whatever matplotlib's settings are outside. Raises OptionError where it is
    missing. No backend is chosen: figures are saved without one."""
    try:
        import matplotlib
    except ImportError:
        hint = "Install it: pip install matplotlib, or pg_tensile[bench]."
        raise OptionError("figures need matplotlib, which is not installed", hint) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def check(folder: Path | str) -> None:
    """Finds out before a run whether its figures can be drawn there. Raises OptionError."""
    with drawing(), writing(folder), tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Makes the folder; OSErrors, inside too, become OptionErrors."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        hint = "Name a folder that can be written."
        raise OptionError(f'cannot write figures to "{folder}": {error.strerror or error}', hint) from None


def figures(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """All for which there is data, with the names of their files; to be called inside `drawing`."""
    known = styles(rows)
    for experiment, own in grouped(rows, stem).items():
        if experiment in SERIES:
            found = {experiment: series(own, known, SERIES[experiment])}
        else:
            found = {f"pareto-{experiment}": pareto(own, known)}
        found[f"memory-{experiment}"] = memory(own, known)
        yield from ((name, figure) for name, figure in found.items() if figure is not None)


def draw(rows: Sequence[Row], folder: Path | str) -> list[Path]:
    """Draws what the rows have data for: `pareto-EXPERIMENT`, `fig6`, `fig7`, `memory-EXPERIMENT`, each as .png and
    .svg. The same rows give the same bytes. Returns the files; raises OptionError where the folder cannot be written
    or matplotlib is missing."""
    written: list[Path] = []
    with drawing(), writing(folder):
        for name, figure in figures(rows):
            for kind, silent in (("png", ["Software"]), ("svg", ["Date", "Creator"])):
                written.append(Path(folder) / f"{name}.{kind}")
                figure.savefig(written[-1], dpi=PIXELS, metadata=dict.fromkeys(silent))
    return written
