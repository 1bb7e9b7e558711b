"""Texts of a CSV file as values, and the command that reads one: errors name row and column."""

from __future__ import annotations

import numpy as np
import pytest

from pg_tensile.errors import DataError
from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.exchange.values import inputs_of
from tests.unit.rows import every_type, printed

ROWS = every_type(200)


@pytest.fixture(scope="module")
def preprocessing() -> Preprocessing:
    return ROWS.prepare().fitted.preprocessing


def test_texts_become_the_values_that_training_had(preprocessing: Preprocessing) -> None:
    columns = {name: [printed(kind, value) for value in values] for name, (kind, values) in ROWS.columns.items()}
    inputs = inputs_of(preprocessing, columns, 200)
    for feature, row in zip(preprocessing.numbers, inputs.numeric, strict=True):
        values = ROWS.columns[feature.name][1]
        expected = np.array([np.nan if value is None else float(value) for value in values])
        assert np.array_equal(row, expected, equal_nan=True), feature.name
    (texts,) = inputs.categories
    codes = preprocessing.codes(0, [value or "" for value in ROWS.columns["text"][1]])
    found = texts.table[texts.places].tolist()
    assert found == [code if value else 0 for code, value in zip(codes, ROWS.columns["text"][1], strict=True)]
    for feature, arrays in zip(preprocessing.arrays, inputs.arrays, strict=True):
        values = ROWS.columns[feature.name][1]
        elements = [np.nan if item is None else float(item) for value in values for item in value or ()]
        assert arrays.lengths.tolist() == [-1 if value is None else len(value) for value in values]
        assert np.array_equal(arrays.elements, elements, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("int4", "1_000"), ("int4", "12 apples"), ("float8", "1e"), ("float8", "0x10"), ("float8", "١"),
        ("date", "yesterday"), ("date", "2024-02-30"), ("time", "12:00"), ("doubles", "1,2"), ("doubles", "{1,x}"),
        ("bytes", "\\xabc"), ("bool", "maybe"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_by_row_and_name(preprocessing: Preprocessing, name: str, text: str) -> None:
    columns = {feature.name: ["", ""] for feature in preprocessing.features}
    columns[name][1] = text
    with pytest.raises(DataError, match=f'feature "{name}" is not an? .* in row 8') as caught:
        inputs_of(preprocessing, columns, 2, first=7)
    assert caught.value.hint


def test_times_without_an_offset_are_in_utc(preprocessing: Preprocessing) -> None:
    columns = {feature.name: [""] * 4 for feature in preprocessing.features}
    columns["time"] = ["2000-01-02", "2000-01-02 01:00:00+01", "2000-01-02T00:00:00Z", "infinity"]
    place = [feature.name for feature in preprocessing.numbers].index("time")
    found = inputs_of(preprocessing, columns, 4).numeric[place]
    assert np.array_equal(found, [86_400e6] * 3 + [np.nan], equal_nan=True)
