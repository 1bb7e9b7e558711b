"""Fitting of a preprocessing on the rows of a training query.

`fit` reads the rows twice: first ranges and counts, then sums of values scaled by these ranges to −1…1, so that large
numbers do not overflow and a large mean does not cancel the variance. All statistics are float64 and taken from the
training rows alone; splits.py decides which rows these are.

Needs numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    MAX_STRINGS_BYTES,
    ArrayFitter,
    CategoryFitter,
    NumberFitter,
    TargetFitter,
    TextFitter,
    TokenFitter,
    ValueFitter,
    check_labels,
    class_values,
)
from pg_tensile.execution.data.preprocessing import (
    ArraysInput,
    CategoryInput,
    Inputs,
    Preprocessing,
    Scaling,
    Task,
    TokenLimits,
    standardise,
)
from pg_tensile.execution.data.roles import Roles
from pg_tensile.execution.data.splits import Division, Rows, Split, divide, no_target
from pg_tensile.execution.data.targets import Target
from pg_tensile.execution.data.texts import TextColumns
from pg_tensile.execution.data.weights import Weighting, Weights, fit_weights

NO_WEIGHTS = Weighting()
_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


@dataclass(frozen=True)
class FittedPreprocessing:
    """A preprocessing and the columns on which it was fitted, to apply it to their chunks."""

    preprocessing: Preprocessing
    columns: tuple[Column, ...]
    training_rows: int
    validation_rows: int
    skipped_rows: int
    tables: tuple[NDArray[Any], ...]  # of CategoryInputs: for each category by sorted dictionary code, then null
    label_codes: NDArray[np.int64] | None  # text targets: label by sorted dictionary code, −1 if it is not a label
    roles: Roles
    division: Division
    weights: Weights | None = None
    not_finite_rows: int = 0  # of the skipped ones: the target is NaN or infinite
    suits_log: bool = False  # a regression's target is an amount, skewed, and its transform was left open

    def with_target(self, chunk: Chunk) -> Chunk:
        """Return the chunk without the rows that have no target."""
        return self.roles.with_target(chunk)

    def training_part(self, chunk: Chunk) -> Chunk:
        """Return the chunk's training rows."""
        return take(chunk, np.flatnonzero(self.roles.has_target(chunk) & ~self.division.validation_rows(chunk)))

    def inputs(self, chunk: Chunk) -> Inputs:
        """Return the chunk's features in the form of a PREDICT frame."""
        features = [(self.columns[index], chunk.columns[index]) for index in self.roles.features]
        numbers = [float_values(v) for c, v in features if c.type != "text" and not c.is_array]
        text = [v.data for c, v in features if c.type == "text"]
        arrays = [ArraysInput(np.where(v.nulls, -1, v.lengths), float_elements(v)) for c, v in features if c.is_array]
        categories = [CategoryInput(codes, table) for codes, table in zip(text, self.tables, strict=True)]
        return Inputs(chunk.rows, np.array(numbers).reshape(len(numbers), chunk.rows), categories, arrays)

    def encode_target(self, chunk: Chunk) -> NDArray[Any]:
        """Return the target as the loss takes it: float32 [rows] (regression, binary) or int64 labels [rows].

        The chunk must have no row without a target (`with_target`)."""
        preprocessing = self.preprocessing
        values = chunk.columns[self.roles.target]
        if preprocessing.task == Task.REGRESSION:
            target = preprocessing.target
            x = target.transformed(float_values(values))
            return standardise(x, Scaling.of(target.mean, target.std)).astype(np.float32)
        if self.label_codes is not None:
            labels = self.label_codes[values.data]
        else:
            known = class_values(self.columns[self.roles.target], values)
            labels = np.searchsorted(np.array(preprocessing.label_values, known.dtype), known)
        return labels.astype(np.int64 if preprocessing.task == Task.MULTICLASS else np.float32)


def fit(
    rows: Rows,
    split: Split,
    task: str | None = None,
    tokens: TokenLimits | None = None,
    weighting: Weighting = NO_WEIGHTS,
    transform: str | None = None,
    ranks: bool = False,
    texts: TextColumns | None = None,
) -> FittedPreprocessing:
    """Fit all features on the training rows, and the labels on all rows with a target.

    `task`: regression or classification; None means classification for text and boolean targets, else regression.
    `tokens`: integer arrays are tokens with these limits; None means that they are numbers. `transform` of a
    regression's target: none, log, quantile or auto; None: left open, which is none. `ranks`: numbers are taken as
    ranks, too (ranks.py), and elements of arrays have scales of their own. `texts`: the text columns that are
    tokenised; None means that all are categories. Raises DataError if there is no target or no training row, if the
    rows cannot be divided or weighted, if the target has only one value or too many labels, and for columns that cannot
    be used.
    """
    columns = rows.columns
    roles = Roles.of(columns, split.by, weighting.column, split.flagged)
    classify = _is_classification(columns[roles.target], task)
    division = divide(rows, split, roles, classify)
    encoded = {} if texts is None else _encode(rows, roles, texts)
    used_text = sum(columns[index].type == "text" and index not in encoded for index in roles.features)
    fitters: dict[int, Any] = {
        index: TextFitter(columns[index], *encoded[index])
        if index in encoded
        else _fitter(columns[index], rows.dictionaries[index], used_text, tokens, ranks)
        for index in roles.features
    }
    fitters[roles.target] = _target_fitter(columns[roles.target], rows.dictionaries[roles.target], classify, transform)
    known_rows = validation_rows = not_finite_rows = 0
    for block in rows.blocks():
        has_target = roles.has_target(block)
        not_finite_rows += int(roles.without_target(block)[1])
        validation = division.validation_rows(block) & has_target
        known_rows += int(has_target.sum())
        validation_rows += int(validation.sum())
        _observe(columns, fitters, block, has_target, validation, classify)
    if known_rows == 0:
        raise no_target(rows, roles)
    _check_sides(division, known_rows, validation_rows)
    for block in rows.blocks():
        training = take(block, np.flatnonzero(roles.has_target(block) & ~division.validation_rows(block)))
        for index, fitter in fitters.items():
            fitter.observe_again(training.columns[index])
    preprocessing = _preprocessing(columns, roles, fitters, classify)
    if texts is not None:
        preprocessing = replace(preprocessing, text=texts.source)
    counts = (known_rows - validation_rows, validation_rows, rows.rows - known_rows)
    tables = _tables(rows, roles, preprocessing, {index: table for index, (table, _) in encoded.items()})
    fitted = FittedPreprocessing(
        preprocessing,
        columns,
        *counts,
        *tables,
        roles,
        division,
        not_finite_rows=not_finite_rows,
        suits_log=not classify and fitters[roles.target].suits_log,
    )
    labels = len(preprocessing.labels or ())
    return replace(fitted, weights=fit_weights(rows, roles, division, weighting, labels, fitted.encode_target))


def with_preprocessing(fitted: FittedPreprocessing, rows: Rows, preprocessing: Preprocessing) -> FittedPreprocessing:
    """Return what was fitted with another preprocessing, which has the same features and labels.

    The rows are those of `fit`; none of their features is tokenised."""
    tables, _ = _tables(rows, fitted.roles, preprocessing, {})
    return replace(fitted, preprocessing=preprocessing, tables=tables)


def _check_sides(division: Division, known_rows: int, validation_rows: int) -> None:
    """Raise DataError if one of two queries has no row with a target; other divisions leave rows to train on."""
    if division.by != "query":
        return
    if validation_rows == 0:
        hint = "Check the WHERE clause of validation_query, or leave it out."
        raise DataError("the validation query returned no row with a target", hint=hint)
    if validation_rows == known_rows:
        hint = "Check the query's WHERE clause and joins."
        raise DataError("the training query returned no row with a target", hint=hint)


def _encode(rows: Rows, roles: Roles, texts: TextColumns) -> dict[int, tuple[NDArray[np.int32], int]]:
    """Return the table of each feature that is tokenised, by index, and the vocabulary of its tokens.

    Raises DataError if a column that is named is no text, or if there is no column to tokenise."""
    features = {rows.columns[index].name: rows.columns[index] for index in roles.features}
    for name in texts.names or ():
        if name not in features or features[name].type != "text":
            given = f"of type {features[name].type}" if name in features else "not in the query, or no feature"
            hint = 'Correct the key "text" of the architecture, or select a column of type text.'
            raise DataError(f'the text column "{name}" is {given}', hint=hint)
    text = [index for index in roles.features if rows.columns[index].type == "text"]
    chosen = [index for index in text if texts.include(rows.columns[index].name)]
    if not chosen:
        hint = "Select a column of type text, or use another architecture."
        raise DataError("a pretrained model needs a text column, the query has none", hint=hint)
    encoder = texts.source.encoder()
    length = texts.source.length
    return {
        index: (encoder.encode([*(rows.dictionaries[index] or []), ""], length, padded=False), encoder.vocabulary)
        for index in chosen
    }


def _is_classification(target: Column, task: str | None) -> bool:
    if target.is_array or target.type == "timestamp":
        hint = "Use a number, a boolean or a text; extract(epoch from …) makes a number of a timestamp."
        raise DataError(f'the target "{target.name}" has the type {target.type}, which cannot be predicted', hint=hint)
    if target.type == "text" and task == "regression":
        hint = "Set the option task to classification."
        raise DataError(f'the target "{target.name}" is text, which has no regression', hint=hint)
    return task == "classification" if task is not None else target.type in ("text", "bool")


def _fitter(
    column: Column, strings: Sequence[str] | None, text_columns: int, tokens: TokenLimits | None, ranks: bool
) -> Any:
    """Return the fitter of a feature; `text_columns` share the bytes for strings."""
    if column.type == "text":
        return CategoryFitter(column, strings or [], MAX_STRINGS_BYTES // text_columns)
    if column.is_array:
        if tokens is not None and column.type in TOKEN_TYPES:
            return TokenFitter(column, tokens)
        return ArrayFitter(column, each=ranks)
    return NumberFitter(column, ranks)


def _target_fitter(column: Column, strings: Sequence[str] | None, classify: bool, transform: str | None) -> Any:
    if not classify:
        return TargetFitter(column, transform)
    if transform in ("log", "quantile"):
        hint = "Leave target_transform out, or set the option task to regression."
        raise DataError(f"target_transform {transform} is for a regression, but this is a classification", hint=hint)
    return CategoryFitter(column, strings or []) if column.type == "text" else ValueFitter(column)


def _observe(
    columns: Sequence[Column],
    fitters: Mapping[int, Any],
    block: Chunk,
    has_target: NDArray[np.bool_],
    validation: NDArray[np.bool_],
    classify: bool,
) -> None:
    """Observe one block in the first pass: features of training rows, labels and array lengths of all known rows."""
    training = take(block, np.flatnonzero(has_target & ~validation))
    rest = take(block, np.flatnonzero(validation))
    for index, fitter in fitters.items():
        fitter.observe(training.columns[index])
        if columns[index].target and classify:
            fitter.observe(rest.columns[index])
        elif columns[index].target:
            fitter.observe_validation(rest.columns[index])
        elif isinstance(fitter, ArrayFitter):
            fitter.observe_lengths(rest.columns[index])


def _preprocessing(
    columns: Sequence[Column], roles: Roles, fitters: Mapping[int, Any], classify: bool
) -> Preprocessing:
    features = tuple(replace(fitters[index].feature(), sql_type=columns[index].sql_type) for index in roles.features)
    column, fitter = columns[roles.target], fitters[roles.target]
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
        if not numbers or not all(np.isfinite(float(label)) for label in labels):
            return labels, None
        return labels, tuple(int(label) if _INTEGER.fullmatch(label) else float(label) for label in labels)
    values = tuple(fitter.values().tolist())
    if column.type == "bool":
        return tuple("true" if value else "false" for value in values), values
    if column.type in INTEGER_TYPES:
        return tuple(str(int(value)) for value in values), values
    kind = np.float32 if column.type == "float4" else np.float64
    return tuple(str(kind(value)).removesuffix(".0") for value in values), values


def _tables(
    rows: Rows, roles: Roles, preprocessing: Preprocessing, tokens: Mapping[int, NDArray[np.int32]]
) -> tuple[tuple[NDArray[Any], ...], NDArray[np.int64] | None]:
    """Return `tables` and `label_codes` of a `FittedPreprocessing`. `tokens`: tables of text features, by column."""
    text = [index for index in roles.features if rows.columns[index].type == "text"]
    tables = tuple(
        tokens[index] if index in tokens else preprocessing.table(category, rows.dictionaries[index] or [])
        for category, index in enumerate(text)
    )
    target = rows.dictionaries[roles.target]
    if target is None:
        return tables, None
    label_of = {label: number for number, label in enumerate(preprocessing.labels or ())}
    return tables, np.array([label_of.get(text, -1) for text in target], np.int64)
