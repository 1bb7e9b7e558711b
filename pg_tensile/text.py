"""Numbers and names as text for people: bytes, durations, counts, shares, losses. No other module formats them.

Bytes come in units of 1024. They are named as PostgreSQL and its memory_budget name them (MB), except in the output of
`pg-tensile bench`, whose options take MB as 10⁶ and MiB as 2²⁰ bytes (`binary_size`). The functions with `short` in
their names are for columns of fixed width: three digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NONE = "–"  # in place of a missing number
UNITS = ("B", "kB", "MB", "GB", "TB")  # as memory_budget takes them
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
DAY = 86_400


def printable(text: str) -> str:
    """Return the text with spaces for unprintable characters: controls, escapes, marks that change the direction."""
    return "".join(character if character.isprintable() else " " for character in text)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def size(nbytes: float, up: bool = False) -> str:
    """Return a number of bytes as PostgreSQL writes them: "97.5 MB". `up` rounds up, never down."""
    value, unit = _scaled(nbytes, UNITS, 1023.95)
    if unit == UNITS[0]:
        return f"{value:.0f} {unit}"
    return f"{math.ceil(10 * value) / 10 if up else value:.1f} {unit}"


def short_size(nbytes: float | None) -> str:
    """Return a number of bytes with three digits, "98.0 MB", in up to seven characters."""
    if nbytes is None:
        return NONE
    value, unit = _scaled(nbytes, (*UNITS, "PB", "EB"), 999.5)
    return f"{value:.{0 if unit == UNITS[0] else _decimals(value)}f} {unit}"


def binary_size(nbytes: float | None) -> str:
    """Return a number of bytes with three digits or more: "1.52 GiB", "147 MiB", "12 B"."""
    if nbytes is None:
        return NONE
    value, unit = _scaled(nbytes, BINARY_UNITS, 1024)
    return f"{value:.0f} {unit}" if unit == BINARY_UNITS[0] or value >= 100 else f"{value:.3g} {unit}"


def _scaled(value: float, units: Sequence[str], limit: float, step: float = 1024) -> tuple[float, str]:
    """Return the value in the first unit in which it is below `limit`, or in the last one, and the unit."""
    for unit in units[:-1]:
        if abs(value) < limit:
            return float(value), unit
        value /= step
    return float(value), units[-1]


# ---- durations ------------------------------------------------------------------------------------------------------


def duration(us: float) -> str:
    """Return a time given in µs as "0.25 ms", "12.3 ms" or "14.25 s"."""
    ms = us / 1e3
    return f"{ms / 1e3:,.2f} s" if ms >= 1e4 else f"{ms:,.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def short_duration(seconds: float | None) -> str:
    """Return a duration, "0.08s", "42s", "12:34", "5h12m", "3d04h", in up to six characters."""
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


def milliseconds(ms: float | None) -> str:
    """Return a number of milliseconds without its unit, with three digits or more: "0.123", "45.6", "1,234"."""
    if ms is None:
        return NONE
    return f"{ms:,.0f}" if ms >= 1000 else f"{round(ms, 3):.3g}"


# ---- other numbers --------------------------------------------------------------------------------------------------


def short(value: float | None) -> str:
    """Return a number with three digits, "0.53", "42.5", "1.20k", "12.3M", in up to five characters."""
    if value is None:
        return NONE
    value, unit = _scaled(value, ("", "k", "M", "G", "T"), 999.5, step=1000)
    return f"{value:.{_decimals(value)}f}{unit}"


def count(value: int | None) -> str:
    """Return a whole number: in full up to 9999, else as `short` does."""
    return str(value) if value is not None and abs(value) < 10_000 else short(value)


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f}%"


def loss(value: float | None) -> str:
    """Return a loss with about five digits, "0.1134", "12.345", "1.2e-05", in up to seven characters."""
    if value is None:
        return NONE
    magnitude = abs(value)
    if magnitude and not 1e-3 <= magnitude < 1e5:
        return f"{value:.1e}"
    return f"{value:.{4 if magnitude < 10 else 3 if magnitude < 100 else 2 if magnitude < 1000 else 1}f}"


def _decimals(value: float) -> int:
    """Return the number of decimals that gives three digits."""
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
