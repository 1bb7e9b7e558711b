"""Fitting of a preprocessing on the rows of a training query.

`fit` reads the rows twice: first ranges and counts, then sums of values scaled by these ranges to −1…1, so that large
numbers do not overflow and a large mean does not cancel the variance. All statistics are float64 and taken from the
training rows alone; which rows these are depends only on their content and the seed (`Split`).

Needs numpy only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import INTEGER_TYPES, TOKEN_TYPES, Chunk, Column, Values, take
from pg_tensile.execution.data.preprocessing import (
    DAY_US,
    ArraysInput,
    CategoryInput,
    Feature,
    Inputs,
    Kind,
    Preprocessing,
    Scaling,
    Target,
    Task,
    TokenLimits,
    standardise,
)

MAX_CATEGORIES = 50_000
MAX_LABELS = 10_000
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


class Split(NamedTuple):
    """Assignment of rows to training or validation; about `fraction` of them (0 ≤ fraction < 1) are for validation."""

    seed: int
    fraction: float

    def validation_rows(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return whether each row [rows] belongs to validation: a function of its hash and the seed alone."""
        salt = _mix(np.array([self.seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
        return _mix(hashes ^ salt) < np.uint64(int(self.fraction * 2.0**64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 hash of each number."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Fitter(Protocol):
    """Fits one column: `observe` takes the rows in a first pass, `observe_again` in a second."""

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


class _NumberFitter:
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


class _CategoryFitter:
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


class _ArrayFitter:
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
            (usual, rows), (other, others) = self.lengths.most_common(2)
            raise DataError(
                f'feature "{name}" has arrays of different lengths',
                hint="Select arrays of one length; only a transformer takes tokens of any length.",
                detail=f"{rows} rows have {usual} elements, {others} rows have {other}.",
            )
        length = next(iter(self.lengths), 0)
        if length == 0:
            raise DataError(f'feature "{name}" has only empty or null arrays', hint="Leave the column out.")
        mean, std = self._moments.result()
        return Feature(name, Kind.ARRAY, self._column.type, self._nulls, mean, std, length=length)


class _TokenFitter:
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
        elements = values.data if values.element_nulls is None else values.data[~values.element_nulls]
        tokens, counts = np.unique(elements.astype(np.int64), return_counts=True)
        self._tokens, places = np.unique(np.concatenate([self._tokens, tokens]), return_inverse=True)
        self._counts = np.bincount(places, np.concatenate([self._counts, counts])).astype(np.int64)
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


class _ValueFitter:
    """Collects the distinct numbers of a classification's target."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._values = np.empty(0, np.float64)

    def observe(self, values: Values) -> None:
        self._values = np.unique(np.concatenate([self._values, _finite(values)]))
        if len(self._values) > MAX_LABELS:
            raise _too_many_labels(self._column)

    def observe_again(self, values: Values) -> None:
        pass

    def values(self) -> NDArray[np.float64]:
        return self._values


def _too_many_labels(column: Column) -> DataError:
    hint = "Group rare labels in the query, or set the option task to regression if the target is a quantity."
    return DataError(f'the target "{column.name}" has more than {MAX_LABELS} labels', hint=hint)


def _most_frequent(counts: NDArray[np.int64], limit: int) -> NDArray[np.intp]:
    """Return the `limit` positions with the highest counts above 0, ascending; among equal counts the first ones."""
    present = np.flatnonzero(counts)
    if len(present) <= limit:
        return present
    return np.sort(present[np.argsort(-counts[present], kind="stable")[:limit]])


def _numbers(values: Values) -> NDArray[np.float64]:
    """Return a column's values as float64 [rows]; null and ±infinity become NaN."""
    x = values.data.astype(np.float64)
    x[values.nulls | ~np.isfinite(x)] = np.nan
    return x


def _finite(values: Values) -> NDArray[np.float64]:
    """Return a column's finite values as float64, without the others."""
    x = values.data.astype(np.float64)
    valid = np.isfinite(x)
    valid &= ~values.nulls
    return x if valid.all() else x[valid]


def _elements(values: Values) -> NDArray[np.float64]:
    """Return all elements of a column of arrays as float64; null becomes NaN."""
    x = values.data.astype(np.float64)
    if values.element_nulls is not None:
        x[values.element_nulls] = np.nan
    return x


def _finite_elements(values: Values) -> NDArray[np.float64]:
    x = _elements(values)
    return x[np.isfinite(x)]


@dataclass(frozen=True)
class FittedPreprocessing:
    """A preprocessing and the columns on which it was fitted, to apply it to their chunks."""

    preprocessing: Preprocessing
    columns: tuple[Column, ...]
    training_rows: int
    validation_rows: int
    skipped_rows: int
    tables: tuple[NDArray[np.int64], ...]  # for each category: its codes by sorted dictionary code, then 0 for null
    label_codes: NDArray[np.int64] | None  # text targets: label by sorted dictionary code, −1 if it is no label

    def with_target(self, chunk: Chunk) -> Chunk:
        """Return the chunk without the rows that have no target."""
        known = _known(self.columns, chunk)
        return chunk if known.all() else take(chunk, np.flatnonzero(known))

    def inputs(self, chunk: Chunk) -> Inputs:
        """Return the chunk's features in the form of a PREDICT frame."""
        features = [(c, v) for c, v in zip(self.columns, chunk.columns, strict=True) if not c.target]
        numbers = [_numbers(v) for c, v in features if c.type != "text" and not c.is_array]
        text = [v.data for c, v in features if c.type == "text"]
        arrays = [ArraysInput(np.where(v.nulls, -1, v.lengths), _elements(v)) for c, v in features if c.is_array]
        categories = [CategoryInput(codes, table) for codes, table in zip(text, self.tables, strict=True)]
        return Inputs(chunk.rows, np.array(numbers).reshape(len(numbers), chunk.rows), categories, arrays)

    def encode_target(self, chunk: Chunk) -> NDArray[Any]:
        """Return the target as the loss takes it: float32 [rows] (regression, binary) or int64 labels [rows].

        The chunk must have no row without a target (`with_target`)."""
        preprocessing = self.preprocessing
        values = chunk.columns[[column.target for column in self.columns].index(True)]
        if preprocessing.task == Task.REGRESSION:
            target = preprocessing.target
            return standardise(_numbers(values), Scaling.of(target.mean, target.std)).astype(np.float32)
        if self.label_codes is not None:
            labels = self.label_codes[values.data]
        else:
            labels = np.searchsorted(np.array(preprocessing.label_values), _numbers(values))
        return labels.astype(np.int64 if preprocessing.task == Task.MULTICLASS else np.float32)


def _known(columns: Sequence[Column], chunk: Chunk) -> NDArray[np.bool_]:
    """Return whether each row [rows] has a target: not null and, if it is a float, finite."""
    values = chunk.columns[[column.target for column in columns].index(True)]
    if values.data.dtype.kind == "f":
        return ~values.nulls & np.isfinite(values.data)
    return ~values.nulls


class Rows(Protocol):
    """Interface of the rows that `fit` reads; `dataset.RowStore` implements it."""

    columns: tuple[Column, ...]
    rows: int
    dictionaries: list[list[str] | None]

    def blocks(self) -> Iterable[Chunk]: ...


def fit(rows: Rows, split: Split, task: str | None = None, tokens: TokenLimits | None = None) -> FittedPreprocessing:
    """Fit all features on the training rows, and the labels on all rows with a target.

    `task`: regression or classification; None means classification for text and boolean targets, else regression.
    `tokens`: integer arrays are tokens with these limits; None means that they are numbers. Raises DataError if there
    is no target or no training row, if there is only one label or too many, and for columns that cannot be used.
    """
    columns = rows.columns
    target = next(column for column in columns if column.target)
    classify = _is_classification(target, task)
    fitters = [_fitter(column, rows.dictionaries[i] or [], classify, tokens) for i, column in enumerate(columns)]
    known_rows = validation_rows = 0
    for block in rows.blocks():
        known = _known(columns, block)
        validation = split.validation_rows(block.hashes) & known
        known_rows += int(known.sum())
        validation_rows += int(validation.sum())
        _observe(columns, fitters, block, known, validation, classify)
    if known_rows == 0:
        raise DataError(f'the target "{target.name}" is null in all {rows.rows} rows', hint="Choose another target.")
    if validation_rows == known_rows:
        hint = "Select more distinct rows, or set validation to 0."
        raise DataError(f"all {known_rows} rows fell into the validation part", hint=hint)
    for block in rows.blocks():
        training = take(block, np.flatnonzero(_known(columns, block) & ~split.validation_rows(block.hashes)))
        for fitter, values in zip(fitters, training.columns, strict=True):
            fitter.observe_again(values)
    preprocessing = _preprocessing(columns, fitters, classify)
    counts = (known_rows - validation_rows, validation_rows, rows.rows - known_rows)
    return FittedPreprocessing(preprocessing, columns, *counts, *_tables(rows, preprocessing))


def _is_classification(target: Column, task: str | None) -> bool:
    if target.is_array or target.type == "timestamp":
        hint = "Use a number, a boolean or a text; extract(epoch from …) makes a number of a timestamp."
        raise DataError(f'the target "{target.name}" has the type {target.type}, which cannot be predicted', hint=hint)
    if target.type == "text" and task == "regression":
        hint = "Set the option task to classification."
        raise DataError(f'the target "{target.name}" is text, which has no regression', hint=hint)
    return task == "classification" if task is not None else target.type in ("text", "bool")


def _fitter(column: Column, strings: Sequence[str], classify: bool, tokens: TokenLimits | None) -> Any:
    if column.type == "text":
        return _CategoryFitter(column, strings)
    if column.is_array:
        return (
            _TokenFitter(column, tokens) if tokens is not None and column.type in TOKEN_TYPES else _ArrayFitter(column)
        )
    return _ValueFitter(column) if column.target and classify else _NumberFitter(column)


def _observe(
    columns: Sequence[Column],
    fitters: Sequence[Any],
    block: Chunk,
    known: NDArray[np.bool_],
    validation: NDArray[np.bool_],
    classify: bool,
) -> None:
    """Observe one block in the first pass: features of training rows, labels and array lengths of all known rows."""
    training = take(block, np.flatnonzero(known & ~validation))
    rest = take(block, np.flatnonzero(validation))
    for column, fitter, values, others in zip(columns, fitters, training.columns, rest.columns, strict=True):
        fitter.observe(values)
        if column.target and classify:
            fitter.observe(others)
        elif isinstance(fitter, _ArrayFitter):
            fitter.observe_lengths(others)


def _preprocessing(columns: Sequence[Column], fitters: Sequence[Any], classify: bool) -> Preprocessing:
    features = tuple(f.feature() for c, f in zip(columns, fitters, strict=True) if not c.target)
    column, fitter = next((c, f) for c, f in zip(columns, fitters, strict=True) if c.target)
    if not classify:
        return Preprocessing(Task.REGRESSION, fitter.target(), None, None, features)
    labels, values = _labels(column, fitter)
    if len(labels) == 1:
        hint = "A classification needs at least two; check the query's WHERE clause."
        raise DataError(f'the target "{column.name}" has only one value, {labels[0]!r}', hint=hint)
    if len(labels) > MAX_LABELS:
        raise _too_many_labels(column)
    task = Task.BINARY if len(labels) == 2 else Task.MULTICLASS
    return Preprocessing(task, Target(column.name, column.type), labels, values, features)


def _labels(column: Column, fitter: Any) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Return the labels in sorted order, and their values, or None unless all labels are finite numbers."""
    if column.type == "text":
        labels = tuple(fitter.labels())
        numbers = all(_NUMBER.fullmatch(label) for label in labels)
        values = tuple(float(label) for label in labels) if numbers else ()
        return labels, values if numbers and np.isfinite(values).all() else None
    values = tuple(fitter.values().tolist())
    if column.type == "bool":
        return tuple("true" if value else "false" for value in values), values
    if column.type in INTEGER_TYPES:
        return tuple(str(int(value)) for value in values), values
    kind = np.float32 if column.type == "float4" else np.float64
    return tuple(str(kind(value)).removesuffix(".0") for value in values), values


def _tables(rows: Rows, preprocessing: Preprocessing) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.int64] | None]:
    """Return `tables` and `label_codes` of a `FittedPreprocessing`."""
    text = [(c, rows.dictionaries[i] or []) for i, c in enumerate(rows.columns) if c.type == "text"]
    strings = [dictionary for column, dictionary in text if not column.target]
    tables = tuple(np.array([*preprocessing.codes(i, dictionary), 0], np.int64) for i, dictionary in enumerate(strings))
    target = next((dictionary for column, dictionary in text if column.target), None)
    if target is None:
        return tables, None
    label_of = {label: number for number, label in enumerate(preprocessing.labels or ())}
    return tables, np.array([label_of.get(text, -1) for text in target], np.int64)
