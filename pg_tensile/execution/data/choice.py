"""Choice of an architecture by what the arrays of a query can be: an image, tokens, or numbers.

image   one array of the same length in all rows, without negative numbers, that is a square of at least 8×8 pixels or
        three of them, in which a pixel resembles the one below it more than those farther away in its row, and does
        not continue a row with the next one, as a series would
tokens  integers in arrays of different lengths; or in longer ones of one length, without negative numbers, of which
        there are many different ones that recur, and that resemble their neighbours no more than others
numbers everything else, which is what `tabular` takes

The resemblance is measured on the first rows. They come in hash order, so they are a random sample.

Needs numpy only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.columns import TOKEN_TYPES, Column, Values, float_elements
from pg_tensile.execution.data.roles import Roles
from pg_tensile.execution.data.splits import Rows

LEAST_SIDE = 8  # pixels of an image
LEAST_SEQUENCE = 16  # tokens, where all rows have the same number of them
LEAST_VOCABULARY = 257  # different tokens: more than the values of bytes, which may be pixels
LEAST_REPEATED = 2  # times that each of them occurs, on average
MOST_DISTINCT = 1 << 20  # integers that are told apart
SAMPLE_ROWS, SAMPLE_ELEMENTS = 1000, 1 << 20
ALIKE = 0.8  # mean difference of elements that resemble each other, as a part of that of others
CONTINUED = (0.5, 1.5)  # mean difference where one row of an image ends and the next begins, by that of neighbours
PERIODS = (12, 24, 48)  # sides of a square whose rows may be years of months, or days of hours or half hours
MOST_EXPLAINED = 0.2  # of the variance of tokens by their positions


class Choice(NamedTuple):
    """Chosen architecture, as JSON, and the reason."""

    architecture: dict[str, Any]
    reason: str


def choose_architecture(rows: Rows, roles: Roles) -> Choice:
    """Return the architecture for the features of a query. Reads its rows with a target once."""
    arrays = {index: ArrayNumbers(rows.columns[index]) for index in roles.features if rows.columns[index].is_array}
    if not arrays:
        return Choice({"type": "tabular"}, "no column is an array")
    for block in rows.blocks():
        known = roles.with_target(block)
        for index, numbers in arrays.items():
            numbers.observe(known.columns[index])
    return _choice(list(arrays.values()))


def _choice(arrays: Sequence[ArrayNumbers]) -> Choice:
    integers = [array for array in arrays if array.integers]
    if len(integers) == 1 and integers[0].varies:
        array = integers[0]
        lengths = f"{array.shortest} to {array.longest}"
        reason = f'"{array.name}" has integers in arrays of {lengths} elements, which are taken as tokens'
        return Choice({"type": "transformer"}, reason)
    if len(arrays) > 1:
        return Choice({"type": "tabular"}, f"{len(arrays)} columns are arrays, which are taken as numbers")
    (array,) = arrays
    image = array.image()
    if not isinstance(image, str):
        planes, height, width = image
        architecture = {"type": "cnn"} | ({"shape": list(image)} if planes > 1 else {})
        size = f"{height}×{width}" if planes == 1 else f"{planes}×{height}×{width}"
        return Choice(architecture, f'"{array.name}" is the only array, and can be an image of {size} pixels')
    if array.has_tokens():
        what = f"has {array.vocabulary} different integers, which are taken as tokens"
        return Choice({"type": "transformer"}, f'"{array.name}" is the only array, and {what}')
    return Choice({"type": "tabular"}, f'"{array.name}" is the only array, and is taken as numbers: {image}')


class ArrayNumbers:
    """Statistics of an array column, which tell an image and tokens from other numbers."""

    def __init__(self, column: Column) -> None:
        self.name = column.name
        self.integers = column.type in TOKEN_TYPES
        self.shortest, self.longest = sys.maxsize, 0
        self._least = np.inf  # element
        self._distinct: NDArray[np.int64] = np.empty(0, np.int64)
        self._elements = 0
        self._sample: list[NDArray[np.float64]] = []
        self._sampled = 0

    def observe(self, values: Values) -> None:
        lengths = values.lengths[~values.nulls]
        if not len(lengths):
            return
        self.shortest, self.longest = min(self.shortest, int(lengths.min())), max(self.longest, int(lengths.max()))
        elements = float_elements(values)
        if not len(elements):
            return
        self._least = min(self._least, float(np.min(elements, initial=np.inf, where=~np.isnan(elements))))
        self._elements += len(elements)
        if self.integers and len(self._distinct) < MOST_DISTINCT:
            self._distinct = np.union1d(self._distinct, values.data.astype(np.int64))
        room = max(1, min(SAMPLE_ROWS, SAMPLE_ELEMENTS // self.longest)) - self._sampled
        if not self.varies and room > 0:
            self._sample.append(elements.reshape(-1, self.longest)[:room])
            self._sampled += len(self._sample[-1])

    @property
    def varies(self) -> bool:
        """Whether rows have arrays of different lengths."""
        return self.shortest < self.longest

    @property
    def vocabulary(self) -> int:
        """Number of different integers."""
        return len(self._distinct)

    def image(self) -> tuple[int, int, int] | str:
        """Return planes, height and width of the images that the arrays can be, or why they cannot be any."""
        if self.varies:
            return "an image would have the same number of them in all rows"
        planes = 1 if math.isqrt(self.longest) ** 2 == self.longest else 3
        side = math.isqrt(self.longest // planes)
        if planes * side * side != self.longest or side < LEAST_SIDE:
            least = f"{LEAST_SIDE}×{LEAST_SIDE}"
            return f"an image would not have {self.longest} of them, but be a square of {least} or more, or three"
        if self._least < 0:
            return "an image would have no negative ones"
        sample = np.concatenate(self._sample).reshape(-1, side * side)
        others = min(_difference(sample, distance) for distance in range(side // 3, side - side // 3 + 1))
        if _difference(sample, side) >= ALIKE * others:
            return f"in an image of {side}×{side}, they would resemble those below them"
        if _continues(sample, side):
            return f"an image of {side}×{side} would not continue a row with the next one"
        if side in PERIODS:
            return f"{side}×{side} of them can be a series of days or years as well"
        return planes, side, side

    def has_tokens(self) -> bool:
        """Return whether arrays of one length can be tokens."""
        if not self.integers or self.varies or self._least < 0 or self.longest < LEAST_SEQUENCE:
            return False
        if not LEAST_VOCABULARY <= self.vocabulary < min(MOST_DISTINCT, self._elements / LEAST_REPEATED):
            return False
        sample = np.concatenate(self._sample)
        values, counts = np.unique(sample, return_counts=True)
        sample = np.where(sample == values[counts.argmax()], np.nan, sample)  # padding is that, if there is any
        alike = _difference(sample, 1) < ALIKE * _difference(sample, self.longest // 2)
        return not alike and _explained_by_position(sample) <= MOST_EXPLAINED


def _difference(sample: NDArray[np.float64], distance: int) -> float:
    """Return the mean absolute difference of two elements of a row with this distance, or 0 for shorter rows."""
    differences = np.abs(sample[:, distance:] - sample[:, :-distance])
    differences = differences[np.isfinite(differences)]
    return float(differences.mean()) if len(differences) else 0.0


def _continues(sample: NDArray[np.float64], side: int) -> bool:
    """Return whether elements on both sides of a row's end differ about as neighbours within a row do."""
    neighbours = np.abs(np.diff(sample))
    is_finite = np.isfinite(neighbours)
    is_end = np.zeros_like(is_finite)
    is_end[:, side - 1 :: side] = True
    within, across = neighbours[is_finite & ~is_end], neighbours[is_finite & is_end]
    if not len(within) or not len(across):
        return False
    least, most = (limit * within.mean() for limit in CONTINUED)
    return bool(least <= across.mean() <= most)


def _explained_by_position(sample: NDArray[np.float64]) -> float:
    """Return the part of the elements' variance that is between their positions in the row."""
    known = np.isfinite(sample)
    counts = known.sum(axis=0)
    total = sample[known]
    means = np.where(known, sample, 0.0).sum(axis=0) / np.maximum(counts, 1)
    return float(counts @ (means - total.mean()) ** 2 / max(((total - total.mean()) ** 2).sum(), 1e-300))
