"""Numbers that a version stores: as jsonb gives them back, and as they were before.

jsonb writes a number without a fraction as an integer, however large, which Python reads as an int. NumPy makes arrays
of objects of large ones, and sums of them do not overflow to infinity but raise OverflowError.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_type_hints


def with_floats(fields: type, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with floats, and tuples of them, where `fields`, a class with annotations, has them."""
    kinds = _kinds(fields)
    return {key: kinds[key](item) if key in kinds and item is not None else item for key, item in value.items()}


def floats(values: Any) -> tuple[float, ...]:
    """Return numbers as floats."""
    return tuple(map(float, values))


@cache
def _kinds(fields: type) -> dict[str, Any]:
    """Return the conversion of each field of floats."""
    kinds: dict[str, Any] = {}
    for name, hint in get_type_hints(fields).items():
        choices = (hint, *get_args(hint))  # with those of a union
        if float in choices and tuple[float, ...] not in choices and hint != tuple[float, ...]:
            kinds[name] = float
        elif tuple[float, ...] in choices:
            kinds[name] = floats
    return kinds
