"""Texts and pictures for a terminal, in a given number of cells, without control sequences.

Text from other users (names, reasons, errors, queries) must reach the screen through `fit` or `wrap` only.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size

from pg_tensile.text import printable

BLOCKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"


def fit(text: str, width: int, right: bool = False) -> str:
    """Return exactly `width` cells: the text, cut with … if it is longer or padded; `right` aligns it to the right."""
    text = printable(text[: 4 * max(width, 1) + 1])  # limits the work on very long texts
    size = cell_len(text)
    if width <= 0:
        return ""
    if size > width:
        return set_cell_size(text, width - 1) + "…"
    return " " * (width - size) + text if right else text + " " * (width - size)


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Return the text in at most `lines` lines of at most `width` cells, cut with … if it is longer."""
    width, text = max(width, 2), printable(text[: (lines + 1) * 4 * max(width, 2)])
    wrapped = textwrap.wrap(text, width)
    if any(cell_len(line) > width for line in wrapped):
        wrapped = chop_cells(text, width)
    if len(wrapped) > lines:
        wrapped = [*wrapped[: lines - 1], fit(f"{wrapped[lines - 1]} {wrapped[lines]}", width).rstrip()]
    return wrapped


def join(parts: Iterable[str | None], width: int, between: str = "  ") -> str:
    """Return the first parts, as many as fit into `width` cells; parts that are None are skipped."""
    joined = ""
    for part in parts:
        if part is None:
            continue
        longer = joined + between + part if joined else part
        if cell_len(printable(longer)) > width:
            break
        joined = longer
    return joined


def flow(parts: Iterable[str | None], width: int, between: str = "  ") -> list[str]:
    """Return all parts but those that are None, on as many lines as needed; parts longer than a line are not cut."""
    lines: list[str] = []
    for part in parts:
        if part is None:
            continue
        if lines and cell_len(printable(lines[-1] + between + part)) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


# ---- pictures -------------------------------------------------------------------------------------------------------


def bar(share: float | None, width: int) -> str:
    """Return a bar that is filled up to `share`, from 0 to 1, in eighths of a cell."""
    eighths = round(min(max(share or 0.0, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width, "·")


def parts_bar(parts: Sequence[tuple[float, str]], whole: float, width: int) -> str:
    """Return a bar of several (part of `whole`, character), one after the other."""
    filled, total = "", 0.0
    for part, character in parts:
        total += max(0.0, part)
        end = round(width * min(1.0, total / whole)) if whole > 0 else 0
        filled += character * (end - len(filled))
    return filled.ljust(width, "·")


def sparkline(points: Sequence[tuple[float, float]], width: int) -> str:
    """Return the course of y over x, as one block character for each of `width` equal intervals of x.

    Points are (x, y) in the order of x. A block's height is the mean of its points; an interval without points repeats
    the height before it."""
    if not points or width <= 0:
        return ""
    first, last = points[0][0], points[-1][0]
    parts: list[list[float]] = [[] for _ in range(width if last > first else 1)]
    for x, y in points:
        index = int((x - first) / (last - first) * width) if last > first else 0
        parts[min(index, len(parts) - 1)].append(y)
    heights: list[float] = []
    for part in parts:
        heights.append(sum(part) / len(part) if part else heights[-1])
    low, span = min(heights), max(heights) - min(heights)
    levels = [(height - low) / span if 0 < span < math.inf else 0.0 for height in heights]
    return "".join(BLOCKS[round(level * (len(BLOCKS) - 1))] for level in levels)
