"""Answers from outputs: probabilities that belong to the labels, and targets in their own unit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pg_tensile.execution.data.answers import answers, predictions, probabilities, target_values
from pg_tensile.execution.data.preprocessing import Preprocessing, Target, Task

LOGITS = st.floats(-1e6, 1e6)


def preprocessing(task: Task, labels: int = 0, **fields: Any) -> Preprocessing:
    names = tuple(str(label) for label in range(labels)) or None
    numbers = tuple(10.0 * label for label in range(labels)) or None
    return Preprocessing(task, Target("y", "float8", **fields), names, numbers, ())


@given(arrays(np.float64, (5, 1), elements=LOGITS))
def test_the_two_probabilities_are_those_of_the_answers(outputs: np.ndarray) -> None:
    binary = preprocessing(Task.BINARY, 2)
    both, answer = probabilities(outputs, binary), answers(outputs, binary)
    assert (both[:, 1] == answer.prediction).all()
    assert (both[np.arange(5), answer.label] == answer.probability).all()
    assert (answer.probability >= 0.5).all() and (both.sum(axis=1) == 1.0).all()


@given(arrays(np.float64, (5, 3), elements=LOGITS))
def test_of_several_labels_the_most_probable_is_the_answer(outputs: np.ndarray) -> None:
    multiclass = preprocessing(Task.MULTICLASS, 3)
    every, answer = probabilities(outputs, multiclass), answers(outputs, multiclass)
    np.testing.assert_allclose(every.sum(axis=1), 1.0, rtol=1e-12)
    assert (every[np.arange(5), answer.label] == every.max(axis=1)).all()
    np.testing.assert_allclose(answer.probability, every.max(axis=1), rtol=1e-12)
    assert (answer.prediction == 10.0 * answer.label).all()


@given(arrays(np.float64, 7, elements=st.floats(-1e9, 1e9)), st.floats(1e-3, 1e6), st.floats(-1e6, 1e6))
def test_encoded_targets_return_to_their_unit(target: np.ndarray, std: float, mean: float) -> None:
    regression = preprocessing(Task.REGRESSION, std=std, mean=mean)
    encoded = (target - mean) / std
    np.testing.assert_allclose(target_values(encoded, regression), target, rtol=1e-9, atol=1e-6)
    answer = answers(encoded[:, None], regression)
    assert (answer.prediction == predictions(encoded[:, None], regression)).all()
    assert np.isnan(answer.probability).all() and (answer.label == -1).all()
