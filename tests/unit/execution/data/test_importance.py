"""Permutation importance: for columns of every kind, and of samples of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data import importance
from pg_tensile.execution.data.evaluation import Targets
from pg_tensile.execution.data.importance import Rows, Sample, importances
from pg_tensile.execution.data.preprocessing import (
    ArraysInput,
    CategoryInput,
    Feature,
    Inputs,
    Kind,
    Preprocessing,
    Target,
    Task,
)

PREPROCESSING = Preprocessing(
    Task.REGRESSION,
    Target("y", "float8"),
    None,
    None,
    (
        Feature("x", Kind.NUMERIC, "float8"),
        Feature("c", Kind.CATEGORY, "text", categories=("a", "b", "c")),
        Feature("unused", Kind.NUMERIC, "float8"),
        Feature("v", Kind.ARRAY, "float8[]", length=2),
        Feature("constant", Kind.TIMESTAMP, "timestamp"),
    ),
)


def raw(rows: int, seed: int = 0) -> tuple[Inputs, NDArray[np.float64]]:
    """Return random features, and the target that `model` predicts exactly."""
    random = np.random.default_rng(seed)
    numbers = np.stack([random.normal(size=rows), random.normal(size=rows), np.full(rows, 7.0)])
    category = CategoryInput(random.integers(-1, 3, rows).astype(np.int32), np.array([1, 2, 3, 0]))
    lengths = random.choice(np.array([2, 2, -1], np.int32), rows)
    arrays = ArraysInput(lengths, random.normal(size=2 * int((lengths > 0).sum())))
    inputs = Inputs(rows, numbers, [category], [arrays])
    return inputs, model(inputs)[:, 0]


def model(inputs: Inputs) -> NDArray[np.float64]:
    codes = inputs.categories[0].table[inputs.categories[0].places]
    sums = np.zeros(inputs.rows)
    sums[inputs.arrays[0].lengths > 0] = inputs.arrays[0].elements.reshape(-1, 2).sum(axis=1)
    return (3 * inputs.numeric[0] + codes + sums / 10)[:, None]


def measure(rows: Rows, metric: str = "r2", repeats: int = 3, seed: int = 1) -> dict[str, tuple[Any, Any]]:
    result = importances(rows, Targets(rows.values, []), PREPROCESSING, model, metric, repeats, seed, lambda: None)
    order = [item.mean or 0.0 for item in result]
    assert order == sorted(order, reverse=True)
    return {item.feature: (item.mean, item.deviation) for item in result}


def test_features_rank_by_what_the_model_makes_of_them() -> None:
    result = measure(Rows.of(*raw(20_000)))
    assert result["x"][0] > result["c"][0] > result["v"][0] > 0
    assert result["unused"] == result["constant"] == (0.0, 0.0)
    # r2 falls by twice the share of the variance
    inputs, target = raw(20_000)
    assert result["x"][0] == pytest.approx(2 * 9 * inputs.numeric[0].var() / target.var(), rel=0.05)


def test_a_loss_grows_and_repeats_deviate() -> None:
    rows = Rows.of(*raw(500))
    result = measure(rows, "rmse")
    assert result["x"][0] > 0 and result["x"][1] > 0
    assert measure(rows, "rmse") == result != measure(rows, "rmse", seed=2)


def test_the_seed_and_the_batches_decide_nothing_about_a_whole_column() -> None:
    """All elements of an array, and nulls, move together: a permuted batch has the same rows as the column."""
    rows = Rows.of(*raw(100))
    order = np.random.default_rng(0).permutation(100)
    permuted = rows.take(order)
    assert np.array_equal(permuted.arrays[0].lengths, rows.arrays[0].lengths[order])
    assert (model(permuted.inputs())[:, 0] == model(rows.inputs())[:, 0][order]).all()


def test_rows_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows.of(*raw(100))
    outputs = np.concatenate([model(rows.cut(start, start + 30).inputs())[:, 0] for start in range(0, 100, 30)])
    assert np.array_equal(outputs, rows.values)
    whole = measure(rows)
    monkeypatch.setattr(importance, "BATCH_ROWS", 7)
    assert measure(rows) == whole


def test_nulls_and_tables_of_several_columns_survive() -> None:
    inputs, target = raw(50)
    tokens = np.array([[5, 6], [7, 8], [9, 0], [1, 1]])
    inputs = inputs._replace(categories=[*inputs.categories, CategoryInput(inputs.categories[0].places, tokens)])
    order = np.random.default_rng(0).permutation(50)
    category, text = Rows.of(inputs, target).take(order).inputs().categories
    places = inputs.categories[0].places[order]
    assert np.array_equal(category.places < 0, places < 0) and np.array_equal(text.places < 0, places < 0)
    assert np.array_equal(category.table[category.places], inputs.categories[0].table[places])
    assert np.array_equal(text.table[text.places], tokens[places])


def test_a_sample_is_random_bounded_and_of_whole_rows() -> None:
    sample = Sample(100, 1 << 30, 4)
    for seed in range(20):
        sample.add(Rows.of(*raw(37, seed)))
    rows = sample.result()
    assert len(rows.values) == 100
    assert np.array_equal(model(rows.inputs())[:, 0], rows.values)
    assert measure(rows)["x"][0] > 0
    small = Sample(100, 1000, 4)
    for seed in range(20):
        small.add(Rows.of(*raw(37, seed)))
    assert 0 < small.result().nbytes <= 1200


def test_few_rows_are_all_kept_in_order() -> None:
    sample = Sample(100, 1 << 30, 4)
    for seed in range(2):
        sample.add(Rows.of(*raw(37, seed)))
    assert sample.result().values.tolist() == [*raw(37, 0)[1], *raw(37, 1)[1]]


def test_tokens_of_parts_are_padded_to_the_longest_text() -> None:
    sample = Sample(100, 1 << 30, 4)
    expected = []
    for width in (3, 1, 2):
        inputs, target = raw(20)
        tokens = np.arange(1, 4 * width + 1).reshape(4, width)
        tokens[-1] = [7] + [0] * (width - 1)  # of the empty text
        text = CategoryInput(inputs.categories[0].places, tokens)
        sample.add(Rows.of(inputs._replace(categories=[*inputs.categories, text]), target))
        expected += [[*tokens[row], *[0] * (3 - width)] for row in text.places]
    _, joined = sample.result().inputs().categories
    assert joined.table[joined.places].tolist() == expected


def test_an_undefined_metric_is_refused() -> None:
    rows = Rows.of(*raw(10))._replace(values=np.ones(10))
    with pytest.raises(DataError, match='"r2" is not defined'):
        measure(rows)
