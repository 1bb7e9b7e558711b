"""Attributions of a prediction to features: Shapley values against a row of average features.

A feature's attribution is how much the prediction changes when the feature's value replaces the average one, averaged
over orders in which the features are replaced. A feature is replaced as a whole before the preprocessing, so everything
that a model gets from one column changes together. The average of each kind:

    numeric, timestamp  the mean of the training rows; a timestamp has no cycles then, unless training rows lack it
    category            the most frequent string, or null if that is more frequent
    text                null
    array               the mean at every position
    tokens              no token

Needs numpy, and PyTorch and captum to attribute.
"""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Inputs, Kind, Preprocessing
from pg_tensile.execution.global_state import alone

# An explanation takes about as long as a prediction for so many rows, but has at least one order of all features.
EVALUATIONS = 2048
ORDERS = 64
NUMBERS = (Kind.NUMERIC, Kind.TIMESTAMP)


def attributions(
    preprocessing: Preprocessing, row: Inputs, predict: Callable[[Inputs], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return the attribution of each feature [features] to the prediction for `row`, the only row of the inputs.

    `predict` returns the predictions [rows] for the inputs of some rows. All orders of the features are evaluated if
    they are few, else ORDERS random ones, the same in every call."""
    import torch

    captum = _captum()
    count = len(preprocessing.features)
    mixture = Mixture(preprocessing, row)
    ends = predict(mixture.inputs(np.array([[False] * count, [True] * count])))
    unit = float(np.abs(ends).max()) or 1.0  # captum adds up in float32

    def predict_mixed(present: Any) -> Any:
        return torch.from_numpy(predict(mixture.inputs(present.numpy() > 0.5)) / unit)

    orders = min(max(EVALUATIONS // count, 1), ORDERS)
    own, average = torch.ones((1, count)), torch.zeros((1, count))
    if math.factorial(count) <= orders:
        result = captum.ShapleyValues(predict_mixed).attribute(own, average, perturbations_per_eval=count)
    else:
        with alone(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            sampling = captum.ShapleyValueSampling(predict_mixed)
            result = sampling.attribute(own, average, n_samples=orders, perturbations_per_eval=count)
    values: NDArray[np.float64] = result[0].double().numpy() * unit
    return values


@cache
def _captum() -> Any:
    """Import captum, which imports matplotlib, which writes a cache: into a folder that is removed at once."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("MPLCONFIGDIR", folder)
        return importlib.import_module("captum.attr")


class Mixture:
    """Rows that have some features of one row, and the average of all others."""

    def __init__(self, preprocessing: Preprocessing, row: Inputs) -> None:
        numbers = [np.nan if not f.nulls else f.mean for f in preprocessing.numbers]
        self._numbers = (row.numeric, np.array(numbers, np.float64).reshape(-1, 1))
        self._categories: list[tuple[CategoryInput, int]] = []
        for number, (feature, category) in enumerate(zip(preprocessing.categories, row.categories, strict=True)):
            average = -1  # null
            if feature.mode is not None:
                table = np.append(category.table[:-1], [*preprocessing.codes(number, [feature.mode]), 0])
                category, average = CategoryInput(category.places, table), len(table) - 2
            self._categories.append((category, average))
        self._arrays = [
            (array, np.full(f.length or 0, np.nan) if f.tokens is None else np.empty(0))
            for f, array in zip(preprocessing.arrays, row.arrays, strict=True)
        ]
        self._of_kind = [_of_kind(preprocessing, group) for group in (NUMBERS, (Kind.CATEGORY,), (Kind.ARRAY,))]

    def inputs(self, present: NDArray[np.bool_]) -> Inputs:
        """Return the inputs of rows with these features of the row, `present` [rows, features]."""
        numbers, categories, arrays = (present[:, features].T for features in self._of_kind)
        return Inputs(
            len(present),
            np.where(numbers, *self._numbers),
            [
                CategoryInput(np.where(own, category.places[0], average), category.table)
                for own, (category, average) in zip(categories, self._categories, strict=True)
            ],
            [_mixed_array(own, *array) for own, array in zip(arrays, self._arrays, strict=True)],
        )


def _of_kind(preprocessing: Preprocessing, kinds: tuple[Kind, ...]) -> NDArray[np.intp]:
    return np.array([i for i, feature in enumerate(preprocessing.features) if feature.kind in kinds], np.intp)


def _mixed_array(own: NDArray[np.bool_], array: ArraysInput, average: NDArray[np.float64]) -> ArraysInput:
    lengths = np.where(own, array.lengths[0], len(average))
    elements = [array.elements if present else average for present in own.tolist()]
    return ArraysInput(lengths, np.concatenate(elements))
