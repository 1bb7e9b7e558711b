"""Fitting of a preprocessing on the rows of a training query.

`fit` reads the rows twice: first ranges and counts, then sums of values scaled by these ranges to −1…1, so that large
numbers do not overflow and a large mean does not cancel the variance. All statistics are float64 and taken from the
training rows alone; which rows these are depends only on their content and the seed (`Split`).

Needs numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import (
    INTEGER_TYPES,
    TOKEN_TYPES,
    Chunk,
    Column,
    float_elements,
    float_values,
    take,
)
from pg_tensile.execution.data.fitters import (
    ArrayFitter,
    CategoryFitter,
    NumberFitter,
    TextFitter,
    TokenFitter,
    ValueFitter,
    check_labels,
)
from pg_tensile.execution.data.preprocessing import (
    ArraysInput,
    CategoryInput,
    Inputs,
    Preprocessing,
    Scaling,
    Target,
    Task,
    TokenLimits,
    standardise,
)
from pg_tensile.execution.data.texts import TextColumns

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


@dataclass(frozen=True)
class FittedPreprocessing:
    """A preprocessing and the columns on which it was fitted, to apply it to their chunks."""

    preprocessing: Preprocessing
    columns: tuple[Column, ...]
    training_rows: int
    validation_rows: int
    skipped_rows: int
    tables: tuple[NDArray[Any], ...]  # of CategoryInputs: for each category by sorted dictionary code, then null
    label_codes: NDArray[np.int64] | None  # text targets: label by sorted dictionary code, −1 if it is no label

    def with_target(self, chunk: Chunk) -> Chunk:
        """Return the chunk without the rows that have no target."""
        has_target = _has_target(self.columns, chunk)
        return chunk if has_target.all() else take(chunk, np.flatnonzero(has_target))

    def inputs(self, chunk: Chunk) -> Inputs:
        """Return the chunk's features in the form of a PREDICT frame."""
        features = [(c, v) for c, v in zip(self.columns, chunk.columns, strict=True) if not c.target]
        numbers = [float_values(v) for c, v in features if c.type != "text" and not c.is_array]
        text = [v.data for c, v in features if c.type == "text"]
        arrays = [ArraysInput(np.where(v.nulls, -1, v.lengths), float_elements(v)) for c, v in features if c.is_array]
        categories = [CategoryInput(codes, table) for codes, table in zip(text, self.tables, strict=True)]
        return Inputs(chunk.rows, np.array(numbers).reshape(len(numbers), chunk.rows), categories, arrays)

    def encode_target(self, chunk: Chunk) -> NDArray[Any]:
        """Return the target as the loss takes it: float32 [rows] (regression, binary) or int64 labels [rows].

        The chunk must have no row without a target (`with_target`)."""
        preprocessing = self.preprocessing
        values = chunk.columns[[column.target for column in self.columns].index(True)]
        if preprocessing.task == Task.REGRESSION:
            target = preprocessing.target
            return standardise(float_values(values), Scaling.of(target.mean, target.std)).astype(np.float32)
        if self.label_codes is not None:
            labels = self.label_codes[values.data]
        else:
            labels = np.searchsorted(np.array(preprocessing.label_values), float_values(values))
        return labels.astype(np.int64 if preprocessing.task == Task.MULTICLASS else np.float32)


def _has_target(columns: Sequence[Column], chunk: Chunk) -> NDArray[np.bool_]:
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


def fit(
    rows: Rows,
    split: Split,
    task: str | None = None,
    tokens: TokenLimits | None = None,
    texts: TextColumns | None = None,
) -> FittedPreprocessing:
    """Fit all features on the training rows, and the labels on all rows with a target.

    `task`: regression or classification; None means classification for text and boolean targets, else regression.
    `tokens`: integer arrays are tokens with these limits; None means that they are numbers. `texts`: the text columns
    that are tokenised; None means that all are categories. Raises DataError if there is no target or no training row,
    if there is only one label or too many, and for columns that cannot be used.
    """
    columns = rows.columns
    target = next(column for column in columns if column.target)
    classify = _is_classification(target, task)
    encoded = {} if texts is None else _encode(rows, texts)
    fitters = [
        TextFitter(column, *encoded[i])
        if i in encoded
        else _fitter(column, rows.dictionaries[i] or [], classify, tokens)
        for i, column in enumerate(columns)
    ]
    known_rows = validation_rows = 0
    for block in rows.blocks():
        has_target = _has_target(columns, block)
        validation = split.validation_rows(block.hashes) & has_target
        known_rows += int(has_target.sum())
        validation_rows += int(validation.sum())
        _observe(columns, fitters, block, has_target, validation, classify)
    if known_rows == 0:
        raise DataError(f'the target "{target.name}" is null in all {rows.rows} rows', hint="Choose another target.")
    if validation_rows == known_rows:
        hint = "Select more distinct rows, or set validation to 0."
        raise DataError(f"all {known_rows} rows fell into the validation part", hint=hint)
    for block in rows.blocks():
        training = take(block, np.flatnonzero(_has_target(columns, block) & ~split.validation_rows(block.hashes)))
        for fitter, values in zip(fitters, training.columns, strict=True):
            fitter.observe_again(values)
    preprocessing = _preprocessing(columns, fitters, classify)
    if texts is not None:
        preprocessing = replace(preprocessing, text=texts.source)
    counts = (known_rows - validation_rows, validation_rows, rows.rows - known_rows)
    token_tables = {i: table for i, (table, _) in encoded.items()}
    return FittedPreprocessing(preprocessing, columns, *counts, *_tables(rows, preprocessing, token_tables))


def _encode(rows: Rows, texts: TextColumns) -> dict[int, tuple[NDArray[np.int32], int]]:
    """Return the table of each column that is tokenised, by index, and the vocabulary of its tokens.

    Raises DataError if a column that is named is no text, or if there is no column to tokenise."""
    features = {column.name: column for column in rows.columns if not column.target}
    for name in texts.names or ():
        if name not in features or features[name].type != "text":
            given = f"of type {features[name].type}" if name in features else "not in the query, or its target"
            hint = 'Correct the key "text" of the architecture, or select a column of type text.'
            raise DataError(f'the text column "{name}" is {given}', hint=hint)
    chosen = [i for i, c in enumerate(rows.columns) if not c.target and c.type == "text" and texts.include(c.name)]
    if not chosen:
        hint = "Select a column of type text, or use another architecture."
        raise DataError("a pretrained model needs a text column, the query has none", hint=hint)
    encoder = texts.source.encoder()
    length = texts.source.length
    return {
        i: (encoder.encode([*(rows.dictionaries[i] or []), ""], length, padded=False), encoder.vocabulary)
        for i in chosen
    }


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
        return CategoryFitter(column, strings)
    if column.is_array:
        return TokenFitter(column, tokens) if tokens is not None and column.type in TOKEN_TYPES else ArrayFitter(column)
    return ValueFitter(column) if column.target and classify else NumberFitter(column)


def _observe(
    columns: Sequence[Column],
    fitters: Sequence[Any],
    block: Chunk,
    has_target: NDArray[np.bool_],
    validation: NDArray[np.bool_],
    classify: bool,
) -> None:
    """Observe one block in the first pass: features of training rows, labels and array lengths of all known rows."""
    training = take(block, np.flatnonzero(has_target & ~validation))
    rest = take(block, np.flatnonzero(validation))
    for column, fitter, values, others in zip(columns, fitters, training.columns, rest.columns, strict=True):
        fitter.observe(values)
        if column.target and classify:
            fitter.observe(others)
        elif isinstance(fitter, ArrayFitter):
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
    check_labels(column, len(labels))
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


def _tables(
    rows: Rows, preprocessing: Preprocessing, tokens: Mapping[int, NDArray[np.int32]]
) -> tuple[tuple[NDArray[Any], ...], NDArray[np.int64] | None]:
    """Return `tables` and `label_codes` of a `FittedPreprocessing`. `tokens`: tables of text features, by column."""
    text = [(i, c, rows.dictionaries[i] or []) for i, c in enumerate(rows.columns) if c.type == "text"]
    features = [(i, dictionary) for i, column, dictionary in text if not column.target]
    tables = tuple(
        tokens[i] if i in tokens else preprocessing.table(category, dictionary)
        for category, (i, dictionary) in enumerate(features)
    )
    target = next((dictionary for _, column, dictionary in text if column.target), None)
    if target is None:
        return tables, None
    label_of = {label: number for number, label in enumerate(preprocessing.labels or ())}
    return tables, np.array([label_of.get(text, -1) for text in target], np.int64)
