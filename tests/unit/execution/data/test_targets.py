"""Transforms of a regression's target: undone in answers, fitted to training rows, stored with a version."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import interval, predictions, target_values
from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.data.targets import MOST_QUANTILES, Target, choose_transform, is_amount
from tests.unit.rows import Prepared, Rows

NUMBERS = st.lists(st.floats(-1e9, 1e9) | st.integers(-5, 5).map(float), min_size=4, max_size=60)


def fitted(values: list[float], transform: str, validation: float = 0.0) -> Prepared:
    rows = Rows({"x": ("int4", list(range(len(values)))), "y": ("float8", values)})
    return rows.prepare(validation, transform=transform)


@pytest.mark.parametrize("transform", ["none", "log", "quantile", "auto"])
def test_transforms_are_undone(transform: str) -> None:
    @given(NUMBERS.filter(lambda values: len(set(values)) > 1))
    def check(values: list[float]) -> None:
        prepared = fitted(values, transform)
        preprocessing = Preprocessing.from_json(json.loads(json.dumps(prepared.fitted.preprocessing.to_json())))
        assert preprocessing == prepared.fitted.preprocessing
        target = preprocessing.target
        x = np.sort(np.array(values))
        z = target.transformed(x)
        assert (np.diff(z) >= 0).all()
        scale = max(np.abs(x).max(), 1e-9)
        np.testing.assert_allclose(target.original(z), x, rtol=1e-6, atol=1e-9 * scale)
        encoded = prepared.dataset.training.target.astype(np.float64)
        assert encoded.std() == pytest.approx(1, abs=1e-3) and encoded.mean() == pytest.approx(0, abs=1e-3)
        answers = np.sort(target_values(encoded, preprocessing))
        np.testing.assert_allclose(answers, x, rtol=1e-3, atol=1e-5 * scale)

    check()


def test_logs_have_a_sign_and_stay_finite() -> None:
    target = Target("y", "float8", transform="log")
    x = np.array([-np.e + 1, 0.0, 1e-12, np.e - 1])
    np.testing.assert_allclose(target.transformed(x), [-1, 0, 1e-12, 1])
    assert np.isfinite(target.original(np.array([-1e6, 1e6]))).all()


def test_quantiles_are_few_and_limit_the_answers() -> None:
    values = np.random.default_rng(0).lognormal(3, 2, 5000)
    preprocessing = fitted(values.tolist(), "quantile").fitted.preprocessing
    target = preprocessing.target
    assert target.quantiles is not None and len(target.quantiles) == MOST_QUANTILES
    assert (target.quantiles[0], target.quantiles[-1]) == (values.min(), values.max())
    z = target.transformed(values)
    assert abs(z.mean()) < 0.01 and z.std() == pytest.approx(1, abs=0.01)
    assert np.abs(z - np.sort(np.random.default_rng(1).normal(size=5000))[values.argsort().argsort()]).mean() < 0.05
    assert target_values(np.array([-1e9, 1e9]), preprocessing).tolist() == [values.min(), values.max()]


def test_targets_of_few_values_have_quantiles() -> None:
    target = fitted([0.0] * 30 + [1.0] * 10 + [7.0], "quantile").fitted.preprocessing.target
    z = target.transformed(np.array([0.0, 1.0, 7.0]))
    assert (np.diff(z) > 0).all()
    assert target.original(z).tolist() == [0.0, 1.0, 7.0]


@pytest.mark.parametrize(
    ("values", "transform"),
    [
        (np.random.default_rng(0).normal(5, 1, 3000), None),
        (np.random.default_rng(0).uniform(size=3000), None),
        (np.random.default_rng(0).lognormal(8, 1, 3000), "log"),
        (-np.random.default_rng(0).lognormal(8, 1, 3000), "log"),
        (np.random.default_rng(0).lognormal(8, 2, 3000) * 1e-12, "quantile"),
        (np.array([1e308, -1e308, 5.0]), None),
        (np.array([]), None),
    ],
)
def test_auto_takes_the_transform_that_targets_need(values: np.ndarray, transform: str | None) -> None:
    assert choose_transform(values) == transform


RNG = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("values", "amounts"),
    [
        (RNG.poisson(2.0, 500), True),
        (RNG.poisson(0.01, 500), True),
        (RNG.lognormal(3, 1, 500), True),
        (RNG.uniform(size=500), False),
        (RNG.normal(20, 4, 500), False),  # temperatures in summer
        (RNG.lognormal(3, 1, 500) - 5, False),
        (np.array([]), False),
    ],
)
def test_counts_and_amounts_are_recognised(values: np.ndarray, amounts: bool) -> None:
    assert is_amount(values.astype(float), min(values.tolist(), default=0.0)) == amounts


@pytest.mark.parametrize("transform", ["none", "log", "quantile"])
def test_no_answer_about_amounts_is_negative(transform: str) -> None:
    outputs = np.array([[-50.0], [0.0], [2.0]])
    for values, negative in ((RNG.poisson(2.0, 500), False), (RNG.poisson(2.0, 500) - 1, True)):
        preprocessing = fitted(values.astype(float).tolist(), transform).fitted.preprocessing
        preprocessing = replace(preprocessing, conformal=Conformal.of(np.full(100, 9.0)))
        for answers in (predictions(outputs, preprocessing), interval(outputs, preprocessing, 0.9)[0]):
            assert answers.min() < 0.0 if negative else answers.min() == 0.0


def test_a_negative_target_of_a_validation_row_is_seen() -> None:
    values = [*range(1, 81), *[-1.0] * 20]
    rows = Rows({"t": ("timestamp", [*range(100)]), "y": ("float8", [abs(v) ** 3 * np.sign(v) for v in values])})
    assert not rows.prepare(0.2, split_by="t").fitted.preprocessing.target.nonnegative
    assert rows.prepare(0.0, split_by="t").fitted.preprocessing.target.nonnegative is False


def test_a_transform_is_fitted_to_the_training_rows() -> None:
    values = list(range(1, 201))
    rows = Rows({"t": ("timestamp", values), "y": ("float8", [float(v) for v in values])})
    target = rows.prepare(0.5, split_by="t", transform="quantile").fitted.preprocessing.target
    assert target.quantiles is not None and target.quantiles[-1] == 100.0


@pytest.mark.parametrize("transform", ["log", "quantile"])
def test_labels_have_no_transform(transform: str) -> None:
    rows = Rows({"x": ("int4", [1, 2, 3, 4]), "y": ("text", ["a", "b", "a", "b"])})
    with pytest.raises(DataError, match=f"target_transform {transform} is for a regression") as error:
        rows.prepare(0.0, transform=transform)
    assert error.value.hint
    assert rows.prepare(0.0, transform="auto").fitted.preprocessing.target.transform is None
