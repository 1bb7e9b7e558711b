"""Figures of benchmarks, from the rows that `pg-tensile bench … --json` writes.

`pareto`: memory saved against time, with the Pareto front over all methods. `memory`: device memory over an iteration
(timeline.py). `series`: the paper's figures 6 and 7, against the number of workloads or the batch size. A method has
one colour and one marker in all of them; hollow markers are wrong results.

matplotlib is needed only to draw; `drawing` imports it and restores its settings.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.figures.points import Curve, Result, Row, curves, front, grouped, results, stem
from benchmarks.figures.style import (
    DASHED,
    GREY,
    PALE,
    PANEL,
    SETTINGS,
    TITLE_CHARACTERS,
    WIDTH,
    Style,
    draw_line,
    entries,
    fitted,
    legend,
    named,
    new_panels,
    scale_eor,
    set_ticks,
    styles,
)
from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.options import VANILLA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

CUT = 2.0  # times vanilla's iteration: `memory` cuts slower ones there, so that the others remain readable

# ---- figures --------------------------------------------------------------------------------------------------------


def pareto(rows: Iterable[Row], styles_of: Mapping[str, Style]) -> Figure | None:
    """Draw memory saved against time, a panel for each case. None if no method but vanilla has numbers."""
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
            draw_line(axes, ((result.saved, result.eor, result.right) for result in several), styles_of[name])
    scale_eor(panels, [result.eor for result in shown])
    figure.supxlabel("memory saved (MSR), % of vanilla's peak")
    figure.supylabel("time of a step (EOR), vanilla = 1")
    line = Line2D([], [], color=GREY, linewidth=1.2, label="Pareto front")
    legend(figure, [*entries(shown, styles_of), line])
    return figure


def memory(rows: Iterable[Row], styles_of: Mapping[str, Style]) -> Figure | None:
    """Draw device memory over an iteration, a panel for each case: vanilla filled, the budget dashed.

    Of several budgets the one of most methods is shown, the smallest of equal ones. None if no row has a timeline.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels_of = of_one_budget(curves(rows))
    if not panels_of:
        return None
    figure, panels = new_panels(list(panels_of), shared=False)
    in_seconds = min(time_shown(own) for own in panels_of.values()) >= 2e3
    in_gigabytes = min(max(max(curve.bytes) for curve in own) for own in panels_of.values()) >= 1e9
    for axes, own in zip(panels, panels_of.values(), strict=True):
        draw_curves(axes, own, styles_of, 1e-3 if in_seconds else 1.0, 1e-9 if in_gigabytes else 1e-6)
    cut = any(curve.ms[-1] > time_shown(own) for own in panels_of.values() for curve in own)
    unit = ("s" if in_seconds else "ms") + f", up to {CUT:g} times vanilla's" * cut
    figure.supxlabel(f"time in the iteration, {unit}")
    figure.supylabel(f"device memory, {'GB' if in_gigabytes else 'MB'}")
    shown = [curve for own in panels_of.values() for curve in own]
    methods = {curve.method for curve in shown}
    handles: list[Line2D | Patch] = [Patch(color=PALE, label=named(VANILLA))] if VANILLA in methods else []
    for name in (name for name in styles_of if name in methods - {VANILLA}):
        handles.append(Line2D([], [], color=styles_of[name].colour, linestyle=styles_of[name].line, label=named(name)))
    if any(curve.limit is not None for curve in shown):
        handles.append(Line2D([], [], label="budget", **DASHED))
    legend(figure, handles)
    return figure


def of_one_budget(shown: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Return the curves by title: of each case those of one budget, and those without a budget."""
    by_heading: dict[str, list[Curve]] = {}
    for title, own in grouped(shown, lambda curve: curve.case).items():
        budgets = grouped((curve for curve in own if curve.budget), lambda curve: curve.budget)
        chosen = min(budgets, key=lambda budget: (-len(budgets[budget]), budgets[budget][0].limit or 0), default="")
        heading = f"{title} at {chosen}" if chosen else title
        by_heading[heading] = [curve for curve in own if curve.budget in ("", chosen)]
    return by_heading


def time_shown(shown: Sequence[Curve]) -> float:
    """Return the milliseconds that a panel shows: until the last iteration ends, but at most CUT × vanilla's."""
    vanilla_ms = max((curve.ms[-1] for curve in shown if curve.method == VANILLA), default=math.inf)
    return min(max(curve.ms[-1] for curve in shown), CUT * vanilla_ms)


def draw_curves(
    axes: Axes, shown: Sequence[Curve], styles_of: Mapping[str, Style], per_ms: float, per_byte: float
) -> None:
    """Draw a panel; `per_ms`, `per_byte`: length of a millisecond and of a byte on its axes."""
    for curve in shown:
        x, y = [ms * per_ms for ms in curve.ms], [nbytes * per_byte for nbytes in curve.bytes]
        if curve.method == VANILLA:
            axes.fill_between(x, y, step="post", color=PALE, linewidth=0, zorder=1)
        else:
            style = styles_of[curve.method]
            axes.step(x, y, where="post", color=style.colour, linestyle=style.line, linewidth=1.0)
        if curve.limit is not None:
            axes.axhline(curve.limit * per_byte, **DASHED)
    axes.set_xlim(0, 1.02 * per_ms * time_shown(shown))
    axes.set_ylim(bottom=0)


class Abscissa(NamedTuple):
    """Abscissa of a series. `case`: pattern of the titles of cases, which contain the network and the number."""

    case: re.Pattern[str]
    label: str
    logarithmic: bool


SERIES = {
    "fig6": Abscissa(re.compile(r"(?P<number>\d{1,9}) × (?P<network>.+)"), "number of workloads", False),
    "fig7": Abscissa(re.compile(r"(?P<network>.+), batch (?P<number>\d{1,9})"), "batch size", True),
}


class Point(NamedTuple):
    """A result of a series, with its network and its number on the abscissa."""

    network: str
    number: int
    result: Result


def series(rows: Iterable[Row], styles_of: Mapping[str, Style], against: Abscissa) -> Figure | None:
    """Draw a column for each network: memory saved, below it time, and a line for each method and budget.

    None if no method but vanilla has numbers.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    matches = [(against.case.fullmatch(result.case), result) for result in results(rows) if result.method != VANILLA]
    shown = [Point(match["network"], int(match["number"]), result) for match, result in matches if match]
    if not shown:
        return None
    networks = grouped(shown, lambda point: point.network)
    figure = Figure(figsize=(WIDTH, 0.5 + 2 * PANEL), layout="constrained")
    grid = figure.subplots(2, len(networks), sharex=True, sharey="row", squeeze=False)
    for above, below, (network, own) in zip(*grid.tolist(), networks.items(), strict=True):
        above.set_title(fitted(network, TITLE_CHARACTERS // len(networks)))
        above.axhline(0, **DASHED)
        below.axhline(1, **DASHED)
        for (name, _), several in grouped(own, lambda point: point.result[1:3]).items():
            draw_line(
                above, ((point.number, point.result.saved, point.result.right) for point in several), styles_of[name]
            )
            draw_line(
                below, ((point.number, point.result.eor, point.result.right) for point in several), styles_of[name]
            )
    for axes in grid.flat:
        if against.logarithmic:
            axes.set_xscale("log", base=2)
        set_ticks(axes.xaxis, sorted({point.number for point in shown}))
    scale_eor(grid[1], [1.0, *(point.result.eor for point in shown)])
    grid[0, 0].set_ylabel("memory saved (MSR), %")
    grid[1, 0].set_ylabel("time (EOR), vanilla = 1")
    figure.supxlabel(against.label)
    legend(figure, [*entries([point.result for point in shown], styles_of), Line2D([], [], label="vanilla", **DASHED)])
    return figure


# ---- files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Set up matplotlib for figures inside the context, whatever its settings are outside.

    Raises OptionError if it is missing. No backend is chosen, because figures are only saved.
    """
    try:
        import matplotlib
    except ImportError:
        hint = "pip install matplotlib installs it."
        raise OptionError("figures need matplotlib, which is not installed", hint) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def check(folder: Path | str) -> None:
    """Check before a run that its figures can be drawn into the folder. Raises OptionError."""
    with drawing(), writing(folder), tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def writing(folder: Path | str) -> Iterator[None]:
    """Create the folder; OSErrors, those of the body included, become OptionErrors."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        hint = "Name a folder that can be written."
        raise OptionError(f'cannot write figures to "{folder}": {error.strerror or error}', hint) from None


def figures(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """Yield all figures for which there is data, with the names of their files; to be called inside `drawing`."""
    styles_of = styles(rows)
    for experiment, own in grouped(rows, stem).items():
        if experiment in SERIES:
            drawn = {experiment: series(own, styles_of, SERIES[experiment])}
        else:
            drawn = {f"pareto-{experiment}": pareto(own, styles_of)}
        drawn[f"memory-{experiment}"] = memory(own, styles_of)
        yield from ((name, figure) for name, figure in drawn.items() if figure is not None)


def draw(rows: Sequence[Row], folder: Path | str) -> list[Path]:
    """Draw the figures that the rows have data for, and return the files.

    They are `pareto-EXPERIMENT`, `fig6`, `fig7`, `memory-EXPERIMENT`, as .svg. The same rows give the same bytes.
    Raises OptionError if the folder cannot be written or matplotlib is missing.
    """
    written: list[Path] = []
    with drawing(), writing(folder):
        for name, figure in figures(rows):
            written.append(Path(folder) / f"{name}.svg")
            figure.savefig(written[-1], metadata=dict.fromkeys(("Date", "Creator")))
    return written
