"""Intervals: ranks of the finite sample, scores that are thinned out, and coverage on held-out rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import interval
from pg_tensile.execution.data.conformal import MOST_SCORES, Conformal
from pg_tensile.execution.data.preprocessing import Preprocessing, Target, Task
from pg_tensile.execution.training.uncertainty import derive

REGRESSION = Preprocessing(Task.REGRESSION, Target("y", "float8", 7.0, 3.0), None, None, ())


def ranks(rows: int) -> Conformal:
    """Return the conformal scores 1, 2, …, `rows`: each is its own rank."""
    conformal = Conformal.of(np.random.default_rng(0).permutation(rows).astype(np.float64) + 1.0)
    assert conformal is not None
    return conformal


@given(st.integers(1, MOST_SCORES), st.integers(1, 999))
def test_of_few_rows_the_score_is_that_of_the_exact_rank(rows: int, thousandths: int) -> None:
    rank = math.ceil((rows + 1) * Fraction(thousandths, 1000))
    if rank <= rows:
        assert ranks(rows).radius(thousandths / 1000) == rank
    else:
        with pytest.raises(DataError, match="needs at least"):
            ranks(rows).radius(thousandths / 1000)


@given(st.integers(MOST_SCORES + 1, 20_000), st.integers(1, 999))
def test_of_many_rows_the_score_has_at_least_that_rank(rows: int, thousandths: int) -> None:
    conformal = ranks(rows)
    assert len(conformal.scores) == MOST_SCORES and conformal.scores[-1] == rows
    rank = math.ceil((rows + 1) * Fraction(thousandths, 1000))
    assert rank <= conformal.radius(thousandths / 1000) <= rank + math.ceil(rows / MOST_SCORES)


@pytest.mark.parametrize(("rows", "coverage", "least", "most"), [(5, 0.9, 9, "0.8333"), (98, 0.99, 99, "0.9898")])
def test_too_few_rows_name_what_would_do(rows: int, coverage: float, least: int, most: str) -> None:
    with pytest.raises(DataError, match=f"at least {least} validation rows, but the model had {rows} ") as error:
        ranks(rows).radius(coverage)
    assert error.value.hint is not None and f"at most {most}," in error.value.hint
    assert ranks(least).radius(coverage) == least
    assert ranks(rows).radius(float(most)) <= rows


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_the_interval_covers_held_out_rows_as_asked(coverage: float) -> None:
    """The errors are skewed and have heavy tails, and the predictions a bias."""
    rng = np.random.default_rng(5)
    outputs = rng.normal(size=(40_000, 1))
    targets = outputs[:, 0] + rng.standard_t(3, size=40_000) + rng.exponential(size=40_000)
    held_out = outputs[20_000:]
    conformal = Conformal.of(np.abs(outputs[:20_000, 0] - targets[:20_000]))
    lower, upper = interval(held_out, replace(REGRESSION, conformal=conformal), coverage)
    actual = targets[20_000:] * 3.0 + 7.0
    assert ((lower <= actual) & (actual <= upper)).mean() == pytest.approx(coverage, abs=0.01)
    assert (lower + upper) / 2 == pytest.approx(held_out[:, 0] * 3.0 + 7.0)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_learned_quantiles_make_the_width_differ_and_the_coverage_stay(coverage: float) -> None:
    """The errors grow with a feature, which the quantiles have learned but for a factor."""
    rng = np.random.default_rng(6)
    spreads = rng.uniform(0.1, 2.0, size=40_000)
    outputs = np.stack((np.zeros(40_000), -spreads, spreads), axis=1)
    targets = rng.normal(size=40_000) * spreads
    learned = replace(REGRESSION, quantiles=(0.1, 0.9))
    sample = {"outputs": torch.from_numpy(outputs[:20_000]), "target": torch.from_numpy(targets[:20_000])}
    derived = derive(learned, sample, calibrate=True).preprocessing
    lower, upper = interval(outputs[20_000:], derived, coverage)
    actual = targets[20_000:] * 3.0 + 7.0
    assert ((lower <= actual) & (actual <= upper)).mean() == pytest.approx(coverage, abs=0.01)
    assert np.corrcoef(upper - lower, spreads[20_000:])[0, 1] > 0.99
    assert (lower <= 7.0).all() and (upper >= 7.0).all()


@pytest.mark.parametrize("rows", [1000, 8000])
def test_the_newest_rows_widen_intervals_where_errors_grow(rows: int) -> None:
    rng = np.random.default_rng(7)
    growth = np.linspace(1.0, 2.0, rows)
    plain: list[float] = []
    weighted: list[float] = []
    later = rng.normal(size=4000) * 2.0
    for _ in range(20):
        scores, times = np.abs(rng.normal(size=rows)) * growth, np.arange(rows)
        order = rng.permutation(rows)
        found = [Conformal.of(scores), Conformal.of(scores, times), Conformal.of(scores[order], times[order])]
        assert found[1] == found[2]
        for conformal, inside in zip(found, (plain, weighted), strict=False):
            assert conformal is not None
            inside.append(float((np.abs(later) <= conformal.radius(0.9)).mean()))
    assert np.mean(plain) < 0.85 < 0.88 < np.mean(weighted) < 0.94


def test_alike_rows_are_covered_as_asked_or_slightly_more() -> None:
    rng = np.random.default_rng(8)
    inside, wider = [], []
    for _ in range(40):
        scores, times = rng.exponential(size=1000), rng.integers(0, 300, 1000)
        plain, weighted = Conformal.of(scores), Conformal.of(scores, times)
        assert plain is not None and weighted is not None and weighted.rows == 1000
        wider.append(np.array(weighted.scores) - plain.scores)
        inside.append(1.0 - np.exp(-weighted.radius(0.9)))
    assert np.min(wider) == 0.0 and 0.9 < np.mean(inside) < 0.93


def test_rows_of_one_time_count_the_same() -> None:
    scores = np.random.default_rng(9).exponential(size=500)
    assert Conformal.of(scores, np.full(500, 7)) == Conformal.of(scores)


def test_the_scores_survive_json() -> None:
    fitted = replace(REGRESSION, conformal=ranks(3000), quantiles=(0.1, 0.9))
    assert Preprocessing.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted


def test_there_are_no_scores_without_rows_or_with_infinite_ones() -> None:
    assert Conformal.of(np.array([])) is None
    assert Conformal.of(np.array([1.0, np.inf])) is None
    with pytest.raises(DataError, match="without validation rows"):
        interval(np.zeros((1, 1)), REGRESSION, 0.9)
    with pytest.raises(DataError, match="predicts labels"):
        interval(np.zeros((1, 1)), replace(REGRESSION, task=Task.BINARY), 0.9)
