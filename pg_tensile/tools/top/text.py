"""Numbers and texts for a terminal: short, in cells of a fixed width, without control sequences.

Text from other users (names, reasons, errors, queries) must reach the screen through `fit` or `wrap` only.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size

NONE = "–"  # in place of a missing number
BLOCKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
DAY = 86_400


def plain(text: str) -> str:
    """Return the text with spaces for unprintable characters: controls, escapes, marks that change the direction."""
    return "".join(each if each.isprintable() else " " for each in text)


def fit(text: str, width: int, right: bool = False) -> str:
    """Return exactly `width` cells: the text, cut with … if it is longer or padded; `right` aligns it to the right."""
    text = plain(text[: 4 * max(width, 1) + 1])  # limits the work on very long texts
    size = cell_len(text)
    if width <= 0:
        return ""
    if size > width:
        return set_cell_size(text, width - 1) + "…"
    return " " * (width - size) + text if right else text + " " * (width - size)


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Return the text in at most `lines` lines of at most `width` cells, cut with … if it is longer."""
    width, text = max(width, 2), plain(text[: (lines + 1) * 4 * max(width, 2)])
    found = textwrap.wrap(text, width)
    if any(cell_len(line) > width for line in found):
        found = chop_cells(text, width)
    if len(found) > lines:
        found = [*found[: lines - 1], fit(f"{found[lines - 1]} {found[lines]}", width).rstrip()]
    return found


def join(parts: Iterable[str | None], width: int, between: str = "  ") -> str:
    """Return the first parts, as many as fit into `width` cells; parts that are None are skipped."""
    found = ""
    for part in parts:
        if part is None:
            continue
        longer = found + between + part if found else part
        if cell_len(plain(longer)) > width:
            break
        found = longer
    return found


def flow(parts: Iterable[str | None], width: int, between: str = "  ") -> list[str]:
    """Return all parts but those that are None, on as many lines as needed; parts longer than a line are not cut."""
    lines: list[str] = []
    for part in parts:
        if part is None:
            continue
        if lines and cell_len(plain(lines[-1] + between + part)) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


# ---- numbers --------------------------------------------------------------------------------------------------------


def size(nbytes: float | None) -> str:
    """Return a memory size in units of 1024 with three digits, "98.0 MB", in up to seven cells."""
    if nbytes is None:
        return NONE
    value = float(nbytes)
    for unit in UNITS:
        if abs(value) < 999.5 or unit == UNITS[-1]:
            break
        value /= 1024
    return f"{value:.{0 if unit == UNITS[0] else _digits(value)}f} {unit}"


def short(value: float | None) -> str:
    """Return a number with three digits, "0.53", "42.5", "1.20k", "12.3M", in up to five cells."""
    if value is None:
        return NONE
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.{_digits(value)}f}{unit}"


def _digits(value: float) -> int:
    """Return the number of decimals that gives three digits."""
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def count(value: int | None) -> str:
    """Return a whole number: in full up to 9999, else as `short` does."""
    return str(value) if value is not None and abs(value) < 10_000 else short(value)


def loss(value: float | None) -> str:
    """Return a loss with about five digits, "0.1134", "12.345", "1.2e-05", in up to seven cells."""
    if value is None:
        return NONE
    magnitude = abs(value)
    if magnitude and not 1e-3 <= magnitude < 1e5:
        return f"{value:.1e}"
    return f"{value:.{4 if magnitude < 10 else 3 if magnitude < 100 else 2 if magnitude < 1000 else 1}f}"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f}%"


def duration(seconds: float | None) -> str:
    """Return a duration, "0.08s", "42s", "12:34", "5h12m", "3d04h", in up to six cells."""
    if seconds is None:
        return NONE
    if seconds < 9.95:
        return f"{max(0.0, seconds):.{2 if 0 < seconds < 0.995 else 1}f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < DAY:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // DAY}d{whole % DAY // 3600:02}h" if whole < 100 * DAY else ">99d"


# ---- pictures -------------------------------------------------------------------------------------------------------


def bar(share: float | None, width: int) -> str:
    """Return a bar that is filled up to `share`, from 0 to 1, in eighths of a cell."""
    eighths = round(min(max(share or 0.0, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width, "·")


def parts_bar(parts: Sequence[tuple[float, str]], whole: float, width: int) -> str:
    """Return a bar of several (part of `whole`, character), one after the other."""
    found, total = "", 0.0
    for part, character in parts:
        total += max(0.0, part)
        end = round(width * min(1.0, total / whole)) if whole > 0 else 0
        found += character * (end - len(found))
    return found.ljust(width, "·")


def sparkline(points: Sequence[tuple[float, float]], width: int) -> str:
    """Return the course of y over x, as one block character for each of `width` equal intervals of x.

    Points are (x, y) in the order of x. A block's height is the mean of its points; an interval without points repeats
    the height before it."""
    if not points or width <= 0:
        return ""
    first, last = points[0][0], points[-1][0]
    parts: list[list[float]] = [[] for _ in range(width if last > first else 1)]
    for x, y in points:
        place = int((x - first) / (last - first) * width) if last > first else 0
        parts[min(place, len(parts) - 1)].append(y)
    heights: list[float] = []
    for part in parts:
        heights.append(sum(part) / len(part) if part else heights[-1])
    low, span = min(heights), max(heights) - min(heights)
    levels = [(height - low) / span if 0 < span < math.inf else 0.0 for height in heights]
    return "".join(BLOCKS[round(level * (len(BLOCKS) - 1))] for level in levels)
