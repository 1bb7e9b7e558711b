"""Fitters of single columns: means and deviations, categories, tokens and labels of the training rows.

Needs numpy only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import Column, Values, float_elements
from pg_tensile.execution.data.preprocessing import DAY_US, Feature, Kind, Target, TokenLimits

MAX_CATEGORIES = 50_000
MAX_LABELS = 10_000


class Fitter(Protocol):
    """Fitter of one column: `observe` takes the rows in a first pass, `observe_again` in a second."""

    def observe(self, values: Values) -> None: ...

    def observe_again(self, values: Values) -> None: ...


class _Moments:
    """Mean and standard deviation of finite float64 numbers of any magnitude, in two passes over the same blocks."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.count = 0
        self._sum = 0.0
        self._squares = 0.0

    def observe(self, x: NDArray[np.float64]) -> None:
        if len(x):
            self.low, self.high = min(self.low, float(x.min())), max(self.high, float(x.max()))
            self.count += len(x)

    def observe_again(self, x: NDArray[np.float64]) -> None:
        middle, half = self._range()
        if half > 0:
            u = (x - middle) / half
            self._sum += float(u.sum())
            self._squares += float((u * u).sum())

    def _range(self) -> tuple[float, float]:
        return self.low / 2 + self.high / 2, self.high / 2 - self.low / 2

    def result(self) -> tuple[float, float]:
        """Return mean and standard deviation: (0, 0) without numbers, deviation 0 if all are equal."""
        if self.count == 0:
            return 0.0, 0.0
        middle, half = self._range()
        if half <= 0:
            return self.low, 0.0
        u = self._sum / self.count
        variance = max(self._squares / self.count - u * u, 0.0)
        return min(max(middle + half * u, self.low), self.high), half * float(np.sqrt(variance))


class NumberFitter:
    """Fitter of numeric, boolean and timestamp columns, and of a regression's target."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._moments = _Moments()
        self._rows = 0
        self._hour = False

    def observe(self, values: Values) -> None:
        x = _finite(values)
        self._moments.observe(x)
        self._rows += len(values.nulls)
        if self._column.type == "timestamp":
            self._hour = self._hour or bool(np.fmod(x, DAY_US).any())

    def observe_again(self, values: Values) -> None:
        self._moments.observe_again(_finite(values))

    def feature(self) -> Feature:
        mean, std = self._moments.result()
        kind = Kind.TIMESTAMP if self._column.type == "timestamp" else Kind.NUMERIC
        nulls = self._rows - self._moments.count
        return Feature(self._column.name, kind, self._column.type, nulls, mean, std, self._hour)

    def target(self) -> Target:
        mean, std = self._moments.result()
        return Target(self._column.name, self._column.type, mean, std or 1.0)


class CategoryFitter:
    """Fitter of text columns. Codes refer to the sorted dictionary, so they are ordered as the strings."""

    def __init__(self, column: Column, strings: Sequence[str]) -> None:
        self._column = column
        self._strings = strings
        self._counts = np.zeros(len(strings) + 1, np.int64)  # nulls first

    def observe(self, values: Values) -> None:
        self._counts += np.bincount(values.data + 1, minlength=len(self._counts))

    def observe_again(self, values: Values) -> None:
        pass

    def feature(self) -> Feature:
        kept = _most_frequent(self._counts[1:], MAX_CATEGORIES)
        categories = tuple(self._strings[code] for code in kept.tolist())
        return Feature(self._column.name, Kind.CATEGORY, "text", int(self._counts[0]), categories=categories)

    def labels(self) -> list[str]:
        return [self._strings[code] for code in np.flatnonzero(self._counts[1:]).tolist()]


class TextFitter:
    """Fitter of text columns that are tokenised. The length is that of the longest string of all rows."""

    def __init__(self, column: Column, tokens: NDArray[np.int32], vocabulary: int) -> None:
        self._column = column
        self._length = tokens.shape[1]
        self._vocabulary = vocabulary
        self._nulls = 0

    def observe(self, values: Values) -> None:
        self._nulls += int(values.nulls.sum())

    def observe_again(self, values: Values) -> None:
        pass

    def feature(self) -> Feature:
        name, length = self._column.name, self._length
        return Feature(name, Kind.CATEGORY, "text", self._nulls, length=length, vocabulary=self._vocabulary)


class ArrayFitter:
    """Fitter of arrays of one length."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._moments = _Moments()
        self._nulls = 0
        self.lengths: Counter[int] = Counter()

    def observe(self, values: Values) -> None:
        self._moments.observe(_finite_elements(values))
        self._nulls += int(values.nulls.sum())
        self.observe_lengths(values)

    def observe_lengths(self, values: Values) -> None:
        lengths, rows = np.unique(values.lengths[~values.nulls], return_counts=True)
        self.lengths.update(dict(zip(lengths.tolist(), rows.tolist(), strict=True)))

    def observe_again(self, values: Values) -> None:
        self._moments.observe_again(_finite_elements(values))

    def feature(self) -> Feature:
        name = self._column.name
        if len(self.lengths) > 1:
            (usual, rows), (unusual, unusual_rows) = self.lengths.most_common(2)
            raise DataError(
                f'feature "{name}" has arrays of different lengths',
                hint="Select arrays of one length; only a transformer takes tokens of any length.",
                detail=f"{rows} rows have {usual} elements, {unusual_rows} rows have {unusual}.",
            )
        length = next(iter(self.lengths), 0)
        if length == 0:
            raise DataError(f'feature "{name}" has only empty or null arrays', hint="Leave the column out.")
        mean, std = self._moments.result()
        return Feature(name, Kind.ARRAY, self._column.type, self._nulls, mean, std, length=length)


class TokenFitter:
    """Fitter of arrays of token numbers, of any length."""

    DEFAULT_LENGTH = 512

    def __init__(self, column: Column, limits: TokenLimits) -> None:
        self._column = column
        self._limits = limits
        self._tokens = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._longest = 0
        self._nulls = 0

    def observe(self, values: Values) -> None:
        present = values.data if values.element_nulls is None else values.data[~values.element_nulls]
        tokens, counts = np.unique(present.astype(np.int64), return_counts=True)
        self._tokens, indices = np.unique(np.concatenate([self._tokens, tokens]), return_inverse=True)
        self._counts = np.bincount(indices, np.concatenate([self._counts, counts])).astype(np.int64)
        self._longest = max(self._longest, int(values.lengths.max(initial=0)))
        self._nulls += int(values.nulls.sum())

    def observe_again(self, values: Values) -> None:
        pass

    def feature(self) -> Feature:
        if self._longest == 0:
            raise DataError(
                f'feature "{self._column.name}" has only empty or null arrays', hint="Leave the column out."
            )
        kept = _most_frequent(self._counts, self._limits.vocabulary)
        length = min(self._longest, self._limits.length or self.DEFAULT_LENGTH)
        tokens = tuple(self._tokens[kept].tolist())
        return Feature(self._column.name, Kind.ARRAY, self._column.type, self._nulls, length=length, tokens=tokens)


class ValueFitter:
    """Fitter of a classification's target: the distinct numbers."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._values = np.empty(0, np.float64)

    def observe(self, values: Values) -> None:
        self._values = np.unique(np.concatenate([self._values, _finite(values)]))
        check_labels(self._column, len(self._values))

    def observe_again(self, values: Values) -> None:
        pass

    def values(self) -> NDArray[np.float64]:
        return self._values


def check_labels(column: Column, count: int) -> None:
    """Raise DataError if a target has more than MAX_LABELS labels."""
    if count > MAX_LABELS:
        hint = "Group rare labels in the query, or set the option task to regression if the target is a quantity."
        raise DataError(f'the target "{column.name}" has more than {MAX_LABELS} labels', hint=hint)


def _most_frequent(counts: NDArray[np.int64], limit: int) -> NDArray[np.intp]:
    """Return the `limit` positions with the highest counts above 0, ascending; among equal counts the first ones."""
    present = np.flatnonzero(counts)
    if len(present) <= limit:
        return present
    return np.sort(present[np.argsort(-counts[present], kind="stable")[:limit]])


def _finite(values: Values) -> NDArray[np.float64]:
    """Return a column's finite values as float64, without the others."""
    x = values.data.astype(np.float64)
    valid = np.isfinite(x)
    valid &= ~values.nulls
    return x if valid.all() else x[valid]


def _finite_elements(values: Values) -> NDArray[np.float64]:
    x = float_elements(values)
    return x[np.isfinite(x)]
