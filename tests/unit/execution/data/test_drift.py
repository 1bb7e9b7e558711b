"""Histograms of training rows and of predicted rows: every row is in one bin of each column, the right one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import Answers
from pg_tensile.execution.data.drift import (
    BINS,
    MOST_CATEGORIES,
    Counter,
    Reference,
    Sample,
    joined,
    reference_of,
    sample,
    with_predictions,
)
from pg_tensile.execution.data.preprocessing import CategoryInput, Inputs
from tests.unit.rows import Prepared, Rows, every_type

ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)


def prepared(columns: dict[str, tuple[str, Sequence[Any]]], **options: Any) -> tuple[Prepared, Reference]:
    rows = Rows(columns).prepare(validation=0.0, **options)
    return rows, reference_of(rows.fitted, rows.store.blocks())


def numbers(values: list[Any]) -> Reference:
    target = np.arange(len(values), dtype=float).tolist()
    return prepared({"x": ("float8", values), "y": ("float8", target)})[1]


def count(reference: Reference, *columns: list[float]) -> list[int]:
    counter = Counter(reference)
    counter.add(Sample(np.array(columns, np.float64), np.empty((0, len(columns[0])), np.int64)))
    assert counter.rows == len(columns[0])
    return counter.counts.tolist()


@example([0.0, -sys.float_info.max], [])
@given(st.lists(ANY, min_size=2, max_size=60), st.lists(ANY, max_size=60))
def test_every_number_is_in_one_bin(training: list[float], predicted: list[float]) -> None:
    reference = numbers(training)
    (histogram,) = reference.histograms
    assert sum(histogram.counts) == len(training)
    assert histogram.counts[0] == sum(not np.isfinite(x) for x in training)
    counts = count(reference, predicted)
    assert sum(counts) == len(predicted) and counts[0] == sum(not np.isfinite(x) for x in predicted)
    assert count(reference, training) == list(histogram.counts)
    assert len(counts) <= BINS + 1


def test_bins_are_quantiles() -> None:
    rng = np.random.default_rng(0)
    (histogram,) = numbers(rng.normal(size=2000).tolist()).histograms
    assert histogram.counts == (0, *(100,) * BINS)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e308, float(np.finfo(float).tiny)])
def test_a_frequent_value_has_a_bin_of_its_own(value: float) -> None:
    reference = numbers([value] * 100)
    assert count(reference, [value, value]) == [0, 0, 2, 0]
    assert count(reference, [value - abs(value) / 2 - 1e-310, value + abs(value) / 2 + 1, np.nan]) == [1, 1, 0, 1]


def test_booleans_and_columns_without_a_value() -> None:
    reference = prepared(
        {"flag": ("bool", [True, False, None] * 40), "void": ("float8", [None] * 120), "y": ("float8", [*range(120)])}
    )[1]
    flag, void = reference.histograms
    assert sorted(flag.counts) == [0, 0, 0, 40, 40, 40] and void.counts == (120, 0)
    assert sum(count(reference, [1.0, 0.0, 0.5], [1.0, np.nan, 2.0])) == 6


def test_categories_are_those_of_the_training_rows() -> None:
    words = [f"w{i % 80}" for i in range(4000)] + ["rare", None, None]
    columns: dict[str, tuple[str, Sequence[Any]]] = {"word": ("text", words)}
    columns |= {"y": ("float8", [float(i) for i in range(len(words))])}
    rows, reference = prepared(columns)
    (histogram,) = reference.histograms
    assert len(histogram.counts) == MOST_CATEGORIES + 2
    assert histogram.counts[0] == 2 and histogram.counts[1:-1] == (50,) * MOST_CATEGORIES
    preprocessing = rows.fitted.preprocessing
    strings = [*(preprocessing.features[0].categories or ())[:2], "never seen"]
    given_words = CategoryInput(np.array([0, 0, 1, 2, -1]), preprocessing.table(0, strings))
    counter = Counter(reference)
    counter.add(sample(preprocessing, Inputs(5, np.empty((0, 5)), [given_words], []), slice(5)))
    assert counter.counts[[0, 1, 2, -1]].tolist() == [1, 2, 1, 1] and counter.counts.sum() == 5


def test_an_unknown_string_is_no_null_where_no_string_was_rare() -> None:
    rows, reference = prepared({"word": ("text", ["a", "b"] * 50), "y": ("float8", [float(i) for i in range(100)])})
    preprocessing = rows.fitted.preprocessing
    assert preprocessing.features[0].buckets == 0
    counter = Counter(reference)
    words = CategoryInput(np.array([0, -1]), preprocessing.table(0, ["c"]))
    counter.add(sample(preprocessing, Inputs(2, np.empty((0, 2)), [words], []), [0, 1]))
    assert counter.counts.tolist() == [1, 0, 0, 1]


def test_all_types_of_columns() -> None:
    rows = every_type(400).prepare()
    reference = reference_of(rows.fitted, rows.store.blocks())
    kinds = {histogram.name: histogram.kind for histogram in reference.histograms}
    assert kinds == dict.fromkeys(
        ("bool", "int2", "int4", "int8", "float4", "float8", "text"), "feature"
    ) | dict.fromkeys(("date", "time"), "time")
    assert {sum(histogram.counts) for histogram in reference.histograms} == {rows.fitted.training_rows}
    counter = Counter(reference)
    for block in rows.store.blocks():
        inputs = rows.fitted.inputs(rows.fitted.training_part(block))
        halves = [slice(inputs.rows // 2), slice(inputs.rows // 2, None)]
        counter.add(joined([sample(rows.fitted.preprocessing, inputs, half) for half in halves]))
    assert counter.counts.tolist() == [n for histogram in reference.histograms for n in histogram.counts]


def answers(preprocessing: Any, rng: np.random.Generator, rows: int = 300) -> Answers:
    labels = max(len(preprocessing.labels or ()), 1)
    prediction = rng.random(rows)
    return Answers(prediction, prediction, rng.integers(0, labels, rows).astype(np.int32))


@pytest.mark.parametrize(("labels", "bins"), [(0, BINS + 1), (2, BINS + 1), (3, 4), (70, MOST_CATEGORIES + 1)])
def test_predictions(labels: int, bins: int) -> None:
    rng = np.random.default_rng(labels)
    target = [f"l{i % labels}" for i in range(700)] if labels else [float(i) for i in range(700)]
    columns: dict[str, tuple[str, Sequence[Any]]] = {"x": ("float8", [float(i) for i in range(700)])}
    columns |= {"y": ("text" if labels else "float8", target)}
    rows, features = prepared(columns)
    preprocessing = rows.fitted.preprocessing
    given_answers = answers(preprocessing, rng)
    reference = with_predictions(features, preprocessing, given_answers)
    histogram = reference.histograms[-1]
    assert (histogram.name, histogram.kind, len(histogram.counts)) == ("y", "prediction", bins)
    assert sum(histogram.counts) == 300
    counter = Counter(reference)
    counter.add(Sample(np.zeros((1, 300)), np.empty((0, 300), np.int64), given_answers))
    assert tuple(counter.counts[reference.starts[1] :]) == histogram.counts
    restored = Reference.from_json(json.loads(json.dumps(reference.to_json())), preprocessing)
    assert restored == reference and Reference.from_json(features.to_json(), preprocessing) == features


@pytest.mark.parametrize(
    "change",
    [
        None,
        [],
        {"columns": None},
        {"columns": []},
        {"columns": [1, 2]},
        {"counts": [1]},
        {"counts": [-1] * 21},
        {"counts": [True] * 21},
        {"counts": [1 << 60] * 21},
        {"counts": None},
        {"edges": [2.0, 1.0], "counts": [0] * 4},
        {"edges": [1.0, 1.0, 1.0], "counts": [0] * 5},
        {"edges": [float("inf")], "counts": [0] * 3},
        {"edges": [10**400], "counts": [0] * 3},
        {"edges": ["1"], "counts": [0] * 3},
        {"edges": [float(i) for i in range(100)], "counts": [0] * 102},
        {"name": "z"},
        {"kind": "time"},
        {"labels": [0]},
        {"more": 1},
    ],
)
def test_a_reference_that_no_training_makes(change: Any) -> None:
    rows, reference = prepared({"x": ("float8", [float(i) for i in range(100)]), "y": ("float8", [1.0, 2.0] * 50)})
    value = reference.to_json()
    if isinstance(change, dict) and "columns" not in change:
        value["columns"][0] |= change
    else:
        value = change
    with pytest.raises(DataError):
        Reference.from_json(value, rows.fitted.preprocessing)
