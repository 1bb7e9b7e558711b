"""Numbers as text for people: bytes and durations."""

from __future__ import annotations

import math

UNITS = ("B", "kB", "MB", "GB", "TB")  # as memory_budget takes them


def size(nbytes: float, up: bool = False) -> str:
    """Return a number of bytes in units of 1024, as PostgreSQL writes them: "97.5 MB". `up` rounds up, never down."""
    value, unit = float(nbytes), 0
    while abs(value) >= 1023.95 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if not unit:
        return f"{value:.0f} {UNITS[0]}"
    return f"{math.ceil(10 * value) / 10 if up else value:.1f} {UNITS[unit]}"


def duration(us: float) -> str:
    """Return a time given in µs as "0.25 ms", "12.3 ms" or "14.25 s"."""
    ms = us / 1e3
    return f"{ms / 1e3:,.2f} s" if ms >= 1e4 else f"{ms:,.1f} ms" if ms >= 10 else f"{ms:.2f} ms"
