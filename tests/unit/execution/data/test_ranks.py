"""Rank scales: monotonic, bounded, the same for one row and for many, and of any finite numbers."""

from __future__ import annotations

import json
from statistics import NormalDist

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.data.ranks import BINS, LEAST_RANK, SMOOTH_LIMIT, RankScale, RankScales, rank_scale
from tests.unit.rows import every_type

LARGEST = -NormalDist().inv_cdf(LEAST_RANK) + 1e-5
numbers = st.floats(-1e300, 1e300) | st.integers(-5, 5).map(float)


@given(st.lists(numbers, min_size=1, max_size=60), st.lists(numbers, min_size=1, max_size=20))
def test_a_scale_is_monotonic_and_bounded(sample: list[float], others: list[float]) -> None:
    scale = rank_scale(np.array(sample))
    if scale is None:
        assert len(set(sample)) == 1
        return
    assert list(scale.values) == sorted(set(scale.values)) and list(scale.deviates) == sorted(set(scale.deviates))
    assert 2 <= len(scale.bins) <= BINS + 1
    scales, x = RankScales([scale]), np.sort(np.array([[*sample, *others]]))
    ranks, robust = scales.ranks(x)[0], scales.robust(x)[0]
    assert np.isfinite(ranks).all() and abs(ranks).max() <= LARGEST and (np.diff(ranks) >= -1e-12).all()
    assert np.isfinite(robust).all() and abs(robust).max() <= SMOOTH_LIMIT and (np.diff(robust) >= -1e-12).all()


@given(st.lists(st.lists(numbers, min_size=2, max_size=30), min_size=1, max_size=4), st.integers(0, 2**32))
def test_one_row_has_the_bits_that_it_has_among_many(samples: list[list[float]], seed: int) -> None:
    fitted = [rank_scale(np.array(sample)) for sample in samples]
    scales = RankScales([scale for scale in fitted if scale is not None])
    rng = np.random.default_rng(seed)
    x = np.array([rng.choice(sample, 9) for sample, scale in zip(samples, fitted, strict=True) if scale is not None])
    x = x.reshape(-1, 9) * rng.choice([0.5, 1.0, 1.5], x.size).reshape(-1, 9)
    for apply in (scales.ranks, scales.robust):
        whole: NDArray[np.float64] = apply(x)
        assert all(np.array_equal(whole[:, i : i + 1], apply(x[:, i : i + 1])) for i in range(9))


def test_ranks_of_a_normal_sample_are_its_numbers() -> None:
    sample = np.random.default_rng(0).normal(5.0, 2.0, 50_000)
    scale = rank_scale(sample)
    assert scale is not None
    x = np.linspace(1.0, 9.0, 50)
    assert np.allclose(RankScales([scale]).ranks(x.reshape(1, -1))[0], (x - 5.0) / 2.0, atol=0.05)
    assert abs(scale.center - 5.0) < 0.05 and abs(scale.spread - 2 * 1.349) < 0.1


def test_a_scale_survives_json() -> None:
    scale = rank_scale(np.array([1.0, 2.0, 1e9, -3.5]))
    assert scale is not None and RankScale.from_json(json.loads(json.dumps(scale.to_json()))) == scale


def test_numbers_become_ranks_and_nulls_the_median() -> None:
    prepared = every_type(500).prepare(ranks=True)
    preprocessing = prepared.fitted.preprocessing
    assert Preprocessing.from_json(json.loads(json.dumps(preprocessing.to_json()))) == preprocessing
    inputs, plain = preprocessing.model_inputs, every_type(500).prepare().fitted.preprocessing.model_inputs
    assert len(inputs.bins) == len(preprocessing.numbers) == inputs.numeric - plain.numeric and not plain.bins
    numeric = prepared.dataset.training.features.numeric
    ranks = numeric[:, -len(inputs.bins) :]
    nulls = numeric[:, len(preprocessing.numbers) :][:, : sum(f.nulls > 0 for f in preprocessing.numbers)]
    indicated = [i for i, feature in enumerate(preprocessing.numbers) if feature.nulls]
    assert nulls.any() and (ranks[:, indicated][nulls > 0] == 0).all()
    assert abs(np.median(ranks[:, 1:], axis=0)).max() < 0.3
