"""Fitters of single columns: means and deviations, categories, tokens and labels of the training rows.

Needs numpy only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import INTEGER_TYPES, Column, Values, float_elements
from pg_tensile.execution.data.cycles import DAY_US
from pg_tensile.execution.data.preprocessing import Feature, Kind, TokenLimits
from pg_tensile.execution.data.ranks import rank_scale
from pg_tensile.execution.data.series import SAMPLE_ROWS as SERIES_ROWS
from pg_tensile.execution.data.series import is_series, numbers_of, segment_of, width_of
from pg_tensile.execution.data.targets import Target, choose_transform, is_amount, quantiles_of

MAX_CATEGORIES = 50_000  # strings of a column with codes of their own
MAX_STRINGS_BYTES = 8 << 20  # of these strings of all columns, as JSON
LEAST_ROWS = 2  # of a string that has a code of its own: one row says nothing about others
HASH_BUCKETS = 1024  # codes for all other strings of a column that exceeds a limit
MAX_LABELS = 10_000
SAMPLE_ROWS = 1_000_000  # from which quantiles of the target are computed
RANKED_ROWS = 100_000  # from which rank scales of features are computed


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
    """Fitter of numeric, boolean and timestamp columns; with `ranks`, of their rank scales as well.

    Rows come in hash order, so the first ones are a random sample."""

    def __init__(self, column: Column, ranks: bool = False) -> None:
        self._column = column
        self._ranks = ranks
        self._sample: list[NDArray[np.float64]] = []
        self._moments = _Moments()
        self._rows = 0
        self._hour = False

    def observe(self, values: Values) -> None:
        x = _finite(values)
        room = RANKED_ROWS - self._moments.count
        if self._ranks and room > 0:
            self._sample.append(x[:room])
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
        feature = Feature(self._column.name, kind, self._column.type, nulls, mean, std, self._hour)
        if self._moments.count:
            feature = replace(feature, low=self._moments.low, high=self._moments.high)
        if self._sample:
            feature = replace(feature, ranks=rank_scale(np.concatenate(self._sample)))
        return feature


class TargetFitter:
    """Fitter of a regression's target.

    `transform` is none, log, quantile or auto; None: none, as the job leaves it open. Rows come in hash order, so the
    first ones are a random sample. `suits_log`: the job leaves the transform open, and log would suit the amounts."""

    def __init__(self, column: Column, transform: str | None) -> None:
        self.suits_log = False
        self._target = Target(column.name, column.type)
        self._requested = transform
        self._moments = _Moments()
        self._least = np.inf  # of all rows
        self._sample: list[NDArray[np.float64]] = []
        self._second = False

    def observe(self, values: Values) -> None:
        x = _finite(values)
        room = SAMPLE_ROWS - self._moments.count
        if room > 0:
            self._sample.append(x[:room])
        self._moments.observe(x)

    def observe_validation(self, values: Values) -> None:
        """Observe the target of validation rows, which are fitted in nothing but whether there are negative ones."""
        self._least = min(self._least, float(_finite(values).min(initial=np.inf)))

    def observe_again(self, values: Values) -> None:
        if not self._second:
            self._second = True
            self._begin()
        self._moments.observe_again(self._target.transformed(_finite(values)))

    def _begin(self) -> None:
        """Choose the transform before the second pass. Raises DataError if the target is constant."""
        low, high, count = self._moments.low, self._moments.high, self._moments.count
        if low == high and count > 1:
            message = f'the target "{self._target.name}" is {low:g} in all {count} training rows'
            raise DataError(message, hint="There is nothing to learn; check the query's WHERE clause and the target.")
        sample = np.concatenate(self._sample) if self._sample else np.empty(0)
        self._sample = []
        amounts = is_amount(sample, min(low, self._least))
        self._target = replace(self._target, nonnegative=amounts)
        self.suits_log = self._requested is None and amounts and choose_transform(sample) == "log"
        transform = choose_transform(sample) if self._requested == "auto" else self._requested
        if transform in (None, "none") or count < 2:
            return
        quantiles = quantiles_of(sample, low, high) if transform == "quantile" else None
        self._target = replace(self._target, transform=transform, quantiles=quantiles)
        self._moments = _Moments()
        self._moments.observe(self._target.transformed(np.array([low, high])))  # transforms are monotonic
        self._moments.count = count

    def target(self) -> Target:
        mean, std = self._moments.result()
        return replace(self._target, mean=mean, std=std or 1.0)


class CategoryFitter:
    """Fitter of text columns. Codes refer to the sorted dictionary, so they are ordered as the strings.

    `most_bytes` limits the strings with codes of their own, as JSON."""

    def __init__(self, column: Column, strings: Sequence[str], most_bytes: int = MAX_STRINGS_BYTES) -> None:
        self._column = column
        self._strings = strings
        self._most_bytes = most_bytes
        self._counts = np.zeros(len(strings) + 1, np.int64)  # nulls first

    def observe(self, values: Values) -> None:
        self._counts += np.bincount(values.data + 1, minlength=len(self._counts))

    def observe_again(self, values: Values) -> None:
        pass

    def feature(self) -> Feature:
        """Return the feature; strings are in the order of their frequency, equally frequent ones sorted."""
        counts = self._counts[1:]
        order = np.argsort(-counts, kind="stable")
        distinct, frequent = int((counts > 0).sum()), int((counts >= LEAST_ROWS).sum())
        categories = [self._strings[code] for code in order[: min(frequent, MAX_CATEGORIES)].tolist()]
        sizes = np.cumsum([len(json.dumps(text)) + 2 for text in categories])
        categories = categories[: int(np.searchsorted(sizes, self._most_bytes, side="right"))]
        many = distinct > MAX_CATEGORIES or len(categories) < frequent
        buckets = HASH_BUCKETS if many else int(len(categories) < distinct)
        nulls, most = int(self._counts[0]), int(self._counts.argmax())
        mode = self._strings[most - 1] if most else None
        return Feature(
            self._column.name, Kind.CATEGORY, "text", nulls, categories=tuple(categories), buckets=buckets, mode=mode
        )

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


class _ElementMoments:
    """`_Moments` of each of the numbers [rows, length] of arrays; those that are not finite do not count."""

    def __init__(self, length: int) -> None:
        self._low, self._high = np.full(length, np.inf), np.full(length, -np.inf)
        self._count = np.zeros(length, np.int64)
        self._sum, self._squares = np.zeros((2, length))

    def observe(self, x: NDArray[np.float64]) -> None:
        known = np.isfinite(x)
        self._low = np.minimum(self._low, np.min(x, axis=0, where=known, initial=np.inf))
        self._high = np.maximum(self._high, np.max(x, axis=0, where=known, initial=-np.inf))
        self._count += known.sum(axis=0)

    def observe_again(self, x: NDArray[np.float64]) -> None:
        middle, half = self._range()
        u = (x - middle) / np.where(half > 0, half, 1.0)
        u = np.where(np.isfinite(x), u, 0.0)
        self._sum += u.sum(axis=0)
        self._squares += (u * u).sum(axis=0)

    def _range(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        low, high = (np.where(self._count > 0, values, 0.0) for values in (self._low, self._high))
        return low / 2 + high / 2, high / 2 - low / 2

    def result(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return means and standard deviations [length]."""
        middle, half = self._range()
        count = np.maximum(self._count, 1)
        u = self._sum / count
        variance = np.maximum(self._squares / count - u * u, 0.0)
        means = np.clip(middle + half * u, middle - half, middle + half)
        return means, np.where(half > 0, half * np.sqrt(variance), 0.0)


class ArrayFitter:
    """Fitter of arrays of one length.

    With `each`, every element has a mean and a deviation of its own, and the first rows decide whether the arrays are a
    series: rows come in hash order, so they are a random sample."""

    def __init__(self, column: Column, each: bool = False) -> None:
        self._column = column
        self._each = each
        self._elements: _ElementMoments | None = None
        self._segment, self._series = 1, False
        self._moments = _Moments()
        self._nulls = 0
        self.lengths: Counter[int] = Counter()

    def observe(self, values: Values) -> None:
        self._moments.observe(_finite_elements(values))
        self._nulls += int(values.nulls.sum())
        self.observe_lengths(values)
        if self._each and len(self.lengths) == 1:
            (length,) = self.lengths
            elements = float_elements(values).reshape(-1, length) if length else np.empty((0, 0))
            if self._elements is None and len(elements):
                self._segment = segment_of(length)
                self._series = is_series(numbers_of(elements[:SERIES_ROWS], self._segment))
                self._elements = _ElementMoments(width_of(length, self._segment, self._series))
            if self._elements is not None:
                self._elements.observe(self._numbers(elements))

    def _numbers(self, elements: NDArray[np.float64]) -> NDArray[np.float64]:
        return numbers_of(elements, self._segment, self._series)

    def observe_lengths(self, values: Values) -> None:
        lengths, rows = np.unique(values.lengths[~values.nulls], return_counts=True)
        self.lengths.update(dict(zip(lengths.tolist(), rows.tolist(), strict=True)))

    def observe_again(self, values: Values) -> None:
        self._moments.observe_again(_finite_elements(values))
        if self._elements is not None and len(self.lengths) == 1:
            elements = float_elements(values).reshape(-1, next(iter(self.lengths)))
            self._elements.observe_again(self._numbers(elements))

    def feature(self) -> Feature:
        name = self._column.name
        if len(self.lengths) > 1:
            (usual, rows), (unusual, unusual_rows) = self.lengths.most_common(2)
            hint = "Select arrays of one length, null for missing ones; only a transformer takes tokens of any length."
            raise DataError(
                f'feature "{name}" has arrays of different lengths',
                hint=hint,
                detail=f"{rows} rows have {usual} elements, {unusual_rows} rows have {unusual}.",
            )
        length = next(iter(self.lengths), 0)
        if length == 0:
            raise DataError(f'feature "{name}" has only empty or null arrays', hint="Leave the column out.")
        mean, std = self._moments.result()
        feature = Feature(name, Kind.ARRAY, self._column.type, self._nulls, mean, std, length=length)
        if self._elements is None:
            return feature
        means, stds = self._elements.result()
        feature = replace(feature, means=tuple(means.tolist()), stds=tuple(stds.tolist()))
        return replace(feature, segment=self._segment if self._segment > 1 else None, series=self._series or None)


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
        self._values = np.empty(0, np.int64 if column.type in INTEGER_TYPES else np.float64)

    def observe(self, values: Values) -> None:
        self._values = np.union1d(self._values, class_values(self._column, values)[~values.nulls])
        check_labels(self._column, len(self._values))

    def observe_again(self, values: Values) -> None:
        pass

    def values(self) -> NDArray[Any]:
        return self._values


def class_values(column: Column, values: Values) -> NDArray[Any]:
    """Return a column of class numbers [rows]: integers exactly, as int64, others as float64. Nulls are anything."""
    return values.data.astype(np.int64 if column.type in INTEGER_TYPES else np.float64)


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
