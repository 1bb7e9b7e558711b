"""Rows of an evaluation: outputs, targets and groups as they arrive, then scores of all of them or of each group.

Of each row only the model's outputs, the target and the number of its group are kept, as arrays. Types of the target
may differ from those of the training query: numbers and booleans are compared with the labels' values, or with the
labels themselves if these are not numbers; texts are compared with the labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import answers, predictions, probabilities
from pg_tensile.execution.data.baseline_metrics import constant_outputs
from pg_tensile.execution.data.columns import INTEGER_TYPES, Buffer, Chunk, Column, decode_dictionary
from pg_tensile.execution.data.fitters import MAX_LABELS, class_values
from pg_tensile.execution.data.preprocessing import Preprocessing, Task
from pg_tensile.execution.data.scores import (
    Classified,
    Estimated,
    calibration,
    confusion,
    residual_quantiles,
    score,
    scores,
)

MAX_GROUPS = 10_000
NULL_GROUP = -1

# group, metric, label, predicted label, quantile, value, baseline: the columns of evaluate_model
Row = tuple[str | None, str, str | None, str | None, float | None, float | None, float | None]


class Targets(NamedTuple):
    """Targets [rows]: numbers of a regression, or classes (scores.py), whose names are `labels`."""

    values: NDArray[Any]
    labels: list[str]


class EvaluatedRows:
    """All rows of an evaluation. `columns` are the target and, if rows are grouped, a text."""

    def __init__(self, preprocessing: Preprocessing, columns: Sequence[Column], limit_bytes: int) -> None:
        """Prepare to keep rows in at most `limit_bytes`."""
        self._preprocessing = preprocessing
        self._columns = tuple(columns)
        self._limit_bytes = limit_bytes
        self._outputs: list[NDArray[Any]] = []
        self._values: list[NDArray[Any]] = []
        self._groups: list[NDArray[np.int32]] = []
        self._skipped: list[NDArray[np.int32]] = []  # groups of the rows without a target
        self.rows = 0  # all
        self.nbytes = 0

    def add(self, outputs: NDArray[Any], chunk: Chunk) -> None:
        """Add rows with the model's outputs [rows, outputs]. Raises DataError if they exceed the limit."""
        has_target = ~missing(chunk, self._columns[0])
        groups = _groups(chunk)
        self._outputs.append(_compact(outputs[has_target]))
        self._values.append(target_values(chunk, self._columns[0])[has_target])
        self._groups.append(groups[has_target])
        self._skipped.append(groups[~has_target])
        self.rows += chunk.rows
        self.nbytes += sum(arrays[-1].nbytes for arrays in (self._outputs, self._values, self._groups, self._skipped))
        if self.nbytes > self._limit_bytes:
            raise DataError(
                f"the predictions for {self.rows} rows take more than {self._limit_bytes:,} bytes",
                hint="Raise pg_tensile.dataset_cache, or evaluate a sample of the rows.",
            )

    def result(self, dictionary_buffers: Sequence[Buffer]) -> list[Row]:
        """Return the rows of evaluate_model's result; `dictionary_buffers` are those of ROWS_END.

        Raises DataError if no row has a target, or if there are too many labels or groups."""
        dictionaries = dictionaries_of(self._columns, dictionary_buffers)
        values, groups = _joined(self._values), _joined(self._groups)
        check_rows(self.rows, len(values), self._columns[0])
        targets = encoded(values, self._columns[0], dictionaries[0], self._preprocessing)
        outputs, skipped = _joined(self._outputs), _joined(self._skipped)
        if len(self._columns) == 1:
            return self._scored(None, outputs, targets, len(skipped))
        names = dictionaries[1] or []
        if len(names) > MAX_GROUPS:
            hint = f"Group by a column with at most {MAX_GROUPS} values."
            raise DataError(f"the rows form {len(names)} groups", hint=hint)
        result: list[Row] = []
        skipped_rows = np.bincount(skipped - NULL_GROUP, minlength=len(names) + 1)
        for group, index in _members(groups - NULL_GROUP, len(names) + 1):
            name = None if group == 0 else names[group - 1]
            if len(index) or skipped_rows[group]:
                of_group = targets._replace(values=targets.values[index])
                result += self._scored(name, outputs[index], of_group, int(skipped_rows[group]))
        return result

    def _scored(self, group: str | None, outputs: NDArray[Any], targets: Targets, skipped: int) -> list[Row]:
        """Return the rows of one group."""
        data = scored_data(outputs, targets, self._preprocessing)
        values = scores(data)
        baseline = self._baseline(list(values), targets)

        def row(metric: str, value: float | None, quantile: float | None = None) -> Row:
            return group, metric, None, None, quantile, value, baseline.get(metric)

        result = [row("rows", len(targets.values)), row("skipped_rows", skipped)]
        if isinstance(data, Estimated):
            result += [row(name, value) for name, value in values.items()]
            return result + [row("residual_quantile", value, quantile) for quantile, value in residual_quantiles(data)]
        result.append(row("unseen_labels", int((data.actual >= data.labels).sum())))
        result += [row(name, value) for name, value in values.items()]
        labels = targets.labels
        for actual, predicted, rows in confusion(data):
            result.append((group, "confusion", labels[actual], labels[predicted], None, rows, None))
        for quantile, probability, frequency, rows in calibration(data):
            result.append(row("calibration_probability", probability, quantile))
            result.append(row("calibration_frequency", frequency, quantile))
            result.append(row("calibration_rows", rows, quantile))
        return result

    def _baseline(self, metrics: Sequence[str], targets: Targets) -> dict[str, float | None]:
        """Return these metrics of the baseline for rows with these targets; empty if the version has none."""
        baseline = self._preprocessing.baseline
        if baseline is None:
            return {}
        preprocessing = replace(self._preprocessing, calibration=None)
        data = {
            name: scored_data(np.broadcast_to(outputs, (len(targets.values), len(outputs))), targets, preprocessing)
            for name, outputs in constant_outputs(baseline, preprocessing).items()
        }
        return {metric: score(metric, data[baseline.answer(metric)]) for metric in metrics}


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the parts as one array, which takes their place: the scores need memory, too."""
    parts[:] = [np.concatenate(parts)]
    return parts[0]


def _compact(outputs: NDArray[Any]) -> NDArray[Any]:
    """Return the outputs as float32 if that loses nothing, as for all models that compute in float32."""
    compact = outputs.astype(np.float32)
    return compact if (compact == outputs).all() else outputs


def _members(groups: NDArray[Any], count: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each group's number and the index of its rows."""
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=count))
    yield from enumerate(np.split(order, ends[:-1]))


def _groups(chunk: Chunk) -> NDArray[np.int32]:
    """Return the codes of the rows' groups [rows]."""
    if len(chunk.columns) == 1:
        return np.zeros(chunk.rows, np.int32)
    values = chunk.columns[1]
    return np.where(values.nulls, np.int32(NULL_GROUP), values.data)


def dictionaries_of(columns: Sequence[Column], buffers: Sequence[Buffer]) -> list[list[str] | None]:
    """Return the strings of each text column by their codes, None for another column."""
    pairs = iter(zip(buffers[::2], buffers[1::2], strict=True))
    return [decode_dictionary(*next(pairs)) if column.type == "text" else None for column in columns]


# ---- targets ----


def missing(chunk: Chunk, column: Column) -> NDArray[np.bool_]:
    """Return whether each row [rows] has no target: null or, if it is a float, not finite."""
    values = chunk.columns[0]
    if column.type in ("float4", "float8"):
        return values.nulls | ~np.isfinite(values.data)
    return values.nulls.copy()


def target_values(chunk: Chunk, column: Column) -> NDArray[Any]:
    """Return the targets [rows] as they are kept: int32 codes of texts, int64 of integers, or float64.

    Rows without a target are left out before."""
    values = chunk.columns[0]
    return values.data.astype(np.int32) if column.type == "text" else class_values(column, values)


def check_rows(rows: int, with_target: int, target: Column) -> None:
    """Raise DataError unless there are rows with a target."""
    if rows == 0:
        raise DataError("the query returned no rows", hint="Check the query's WHERE clause and joins.")
    if with_target == 0:
        what = "null, NaN or infinite" if target.type in ("float4", "float8") else "null"
        raise DataError(
            f'the target "{target.name}" is {what} in all {rows} rows', hint="Select rows that have a target."
        )


def encoded(
    values: NDArray[Any], column: Column, dictionary: list[str] | None, preprocessing: Preprocessing
) -> Targets:
    """Return the targets for values as `target_values` returns them. Raises DataError for too many labels."""
    if preprocessing.task == Task.REGRESSION:
        return Targets(values.astype(np.float64), [])
    labels = list(preprocessing.labels or ())
    class_of_text = {label: number for number, label in enumerate(labels)}
    class_of_number = {value: number for number, value in enumerate(preprocessing.label_values or ())}
    if dictionary is not None:
        distinct, index = np.unique(values, return_inverse=True)
        texts = [dictionary[code] for code in distinct.tolist()]
        classes = [class_of_text.get(text) for text in texts]
    else:
        if preprocessing.target.type == "float4":
            values = values.astype(np.float32).astype(np.float64)
        distinct, index = np.unique(values, return_inverse=True)
        numbers = distinct.tolist()
        texts = [_label_text(number, column) for number in numbers]
        by_number = preprocessing.label_values is not None
        classes = [
            class_of_number.get(number) if by_number else class_of_text.get(text)
            for number, text in zip(numbers, texts, strict=True)
        ]
    if classes.count(None) > MAX_LABELS:
        hint = "Is it the same column that the model was trained on?"
        message = f'the target "{preprocessing.target.name}" has {len(classes)} values, of which the model knows few'
        raise DataError(message, hint=hint)
    for number, label in enumerate(classes):
        if label is None:
            classes[number] = len(labels)
            labels.append(texts[number])
    return Targets(np.array(classes, np.int64)[index], labels)


def _label_text(number: float, column: Column) -> str:
    """Return the label of a number, as fitting names it."""
    if column.type == "bool":
        return "true" if number else "false"
    if column.type in INTEGER_TYPES:
        return str(int(number))
    kind = np.float32 if column.type == "float4" else np.float64
    return str(kind(number)).removesuffix(".0")


def scored_data(outputs: NDArray[Any], targets: Targets, preprocessing: Preprocessing) -> Classified | Estimated:
    """Return targets and predictions for the model's outputs [rows, outputs]."""
    exact = outputs.astype(np.float64)
    if preprocessing.task == Task.REGRESSION:
        return Estimated(targets.values, predictions(exact, preprocessing))
    return Classified(targets.values, probabilities(exact, preprocessing), answers(exact, preprocessing).label)
