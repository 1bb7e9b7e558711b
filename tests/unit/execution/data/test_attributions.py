"""Attributions: Shapley values of known models, whole columns replaced together, and every kind of feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.execution.data.answers import explained
from pg_tensile.execution.data.attributions import EVALUATIONS, Mixture, attributions
from pg_tensile.execution.data.preprocessing import Inputs, Kind, Preprocessing, Task
from tests.unit.execution.data.test_preprocessing import inputs_of
from tests.unit.rows import Rows, every_type


def numbers(rows: int = 50, columns: int = 3) -> Rows:
    rng = np.random.default_rng(0)
    return Rows(
        {name: ("float8", rng.normal(size=rows).tolist()) for name in [*(f"x{i}" for i in range(columns)), "y"]}
    )


def preprocessed(rows: Rows, row: int = 0) -> tuple[Preprocessing, Inputs]:
    preprocessing = rows.prepare().fitted.preprocessing
    return preprocessing, inputs_of(preprocessing, rows, [row])


def of_inputs(
    preprocessing: Preprocessing, model: Callable[[np.ndarray], np.ndarray]
) -> Callable[[Inputs], np.ndarray]:
    """Return a prediction that is a function of the numeric model inputs [rows, numeric]."""
    return lambda inputs: model(preprocessing.apply(inputs).numeric.astype(np.float64))


@pytest.mark.parametrize("columns", [1, 2, 3, 30])
def test_a_sum_is_attributed_to_its_terms(columns: int) -> None:
    preprocessing, row = preprocessed(numbers(columns=columns))
    weights = np.arange(1.0, columns + 1)
    own = preprocessing.apply(row).numeric[0]
    result = attributions(preprocessing, row, of_inputs(preprocessing, lambda x: 5.0 + x @ weights))
    np.testing.assert_allclose(result, own * weights, rtol=1e-5, atol=1e-5)


def test_a_product_is_shared_equally() -> None:
    preprocessing, row = preprocessed(numbers())
    own = preprocessing.apply(row).numeric[0].astype(np.float64)
    result = attributions(preprocessing, row, of_inputs(preprocessing, lambda x: x[:, 0] * x[:, 1]))
    np.testing.assert_allclose(result, [own[0] * own[1] / 2, own[0] * own[1] / 2, 0.0], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e60])
def test_they_add_up_to_the_difference_from_the_average(scale: float) -> None:
    preprocessing, row = preprocessed(numbers(columns=12))

    def model(x: np.ndarray) -> np.ndarray:
        return scale * np.tanh(x @ np.arange(12.0) + x[:, 0] * x[:, 3])

    result = attributions(preprocessing, row, of_inputs(preprocessing, model))
    own, average = preprocessing.apply(row).numeric.astype(np.float64), np.zeros((1, 12))
    np.testing.assert_allclose(result.sum(), (model(own) - model(average))[0], rtol=1e-4)


def test_they_are_the_same_in_every_call_and_touch_no_generator() -> None:
    preprocessing, row = preprocessed(numbers(columns=9))
    predict = of_inputs(preprocessing, lambda x: np.sin(x.prod(axis=1)))
    state = torch.get_rng_state()
    first = attributions(preprocessing, row, predict)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert (attributions(preprocessing, row, predict) == first).all()


def test_the_number_of_evaluations_is_bounded() -> None:
    preprocessing, row = preprocessed(numbers(columns=200))
    rows = 0

    def predict(inputs: Inputs) -> np.ndarray:
        nonlocal rows
        rows += inputs.rows
        return np.zeros(inputs.rows)

    attributions(preprocessing, row, predict)
    assert 200 < rows < EVALUATIONS + 200


def every_feature() -> Rows:
    """Return rows with numbers, a timestamp with an hour, categories and arrays, some of them null."""
    return every_type(200)


def test_a_mixture_of_all_features_is_the_row_and_of_none_the_average() -> None:
    rows = every_feature()
    preprocessing, row = preprocessed(rows, 3)
    count = len(preprocessing.features)
    mixture = Mixture(preprocessing, row)
    full = preprocessing.apply(mixture.inputs(np.ones((2, count), np.bool_))).flat()
    for array, own in zip(full, preprocessing.apply(row).flat(), strict=True):
        assert (array == own).all()
    average = preprocessing.apply(mixture.inputs(np.zeros((1, count), np.bool_)))
    assert (average.numeric[0, : len(preprocessing.numbers)] == 0.0).all()
    for code, feature in zip(average.categories[0].tolist(), preprocessing.categories, strict=True):
        strings = [value for value in rows.columns[feature.name][1] if value is not None]
        assert feature.mode is None or code == (feature.categories or ()).index(feature.mode) + 1
        assert feature.mode is None or strings.count(feature.mode) == max(map(strings.count, strings))


def test_each_feature_of_every_kind_changes_its_own_inputs_only() -> None:
    preprocessing, row = preprocessed(every_feature(), 3)
    count = len(preprocessing.features)
    assert {feature.kind for feature in preprocessing.features} == set(Kind)
    mixture = Mixture(preprocessing, row)
    features = preprocessing.apply(mixture.inputs(np.vstack((np.zeros((1, count)), np.eye(count))) > 0))
    flat = np.hstack([array.reshape(count + 1, -1) for array in features.flat()])
    changed = flat[1:] != flat[0]
    assert (changed.sum(axis=0) <= 1).all()  # no model input depends on two features
    full = preprocessing.apply(row).flat()
    assert (changed.any(axis=0) == (np.hstack([array.reshape(1, -1) for array in full])[0] != flat[0])).all()


def test_what_is_explained_fits_the_task() -> None:
    outputs: Any = np.array([[0.5, 2.0, -1.0]])
    preprocessing = preprocessed(numbers())[0]
    two = Preprocessing(Task.BINARY, preprocessing.target, ("a", "b"), None, ())
    three = Preprocessing(Task.MULTICLASS, preprocessing.target, ("a", "b", "c"), None, ())
    assert explained(outputs, two, 0) == pytest.approx(1 / (1 + np.exp(-0.5)))
    assert explained(outputs, three, 2) == pytest.approx(np.exp(-1) / np.exp(outputs).sum())
    target = preprocessing.target
    assert explained(outputs, preprocessing, -1) == pytest.approx(0.5 * target.std + target.mean)
