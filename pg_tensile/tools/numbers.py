"""Numbers on command lines. The functions raise OptionError, whose message names the mistake."""

from __future__ import annotations

import math
import re

from pg_tensile.errors import OptionError


def parse_number(text: str, above: float | None, what: str) -> float:
    """Parse a finite number: above `above`, or at least 0 if that is None. `what` names it in the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise OptionError(f'"{text}" is not {what}')
    return value


def parse_count(text: str, low: int, high: int = 2**31 - 1) -> int:
    """Parse a whole number from `low` to `high`."""
    if not re.fullmatch(r"\d{1,20}", text.strip()) or not low <= int(text) <= high:
        raise OptionError(f'"{text}" is not a whole number from {low} to {high}')
    return int(text)
