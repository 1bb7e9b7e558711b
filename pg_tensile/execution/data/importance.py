"""Permutation importance of features: how much worse a score becomes when a column's values are shuffled.

The values of one SQL column are shuffled among the rows before preprocessing, so that everything derived from it
(standardised values, indicators of nulls, cycles of a date, all elements of an array) moves together. A feature that
the model does not use, or that is the same in all rows, has the importance 0 exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.evaluation import Targets, scored_data
from pg_tensile.execution.data.preprocessing import PADDING, ArraysInput, CategoryInput, Inputs, Preprocessing
from pg_tensile.execution.data.scores import higher_is_better, score

MAX_ROWS = 100_000
BATCH_ROWS = 8192
TEXT_BATCH_ROWS = 64  # if a text is tokens, for a large model

Outputs = Callable[[Inputs], NDArray[Any]]
Order = NDArray[np.intp]


class Codes(NamedTuple):
    """Codes of a category [rows], or tokens or vectors of a text [rows, …], and whether each row [rows] is null."""

    codes: NDArray[Any]
    nulls: NDArray[np.bool_]

    def take(self, index: Order | slice) -> Codes:
        """Return the rows at `index`."""
        return Codes(self.codes[index], self.nulls[index])

    def input(self) -> CategoryInput:
        """Return a table with an entry for each row, and the one of nulls at its end."""
        of_null = self.codes[self.nulls][:1]
        if not len(of_null):
            of_null = np.zeros((1, *self.codes.shape[1:]), self.codes.dtype)
        return CategoryInput(
            np.where(self.nulls, -1, np.arange(len(self.codes))), np.concatenate([self.codes, of_null])
        )


class Rows(NamedTuple):
    """Raw features and targets of some rows.

    numbers: [numbers, rows]; codes of each category; arrays of each feature; values of the target [rows]."""

    numbers: NDArray[np.float64]
    codes: list[Codes]
    arrays: list[ArraysInput]
    values: NDArray[Any]

    @staticmethod
    def of(inputs: Inputs, values: NDArray[Any]) -> Rows:
        codes = [Codes(category.table[category.places], category.places < 0) for category in inputs.categories]
        return Rows(inputs.numeric, codes, inputs.arrays, values)

    @property
    def nbytes(self) -> int:
        arrays = [array for pair in (*self.codes, *self.arrays) for array in pair]
        return sum(array.nbytes for array in (self.numbers, *arrays, self.values))

    def take(self, index: Order) -> Rows:
        """Return copies of the rows at `index`."""
        arrays = [_take_arrays(array, index) for array in self.arrays]
        codes = [codes.take(index) for codes in self.codes]
        return Rows(self.numbers[:, index], codes, arrays, self.values[index])

    def cut(self, start: int, stop: int) -> Rows:
        """Return rows `start` to `stop` (exclusive) as views."""
        arrays = []
        for lengths, elements in self.arrays:
            first = int(lengths[:start].clip(0).sum(dtype=np.int64))
            last = first + int(lengths[start:stop].clip(0).sum(dtype=np.int64))
            arrays.append(ArraysInput(lengths[start:stop], elements[first:last]))
        codes = [codes.take(slice(start, stop)) for codes in self.codes]
        return Rows(self.numbers[:, start:stop], codes, arrays, self.values[start:stop])

    def inputs(self) -> Inputs:
        return Inputs(len(self.values), self.numbers, [codes.input() for codes in self.codes], self.arrays)


def _take_arrays(array: ArraysInput, index: Order) -> ArraysInput:
    lengths = np.maximum(array.lengths, 0).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    counts = lengths[index]
    elements = np.repeat(starts[index] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return ArraysInput(array.lengths[index], array.elements[elements])


def _join(parts: list[Rows]) -> Rows:
    codes = [_join_codes(of_parts) for of_parts in zip(*(part.codes for part in parts), strict=True)]
    arrays = [
        ArraysInput(*map(np.concatenate, zip(*pairs, strict=True)))
        for pairs in zip(*(p.arrays for p in parts), strict=True)
    ]
    numbers = np.concatenate([part.numbers for part in parts], axis=1)
    return Rows(numbers, codes, arrays, np.concatenate([part.values for part in parts]))


def _join_codes(parts: Sequence[Codes]) -> Codes:
    """Return the rows of all parts; tokens are padded to the longest, as each part has only its own texts' length."""
    codes = [part.codes for part in parts]
    if codes[0].ndim > 1:
        width = max(part.shape[1] for part in codes)
        codes = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=PADDING) for part in codes]
    return Codes(np.concatenate(codes), np.concatenate([part.nulls for part in parts]))


class Sample:
    """Random sample of rows: all of them, up to `limit_rows` and `limit_bytes`."""

    def __init__(self, limit_rows: int, limit_bytes: int, seed: int) -> None:
        self._limit_rows = limit_rows
        self._limit_bytes = limit_bytes
        self._random = np.random.default_rng(seed & 0xFFFFFFFFFFFFFFFF)
        self._parts: list[Rows] = []
        self._ranks: list[NDArray[np.float64]] = []  # those with the lowest are kept
        self._rows = 0
        self._nbytes = 0

    def add(self, rows: Rows) -> None:
        self._parts.append(rows)
        self._ranks.append(self._random.random(len(rows.values)))
        self._rows += len(rows.values)
        self._nbytes += rows.nbytes
        if self._rows > 2 * self._limit_rows or self._nbytes > 2 * self._limit_bytes:
            self._shrink()

    def _shrink(self) -> None:
        rows, ranks = _join(self._parts), np.concatenate(self._ranks)
        limit = min(self._limit_rows, int(self._limit_bytes / max(rows.nbytes, 1) * len(ranks)))
        if limit < len(ranks):
            index = np.sort(np.argpartition(ranks, limit)[:limit]) if limit else np.zeros(0, np.intp)
            rows, ranks = rows.take(index), ranks[index]
        self._parts, self._ranks = [rows], [ranks]
        self._rows, self._nbytes = len(ranks), rows.nbytes

    def result(self) -> Rows:
        """Return the sample; at least one part must have been added."""
        self._shrink()
        return self._parts[0]


class Importance(NamedTuple):
    """Importance of a feature: mean and standard deviation over the repeats, None if the score is not defined."""

    feature: str
    mean: float | None
    deviation: float | None


def importances(
    rows: Rows,
    targets: Targets,
    preprocessing: Preprocessing,
    outputs: Outputs,
    metric: str,
    repeats: int,
    seed: int,
    poll: Callable[[], object],
) -> list[Importance]:
    """Return the importance of each feature, the largest first.

    `outputs` executes the model. `poll` is called before each batch and may raise. Raises DataError if the metric is
    not defined on the rows.
    """

    def measured(column: tuple[str, int] | None, order: Order | None) -> float | None:
        parts = []
        tokens = any(feature.vocabulary is not None for feature in preprocessing.categories)
        size = TEXT_BATCH_ROWS if tokens else BATCH_ROWS
        for start in range(0, len(rows.values), size):
            poll()
            batch = rows.cut(start, start + size)
            if column is not None and order is not None:
                batch = _with_column(batch, rows, column, order[start : start + size])
            parts.append(outputs(batch.inputs()))
        return score(metric, scored_data(np.concatenate(parts), targets, preprocessing))

    reference = measured(None, None)
    if reference is None:
        raise DataError(f'the metric "{metric}" is not defined on these rows', hint="Choose another metric or rows.")
    sign = 1.0 if higher_is_better(metric) else -1.0
    result = []
    for number, (name, column) in enumerate(_columns(preprocessing)):
        drops = []
        for repeat in range(repeats):
            order = np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, number, repeat]).permutation(len(rows.values))
            value = measured(column, order)
            drops.append(np.nan if value is None else sign * (reference - value))
        mean, deviation = float(np.mean(drops)), float(np.std(drops))
        result.append(Importance(name, *(None if np.isnan(mean) else number for number in (mean, deviation))))
    return sorted(result, key=lambda item: (item.mean is None, -(item.mean or 0.0)))


def _columns(preprocessing: Preprocessing) -> list[tuple[str, tuple[str, int]]]:
    """Return the name of each feature, in order, and its part of `Rows`: the field and the number there."""
    fields = {"numbers": preprocessing.numbers, "codes": preprocessing.categories, "arrays": preprocessing.arrays}
    columns = {
        feature.name: (field, number) for field, features in fields.items() for number, feature in enumerate(features)
    }
    return [(feature.name, columns[feature.name]) for feature in preprocessing.features]


def _with_column(batch: Rows, rows: Rows, column: tuple[str, int], index: Order) -> Rows:
    """Return the batch with one column's values taken from the rows at `index`."""
    field, number = column
    if field == "numbers":
        numbers = batch.numbers.copy()
        numbers[number] = rows.numbers[number, index]
        return batch._replace(numbers=numbers)
    if field == "codes":
        shuffled = rows.codes[number].take(index)
        return batch._replace(codes=[shuffled if i == number else codes for i, codes in enumerate(batch.codes)])
    arrays = [
        _take_arrays(rows.arrays[number], index) if i == number else array for i, array in enumerate(batch.arrays)
    ]
    return batch._replace(arrays=arrays)
