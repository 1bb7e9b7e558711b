"""A session's evaluator and the predictor agree."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from pg_tensile.errors import DataError
from pg_tensile.execution.data.answers import answers, interval, probabilities
from pg_tensile.execution.data.drift import Counter, sample
from pg_tensile.execution.data.preprocessing import Kind, Task
from tests.evaluator.library import READY, VECTORS, Evaluator, Stored, compiled
from tests.evaluator.versions import (
    Version,
    as_jsonb,
    inputs_of,
    random_preprocessing,
    random_rows,
    random_version,
    whole_outputs,
)
from tests.examples import examples

TOLERANCE = 1e-5
randoms = st.randoms(use_true_random=False)
vectors = pytest.mark.parametrize("vectors", range(len(VECTORS)), ids=VECTORS)


def opened(version: Version, number: int) -> Evaluator:
    status, image, problem = compiled(version.stored)
    assert (status, problem) == (READY, None)
    return Evaluator(image, number)


@vectors
@given(randoms, st.integers(0, 40))
@examples(60, long=2000)
def test_outputs_and_answers_are_those_of_the_predictor(vectors: int, rnd: Random, count: int) -> None:
    version = random_version(rnd)
    preprocessing = version.preprocessing
    rows = random_rows(rnd, preprocessing, count)
    evaluator = opened(version, vectors)
    kinds = (preprocessing.numbers, preprocessing.categories, preprocessing.arrays)
    assert evaluator.features == tuple(map(len, kinds))
    inputs = inputs_of(preprocessing, rows)
    expected = whole_outputs(version, inputs)
    outputs = evaluator.raw_outputs(rows)
    # float32 rounds inputs of up to 1e6 as well as outputs
    features = preprocessing.apply(inputs)
    largest = [np.abs(array).max(axis=1, initial=1.0) for array in (features.numeric, *features.arrays)]
    size = np.max(largest, axis=0)[:, None]
    assert (np.abs(outputs - expected) <= TOLERANCE * np.maximum(np.abs(expected), size)).all()

    given = answers(expected, preprocessing)
    found = evaluator.answers(expected)
    np.testing.assert_array_equal(found.label, given.label)
    np.testing.assert_allclose(found.prediction, given.prediction, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.probability, given.probability, rtol=1e-9)
    assert evaluator.labels == len(preprocessing.labels or ())
    if preprocessing.task != Task.REGRESSION:
        found_probabilities = evaluator.probabilities(expected)
        np.testing.assert_allclose(found_probabilities, probabilities(expected, preprocessing), rtol=1e-9)
    if version.reference is not None:
        assert evaluator.bins == version.reference.starts[-1]
        counter = Counter(version.reference)
        counter.add(sample(preprocessing, inputs, slice(None), given))
        bins = evaluator.row_bins(rows, given)
        np.testing.assert_array_equal(np.bincount(bins.ravel(), minlength=evaluator.bins), counter.counts)
    evaluator.close()


@vectors
@given(randoms)
@examples(40, long=1000)
def test_numbers_have_the_bits_of_the_predictor(vectors: int, rnd: Random) -> None:
    """Trees compare them. A linear model with weights of 1 shows them."""
    preprocessing = random_preprocessing(rnd, np.random.default_rng(rnd.getrandbits(32)), rnd.random() < 0.5)
    inputs = preprocessing.model_inputs
    width = inputs.numeric + sum(array.length for array in inputs.arrays)
    labels = tuple(map(str, range(max(width, 1))))
    preprocessing = replace(preprocessing, task=Task.MULTICLASS, labels=labels, label_values=None)
    tensors = {"numbers.weight": np.eye(len(labels), width), "numbers.bias": np.zeros(len(labels))}
    if inputs.cardinalities:
        tensors["categories.weight"] = np.zeros((sum(inputs.cardinalities), len(labels)))
    weights = save({name: array.astype(np.float32) for name, array in tensors.items()})
    status, image, _ = compiled(Stored('{"type": "linear"}', as_jsonb(preprocessing.to_json()), None, weights))
    assert status == READY
    evaluator = Evaluator(image, vectors)
    rows = random_rows(rnd, preprocessing, rnd.randint(1, 40))
    features = preprocessing.apply(inputs_of(preprocessing, rows))
    expected = np.concatenate([features.numeric, *features.arrays], axis=1, dtype=np.float32)
    outputs = evaluator.raw_outputs(rows)[:, :width]
    # other libraries' sines may differ in the last bit
    cycles = [feature for feature in preprocessing.numbers if feature.kind == Kind.TIMESTAMP]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-7 if cycles else 0)
    evaluator.close()


@given(randoms, st.floats(0.001, 0.999))
@examples(40, long=500)
def test_intervals_are_those_of_the_predictor(rnd: Random, coverage: float) -> None:
    version = random_version(rnd, {"type": "linear"})
    preprocessing = version.preprocessing
    evaluator = opened(version, 2)
    outputs = np.random.default_rng(rnd.getrandbits(32)).normal(size=(9, evaluator.outputs_per_row)) * 3
    status, lower, upper = evaluator.interval(outputs, coverage)
    conformal = preprocessing.conformal
    assert evaluator.interval_rows == (0 if conformal is None else conformal.rows)
    assert (status == 1) == (conformal is None)
    try:
        expected = interval(outputs, preprocessing, coverage)
    except DataError:
        assert status != 0
    else:
        assert status == 0
        np.testing.assert_allclose((lower, upper), expected, rtol=1e-9, atol=1e-9)
    evaluator.close()


@vectors
@given(randoms)
@examples(30, long=1000)
def test_a_row_has_the_same_bits_among_any_others(vectors: int, rnd: Random) -> None:
    version = random_version(rnd)
    count = rnd.choice((1, 7, 30, 300))
    rows = random_rows(rnd, version.preprocessing, count)
    evaluator = opened(version, vectors)
    whole = evaluator.raw_outputs(rows)
    for size in (1, rnd.randint(1, count)):
        chosen = [rnd.randrange(count) for _ in range(size)]
        assert evaluator.raw_outputs(rows.chosen(chosen)).tobytes() == whole[chosen].tobytes()
    evaluator.close()
