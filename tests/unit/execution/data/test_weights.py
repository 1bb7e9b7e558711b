"""Rows count by their weights: a column, balanced labels, or both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data.weights import Weighting
from tests.unit.rows import Prepared, Rows

BALANCED = Weighting(balanced=True)


def rows_of(labels: list[Any], weights: list[Any] | None = None, kind: str = "float8") -> Rows:
    columns: dict[str, tuple[str, Any]] = {"x": ("int4", list(range(len(labels))))}
    if weights is not None:
        columns["w"] = (kind, weights)
    return Rows(columns | {"y": ("text" if isinstance(labels[0], str) else "float8", labels)})


def row_numbers(prepared: Prepared) -> np.ndarray:
    """The numbers of the training rows: the ranks of feature x, of which all rows train."""
    ranks: np.ndarray = prepared.dataset.training.features.numeric[:, 0].argsort().argsort()
    return ranks


LABELS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=3, max_size=40).filter(lambda y: len(set(y)) > 1)


@given(LABELS, st.data())
def test_weights_are_those_of_scikit_learn(labels: list[str], data: st.DataObject) -> None:
    balanced = data.draw(st.booleans(), "balanced")
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(labels), max_size=len(labels)), "weights")
    prepared = rows_of(labels, weights).prepare(0.0, weighting=Weighting("w", balanced))
    expected = np.array(weights)
    if balanced:
        from sklearn.utils.class_weight import compute_class_weight

        names = np.unique(labels)
        factors = compute_class_weight("balanced", classes=names, y=np.array(labels), sample_weight=expected)
        expected = expected * factors[np.searchsorted(names, labels)]
    weight = prepared.dataset.training.weight
    assert weight is not None and weight.dtype == np.float32
    np.testing.assert_allclose(weight, (expected / expected.mean())[row_numbers(prepared)], rtol=1e-5)
    assert [feature.name for feature in prepared.fitted.preprocessing.features] == ["x"]


def test_balanced_labels_have_the_same_weight_in_sum_on_the_training_rows() -> None:
    labels = ["rare" if number % 20 == 0 else "usual" for number in range(400)]
    prepared = rows_of(labels).prepare(0.25, weighting=BALANCED)
    table = prepared.dataset.training
    assert table.weight is not None and prepared.dataset.validation.weight is not None
    sums = np.bincount(table.target.astype(int), table.weight)
    assert sums[0] == pytest.approx(sums[1], rel=1e-5) and table.weight.mean() == pytest.approx(1, rel=1e-5)
    assert set(prepared.dataset.validation.weight.tolist()) <= set(table.weight.tolist())
    assert table.row_bytes == 4 + 4 + 4


def test_a_label_without_training_rows_counts_like_a_row_without_weights() -> None:
    labels = ["rare" if number == 5 else "ab"[number % 2] for number in range(200)]
    rows = rows_of(labels)
    rows.columns = {"group": ("int4", [number // 10 for number in range(200)]), **rows.columns}
    for seed in range(20):
        prepared = rows.prepare(0.5, seed=seed, weighting=BALANCED, split_by="group")
        validation = prepared.dataset.validation
        assert validation.weight is not None
        rare = validation.weight[validation.target == 2]
        if len(rare):
            assert rare.tolist() == [1.0]
            return
    raise AssertionError("the rare label never validated")


def test_rows_without_a_target_need_no_weight() -> None:
    prepared = rows_of([1.0, None, 3.0, 5.0], [1, None, 3, 2], "int4").prepare(0.0, weighting=Weighting("w"))
    assert prepared.dataset.training.weight is not None
    np.testing.assert_allclose(np.sort(prepared.dataset.training.weight), [0.5, 1.0, 1.5])


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        ([1, None, 2, None], "float8", 'the weight column "w" is null in 2 rows'),
        ([1, -1, 2, -math.inf], "float8", 'the weight column "w" is negative in 2 rows'),
        ([math.nan, math.inf, 2, -1], "float8", "is negative in 1 rows, infinite or not a number in 2 rows"),
        ([0, 0, 0, 0], "int4", 'the weight column "w" is 0 in all training rows'),
        ([1.7e308] * 4, "float8", 'the weights in column "w" are too large'),
        (["a", "b", "c", "d"], "text", 'the weight column "w" has the type text'),
        ([[1], [1], [1], [1]], "int4[]", 'the weight column "w" has the type int4'),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_wrong_weights_are_errors(weights: list[Any], kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        rows_of([1.0, 2.0, 3.0, 4.0], weights, kind).prepare(0.0, weighting=Weighting("w"))
    assert error.value.hint


def test_weights_that_are_0_in_the_validation_part_are_an_error() -> None:
    flags = [False] * 6 + [True] * 2
    columns: dict[str, tuple[str, Any]] = {"tensile_validation": ("bool", flags), "w": ("int4", [1] * 6 + [0] * 2)}
    rows = Rows({**columns, "x": ("int4", list(range(8))), "y": ("int4", list(range(8)))})
    with pytest.raises(DataError, match='"w" is 0 in all validation rows'):
        rows.prepare(0.2, flagged=True, weighting=Weighting("w"))


@pytest.mark.parametrize("count", [1, 5])
def test_a_weight_beside_which_the_validation_part_does_not_count_is_an_error(count: int) -> None:
    flags, weights = [False] * 6 + [True] * 2, [1.0] * (6 - count) + [1e300] * count + [1.0] * 2
    columns: dict[str, tuple[str, Any]] = {"tensile_validation": ("bool", flags), "w": ("float8", weights)}
    rows = Rows({**columns, "x": ("int4", list(range(8))), "y": ("int4", list(range(8)))})
    with pytest.raises(DataError, match="so uneven that the validation rows do not count") as error:
        rows.prepare(0.2, flagged=True, weighting=Weighting("w"))
    assert error.value.hint == 'Limit the largest ones, as with least("w", 1000).'


def test_weights_need_their_column_and_labels() -> None:
    rows = rows_of([1.0, 2.0, 3.0], [1, 2, 3])
    for name, message in (("z", 'the query has no weight column "z"'), ("y", 'the weight column "y" is the target')):
        with pytest.raises(DataError, match=message):
            rows.prepare(weighting=Weighting(name))
    with pytest.raises(DataError, match='"w" cannot be both the weight and the split column'):
        rows.prepare(split_by="w", weighting=Weighting("w"))
    with pytest.raises(DataError, match="class_weight balances the labels of a classification, but this is a reg"):
        rows.prepare(0.0, weighting=BALANCED)
