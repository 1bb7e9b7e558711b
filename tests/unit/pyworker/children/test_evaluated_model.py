"""Versions that a trainer evaluates without PyTorch: the outputs of a session, and what is left to PyTorch."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from pg_tensile.errors import CheckpointError, DataError
from pyworker.children import evaluated_model as module
from pyworker.children.evaluated_model import EvaluatedModel, evaluated_model
from tests.evaluator import build
from tests.evaluator.library import Evaluator, Stored, compiled
from tests.evaluator.versions import inputs_of, random_rows, random_version


def loaded(stored: Stored, threads: int = 1, library: str | None = None) -> EvaluatedModel | None:
    """Return the version as a trainer loads it."""
    spec: dict[str, Any] = {key: json.loads(getattr(stored, key)) for key in ("architecture", "preprocessing")}
    spec["evaluator"] = library or str(build.library())
    return evaluated_model(spec, stored.weights, threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_outputs_are_those_of_a_session_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(module, "LEAST_ROWS", 2)
    for seed in range(30):
        rnd = Random(seed)
        version = random_version(rnd)
        rows = random_rows(rnd, version.preprocessing, rnd.randint(0, 20))
        session = Evaluator(compiled(version.stored)[1])
        model = loaded(version.stored, threads)
        assert model is not None
        found = model.outputs(inputs_of(version.preprocessing, rows))
        np.testing.assert_array_equal(found, session.raw_outputs(rows))
        model.close()
        session.close()


def test_an_array_of_a_wrong_length_is_the_predictors_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_ROWS", 2)
    versions = (random_version(Random(seed), {"type": "linear"}) for seed in range(100))
    version = next(version for version in versions if len(version.preprocessing.arrays) > 1)
    rows = random_rows(Random(1), version.preprocessing, 6)
    expected = version.preprocessing.arrays[1].length
    assert expected is not None
    rows.arrays[1][4] = np.zeros(expected + 1)
    inputs = inputs_of(version.preprocessing, rows)
    model = loaded(version.stored, 3)
    assert model is not None
    with pytest.raises(DataError) as own:
        model.outputs(inputs)
    with pytest.raises(DataError) as predictors:
        version.preprocessing.apply(inputs)
    assert str(own.value) == str(predictors.value) and "in row 5" in str(own.value)
    model.close()


def test_what_the_evaluator_lacks_is_left_to_pytorch_and_what_is_damaged_is_an_error() -> None:
    stored = random_version(Random(1), {"type": "mlp", "hidden": [9]}).stored
    assert loaded(stored._replace(architecture='{"type": "cnn"}')) is None
    for path in ("/nonexistent", "libc.so.6"):
        assert loaded(stored, library=path) is None
    assert evaluated_model({"evaluator": None}, stored.weights, 1) is None
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        loaded(stored._replace(weights=stored.weights[:5]))
    assert caught.value.detail == "its weights are cut off" and "Deploy another" in (caught.value.hint or "")
