"""Series and long arrays: what a model of tables takes of them, the same in training, prediction and a graph."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from pg_tensile.errors import DataError
from pg_tensile.execution.data import series
from pg_tensile.execution.data.preprocessing import ArraysInput, Inputs, Preprocessing
from pg_tensile.execution.data.series import is_series, numbers_of, segment_of, width_of
from pg_tensile.execution.exchange.raw_model import RawModel
from tests.unit.rows import Prepared, Rows

RNG = np.random.default_rng(4)
COUNT = 120
HOURS = RNG.integers(0, 5000, (COUNT, 1)) + np.arange(168)
DAILY = 10 * np.sin(2 * np.pi * HOURS / 24) + RNG.normal(size=HOURS.shape)
WALK = np.cumsum(RNG.normal(size=(COUNT, 40)), axis=1)
VECTORS = RNG.normal(size=(COUNT, 384)) * RNG.lognormal(size=384)


def prepared(values: NDArray[np.float64], ranks: bool = True) -> Prepared:
    columns = {"v": ("float8[]", values.tolist()), "y": ("float8", RNG.normal(size=len(values)).tolist())}
    return Rows(columns).prepare(validation=0.0, ranks=ranks)


def applied(preprocessing: Preprocessing, values: NDArray[np.float64]) -> NDArray[np.float32]:
    lengths = np.full(len(values), values.shape[1])
    inputs = Inputs(len(values), np.empty((0, len(values))), [], [ArraysInput(lengths, values.ravel())])
    array: NDArray[np.float32] = preprocessing.apply(inputs).arrays[0]
    return array


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (DAILY, True),
        (DAILY[:, :144], True),
        (np.maximum(DAILY, 0), True),
        (WALK, True),
        (WALK + 1e6, True),
        (np.where(RNG.random(WALK.shape) < 0.2, np.nan, WALK), True),
        (VECTORS, False),
        (np.abs(VECTORS), False),
        (RNG.normal(size=(COUNT, 40)), False),
        (WALK[:, :5], False),
        (np.zeros((COUNT, 40)), False),
        (np.full((COUNT, 40), np.nan), False),
    ],
)
def test_a_series_is_an_array_whose_neighbours_are_alike(values: NDArray[np.float64], expected: bool) -> None:
    assert is_series(values) == expected


def test_a_series_is_given_with_its_differences_last_element_mean_and_deviation() -> None:
    x = np.array([[1.0, 2.0, 4.0, 4.0], [1.0, math.nan, 5.0, math.inf]])
    expected = np.array([[1, 2, 4, 4, 1, 2, 0, 4, 2.75, np.std(x[0])], [1, 0, 5, 0, 0, 0, 0, 0, 3, 2]])
    np.testing.assert_allclose(np.nan_to_num(numbers_of(x, series=True)), expected)
    assert width_of(4, 1, True) == 10 and width_of(4, 1, False) == 4


def test_neighbours_of_a_long_array_are_one_number() -> None:
    assert [segment_of(length) for length in (1, 4096, 4097, 8192, 100_000)] == [1, 1, 2, 2, 25]
    x = np.arange(14.0).reshape(2, 7)
    x[1, :3] = math.nan
    x[0, 1] = math.inf
    assert np.nan_to_num(numbers_of(x, 3), nan=-1).tolist() == [[1, 4, 6], [-1, 11, 13]]
    assert width_of(7, 3, False) == 3 and width_of(100_000, segment_of(100_000), True) <= 2 * series.MOST_ELEMENTS + 2
    assert numbers_of(np.empty((0, 7)), 3).shape == (0, 3)  # of rows whose arrays are all null
    values = np.cumsum(RNG.normal(size=(30, 9000)), axis=1)
    features = prepared(values).dataset.training.features.arrays[0]
    assert features.shape == (30, 2 * 3000 + 2)


def test_each_number_of_a_series_has_a_scale_of_its_own() -> None:
    made = prepared(DAILY)
    (feature,) = made.fitted.preprocessing.features
    array = made.dataset.training.features.arrays[0]
    assert feature.series and feature.width == 338 and array.shape == (COUNT, 338)
    np.testing.assert_allclose(array.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(array.std(axis=0), 1, rtol=1e-4)
    again = Preprocessing.from_json(json.loads(json.dumps(made.fitted.preprocessing.to_json())))
    assert again == made.fitted.preprocessing
    assert (np.sort(applied(again, DAILY), axis=0) == np.sort(array, axis=0)).all()
    alone = np.concatenate([applied(again, row[None]) for row in DAILY])
    assert (alone == applied(again, DAILY)).all()


def test_other_arrays_stay_as_they_are() -> None:
    assert prepared(VECTORS).dataset.training.features.arrays[0].shape == VECTORS.shape
    digits = load_digits().images[:COUNT].reshape(COUNT, -1)
    (feature,) = prepared(digits, ranks=False).fitted.preprocessing.features
    assert feature.means is None and feature.series is None and feature.width == 64


def test_what_is_missing_or_huge_stays_finite() -> None:
    """Elements that are null, not a number or so large that sums overflow, and rows without any."""
    made = prepared(np.where(RNG.random(WALK.shape) < 0.3, np.nan, WALK))
    with warnings.catch_warnings(action="error"):
        for value in (np.nan, np.inf, 1.7e308, -1.7e308):
            for share in (0.5, 1.0):
                row = np.where(RNG.random((1, 40)) < share, value, WALK[:1])
                assert np.isfinite(applied(made.fitted.preprocessing, row)).all()
        assert np.isfinite(made.dataset.training.features.arrays[0]).all()
        huge = prepared(np.where(RNG.random(WALK.shape) < 0.5, 1.7e308, -1.7e308))
        assert np.isfinite(huge.dataset.training.features.arrays[0]).all()
    missing = applied(made.fitted.preprocessing, np.full((1, 40), np.nan))
    np.testing.assert_allclose(missing, 0, atol=1e-6)
    with pytest.raises(DataError, match='feature "v" has an array of 39 elements in row 1, not 40'):
        applied(made.fitted.preprocessing, WALK[:, :39])


@pytest.mark.parametrize("length", [40, 9001])
def test_a_graph_takes_the_same_numbers(length: int) -> None:
    values = np.cumsum(RNG.normal(size=(20, length)), axis=1)
    values[RNG.random(values.shape) < 0.1] = np.nan
    values[0] = np.nan
    preprocessing = prepared(values).fitted.preprocessing
    raw = RawModel(preprocessing, torch.nn.Identity())
    (found,) = raw._features([torch.from_numpy(values)]).arrays
    np.testing.assert_allclose(found.numpy(), applied(preprocessing, values), atol=1e-5)
