"""Replies of loaded versions to requests that ask for more than predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.errors import DataError
from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.conformal import Conformal
from pyworker.children.loaded_models import LoadedModel, Reply
from pyworker.wire import Decoder, Frame, FrameType, encode
from tests.unit.pyworker.children.test_predictor import Version
from tests.unit.rows import every_type


def request(version: Version, chosen: list[int], **wishes: Any) -> Frame:
    header, buffers = version.request(chosen)
    decoder = Decoder()
    for part in encode(FrameType.PREDICT, 1, 0, header | wishes, buffers):
        decoder.feed(memoryview(part).cast("B"))
    frame = decoder.next_frame()
    assert frame is not None
    return frame


def reply(version: Version, chosen: list[int], wishes: dict[str, Any] | None = None, **fitted: Any) -> Reply:
    model = LoadedModel(replace(version.preprocessing, **fitted), version.model, 1)
    with torch.inference_mode():
        return model.predict(request(version, chosen, **(wishes or {})))


@pytest.fixture(scope="module")
def regression() -> Version:
    columns = every_type(100).columns
    target = ("float8", np.random.default_rng(0).normal(size=100).tolist())
    return Version(replace(every_type(100), columns={**columns, "target": target}))


def test_bounds_come_with_predictions(regression: Version) -> None:
    scores = Conformal(9, tuple(np.arange(1.0, 10.0).tolist()))
    answers, (lower, upper) = reply(regression, [1, 2, 3], {"coverage": 0.5}, conformal=scores)[1:3]
    std = regression.preprocessing.target.std
    np.testing.assert_allclose(answers.prediction - lower, 5.0 * std)
    np.testing.assert_allclose(upper - answers.prediction, 5.0 * std)
    assert reply(regression, [1, 2, 3], conformal=scores).extras == ()
    with pytest.raises(DataError):
        reply(regression, [1, 2, 3], {"coverage": 0.95}, conformal=scores)
    for lacking in (scores, None):
        optional = reply(regression, [1, 2, 3], {"coverage": 0.95, "optional": True}, conformal=lacking)
        assert optional.extras == () and len(optional.answers.prediction) == 3


def test_probabilities_of_all_labels_come_with_predictions() -> None:
    version = Version(every_type(100))
    answers, (probabilities,) = reply(version, [1, 2, 3], {"probabilities": True})[1:3]
    assert probabilities.shape == (3, 2) and probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    assert (probabilities[:, 1] == answers.prediction).all()
    assert (probabilities[np.arange(3), answers.label] == answers.probability).all()


def test_requests_that_are_answered_together_get_what_each_wishes_for(regression: Version) -> None:
    scores = Conformal(9, tuple(np.arange(1.0, 10.0).tolist()))
    wishes: dict[str, Any]
    for version, wishes in ((Version(every_type(100)), {"probabilities": True}), (regression, {"coverage": 0.5})):
        model = LoadedModel(replace(version.preprocessing, conformal=scores), version.model, 1)
        with torch.inference_mode():
            replies = model.replies([request(version, [row], **(wishes if row % 2 else {})) for row in range(1, 7)])
        for row, found in enumerate(replies, 1):
            alone = reply(version, [row], conformal=scores).answers
            assert isinstance(found, Reply) and (found.answers.prediction == alone.prediction).all()
            assert bool(found.extras) == bool(row % 2)


def test_probabilities_are_calibrated() -> None:
    version = Version(every_type(100))
    raw, calibrated = (reply(version, [1, 2, 3], calibration=c).answers for c in (None, Calibration(0.5, 1.0)))
    logit = np.log(raw.prediction / (1.0 - raw.prediction))
    np.testing.assert_allclose(calibrated.prediction, 1.0 / (1.0 + np.exp(-0.5 * logit - 1.0)), rtol=1e-5)
    assert (calibrated.label == (calibrated.prediction > 0.5)).all()
