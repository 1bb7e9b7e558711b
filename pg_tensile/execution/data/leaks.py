"""Features that are suspicious before anything is trained: those that give the target away, and identifiers.

A feature gives the target away if it alone predicts the target nearly fully. Two halves of a sample of training rows
tell: the target of each value in one half predicts the rows of the other half (for numbers, the targets of the nearest
values). Values that occur once predict nothing in this way unless they are ordered as the target is.

An identifier is a category that is different in nearly every row, or an integer that numbers the rows.

Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.columns import INTEGER_TYPES, Chunk, Column, concatenate, cut, float_values
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.preprocessing import Feature, Kind, Task
from pg_tensile.execution.data.splits import Rows

SAMPLE_ROWS = 20_000
LEAST_ROWS = 200  # in the sample; fewer rows say too little
LEAST_OTHERS = 20  # rows of the second half that do not have its most frequent label
EXPLAINED = 0.99  # of the variance, or of the errors that the most frequent label makes
DISTINCT = 0.98  # of the rows, for an identifier
DENSE = 2  # rows have integers of a range at most so many times as wide, if they number the rows


@dataclass(frozen=True)
class Sample:
    """The first training rows in hash order, which are a random sample, and their encoded target."""

    chunk: Chunk
    target: NDArray[Any]


def sample_rows(rows: Rows, fitted: FittedPreprocessing) -> Sample:
    """Return at most SAMPLE_ROWS training rows."""
    parts: list[Chunk] = []
    count = 0
    for block in rows.blocks():
        block = fitted.training_part(block)
        parts.append(cut(block, 0, min(block.rows, SAMPLE_ROWS - count)))
        count += parts[-1].rows
        if count == SAMPLE_ROWS:
            break
    chunk = concatenate(parts)
    return Sample(chunk, fitted.encode_target(chunk))


def leaking_features(sample: Sample, fitted: FittedPreprocessing) -> list[str]:
    """Return the names of the features that alone predict the target nearly fully."""
    if sample.chunk.rows < LEAST_ROWS:
        return []
    regression = fitted.preprocessing.task == Task.REGRESSION
    explained = _explained_variance if regression else _avoided_errors
    names = []
    for index in fitted.roles.features:
        column = fitted.columns[index]
        if not column.is_array:
            codes = _codes(column, sample.chunk, index)
            if explained(codes, sample.target, ordered=column.type != "text") >= EXPLAINED:
                names.append(column.name)
    return names


def identifiers(sample: Sample, fitted: FittedPreprocessing) -> list[str]:
    """Return the names of the categories and integer features that identify rows."""
    names = []
    for index, feature in zip(fitted.roles.features, fitted.preprocessing.features, strict=True):
        integer = fitted.columns[index].type in INTEGER_TYPES and feature.kind == Kind.NUMERIC
        if integer and not _is_dense(feature, fitted):
            continue
        if integer or (feature.kind == Kind.CATEGORY and not feature.is_text):
            values = sample.chunk.columns[index]
            present = values.data[~values.nulls]
            if len(present) >= LEAST_ROWS and len(np.unique(present)) >= DISTINCT * len(present):
                names.append(feature.name)
    return names


def _is_dense(feature: Feature, fitted: FittedPreprocessing) -> bool:
    """Return whether integers are as close to each other as numbers of rows are."""
    if feature.low is None or feature.high is None:
        return False
    return feature.high - feature.low <= DENSE * (fitted.training_rows + fitted.validation_rows)


def _codes(column: Column, chunk: Chunk, index: int) -> NDArray[np.intp]:
    """Return codes [rows] from 0, equal for equal values and in their order; nulls have the last one."""
    values = chunk.columns[index]
    if column.type == "text":
        data: NDArray[Any] = np.where(values.nulls, np.iinfo(np.int32).max, values.data)
    else:
        data = float_values(values)
    return np.unique(data, return_inverse=True)[1]


def _halves(codes: NDArray[np.intp], target: NDArray[Any]) -> Sequence[NDArray[Any]]:
    """Return codes and targets of both halves; rows come in hash order, so the halves are random."""
    return codes[0::2], target[0::2], codes[1::2], target[1::2]


def _explained_variance(codes: NDArray[np.intp], target: NDArray[Any], ordered: bool) -> float:
    """Return the R2, on the second half, of the mean target of each code in the first half, 0 without variance.

    Unknown codes have the mean of all or, of ordered ones, a value between those of their neighbours."""
    codes, y, later_codes, later = _halves(codes, target.astype(np.float64))
    known, places, counts = np.unique(codes, return_inverse=True, return_counts=True)
    means = np.bincount(places, y) / counts
    if ordered:
        expected = np.interp(later_codes, known, means)
    else:
        table = np.full(int(max(codes.max(), later_codes.max())) + 1, y.mean())
        table[known] = means
        expected = table[later_codes]
    spread = float(((later - later.mean()) ** 2).sum())
    return 1.0 - float(((later - expected) ** 2).sum()) / spread if spread > 0 else 0.0


def _avoided_errors(codes: NDArray[np.intp], target: NDArray[Any], ordered: bool) -> float:
    """Return the part of the errors of the most frequent label that the codes avoid, on the second half.

    Each code has its most frequent label of the first half; unknown codes have the most frequent label of all or, of
    ordered ones, that of the nearest code."""
    codes, labels, later_codes, later = _halves(codes, target.astype(np.int64))
    pairs, counts = np.unique(np.stack((codes, labels)), axis=1, return_counts=True)
    order = np.lexsort((counts, pairs[0]))  # the most frequent label of a code comes last
    last = np.flatnonzero(np.diff(pairs[0][order], append=-1))
    known, best = pairs[0][order][last], pairs[1][order][last]
    places = np.searchsorted(known, later_codes).clip(max=len(known) - 1)
    if ordered:
        before = (places - 1).clip(min=0)
        nearer = np.abs(known[before] - later_codes) < np.abs(known[places] - later_codes)
        expected = best[np.where(nearer, before, places)]
    else:
        expected = np.where(known[places] == later_codes, best[places], np.bincount(labels).argmax())
    errors = len(later) - int(np.bincount(later).max())
    return 1.0 - float((expected != later).sum()) / errors if errors >= LEAST_OTHERS else 0.0
