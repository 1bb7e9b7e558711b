"""Texts, as in a CSV file, as values of a model's features: the numbers that PostgreSQL would give it.

A feature's `type` says how the column of the training query was packed (columns.py): texts are read as values of that
type are printed by PostgreSQL. Empty texts are nulls. Times without an offset are in UTC. Needs numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Feature, Inputs, Kind, Preprocessing

BOOLEANS = {"t": 1.0, "true": 1.0, "yes": 1.0, "on": 1.0, "f": 0.0, "false": 0.0, "no": 0.0, "off": 0.0}
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|nan|inf(inity)?)", re.ASCII | re.IGNORECASE)
NULL = "null"  # element of an array
ARRAYS = re.compile(r"[{}\[\]\s]+")

Value = TypeVar("Value")


def inputs_of(preprocessing: Preprocessing, columns: Mapping[str, Sequence[str]], rows: int, first: int = 1) -> Inputs:
    """Return the raw values of rows, of which `columns` has a text for each row by the feature's name.

    `first` is the number of the first row in messages. Raises DataError for a text that is not such a value."""
    numbers = np.empty((len(preprocessing.numbers), rows))
    for place, feature in enumerate(preprocessing.numbers):
        numbers[place] = numbers_of(feature, columns[feature.name], first)
    categories = [
        _category(preprocessing, place, columns[feature.name]) for place, feature in enumerate(preprocessing.categories)
    ]
    arrays = [_arrays(feature, columns[feature.name], first) for feature in preprocessing.arrays]
    return Inputs(rows, numbers, categories, arrays)


def numbers_of(feature: Feature, texts: Sequence[str], first: int) -> list[float]:
    """Return the numbers, or microseconds since 2000-01-01 UTC, of texts; NaN for null. `first` as in inputs_of."""
    return _converted(feature, texts, partial(_number, feature), np.nan, first)


def arrays_of(feature: Feature, texts: Sequence[str], first: int) -> list[NDArray[np.float64] | None]:
    """Return the arrays of texts, with NaN for an element that is null; None for null. `first` as in inputs_of."""
    return _converted(feature, texts, partial(_elements, feature), None, first)


def _converted(
    feature: Feature, texts: Sequence[str], convert: Callable[[str], Value], null: Value, first: int
) -> list[Value]:
    values = []
    for row, text in enumerate(texts, first):
        try:
            values.append(convert(text.strip()) if text else null)
        except (ValueError, OverflowError):
            kind = {Kind.TIMESTAMP: "a time", Kind.ARRAY: "an array of numbers"}.get(feature.kind, "a number")
            hint = f"Its type in the training query was {feature.type}; write values as PostgreSQL prints them."
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise DataError(f'feature "{feature.name}" is not {kind} in row {row}: {shown!r}', hint=hint) from None
    return values


def _number(feature: Feature, text: str) -> float:
    if feature.kind == Kind.TIMESTAMP:
        return _microseconds(text)
    if feature.type == "bool" and text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    return _float(text, feature.type)


def _float(text: str, type: str) -> float:
    """Return the number; one of the type real has its precision, as it had in training."""
    if not NUMBER.fullmatch(text):
        raise ValueError
    return float(np.float32(text)) if type.startswith("float4") else float(text)


def _microseconds(text: str) -> float:
    """Return the microseconds since 2000-01-01 UTC."""
    if text.lower().lstrip("-") == "infinity":
        return np.nan
    time = datetime.fromisoformat(text)
    return float(((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH) // MICROSECOND)


def _category(preprocessing: Preprocessing, place: int, texts: Sequence[str]) -> CategoryInput:
    strings = list(dict.fromkeys(text for text in texts if text))
    code = {text: number for number, text in enumerate(strings)} | {"": -1}
    places = np.fromiter((code[text] for text in texts), np.int32, len(texts))
    return CategoryInput(places, preprocessing.table(place, strings, padded=False))


def _arrays(feature: Feature, texts: Sequence[str], first: int) -> ArraysInput:
    parts = arrays_of(feature, texts, first)
    lengths = np.array([-1 if part is None else len(part) for part in parts], np.int32)
    return ArraysInput(lengths, np.concatenate([np.empty(0), *(part for part in parts if part is not None)]))


def _elements(feature: Feature, text: str) -> NDArray[np.float64] | None:
    """Return the elements of {1,2}, [1, 2] or, of bytea, \\x0102; NaN stands for a null."""
    if feature.type == "uint8[]" and text.startswith("\\x"):
        return np.frombuffer(bytes.fromhex(text[2:]), np.uint8).astype(np.float64)
    if text[:1] not in ("{", "[") or text[-1] not in ("}", "]"):
        raise ValueError
    items = [item for item in ARRAYS.sub("", text).split(",") if item]
    of_bool = feature.type == "bool[]"
    return np.array(
        [
            np.nan
            if item.lower() == NULL
            else BOOLEANS[item.lower()]
            if of_bool and item.lower() in BOOLEANS
            else _float(item, feature.type)
            for item in items
        ],
        np.float64,
    )
