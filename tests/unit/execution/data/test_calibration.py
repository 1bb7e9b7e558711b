"""Calibration: parameters of a known distortion, never a larger loss, and no fit where there is nothing to fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.data import calibration
from pg_tensile.execution.data.calibration import LEAST_ROWS, MANY_ROWS, Calibration, fit, least_log_loss, log_losses
from tests.examples import examples


def sample(rows: int, labels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return well-calibrated logits [rows, outputs] and labels drawn from their probabilities [rows]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, 1 if labels == 2 else labels)) * 2.0
    every = np.hstack((np.zeros((rows, 1)), logits)) if labels == 2 else logits
    return logits, (every + rng.gumbel(size=every.shape)).argmax(axis=1)


@pytest.mark.parametrize(("scale", "shift", "labels"), [(2.5, 0.0, 2), (0.4, 1.0, 2), (3.0, 0.0, 4)])
def test_a_distortion_is_undone(scale: float, shift: float, labels: int) -> None:
    logits, target = sample(20_000, labels, 1)
    result = fit(logits * scale + shift, target)
    assert result is not None and result.kept
    assert result.calibration.scale == pytest.approx(1.0 / scale, rel=0.05)
    assert result.calibration.shift == pytest.approx(-shift / scale, abs=0.1)
    assert result.calibrated_log_loss == pytest.approx(log_losses(logits, target).mean(), abs=1e-3)


@given(st.integers(0, 1000), st.sampled_from([2, 3]), st.floats(0.1, 10.0), st.floats(-3.0, 3.0))
def test_a_kept_calibration_never_raises_the_loss_on_its_rows(
    seed: int, labels: int, scale: float, shift: float
) -> None:
    logits, target = sample(400, labels, seed)
    distorted = logits * scale + shift
    result = fit(distorted, target)
    assert result is not None
    if result.kept:
        losses = log_losses(result.calibration.apply(distorted), target)
        assert losses.mean() <= log_losses(distorted, target).mean()


@pytest.mark.parametrize("labels", [2, 3])
def test_the_least_log_loss_does_not_depend_on_how_sure_a_model_is(labels: int) -> None:
    logits, target = sample(4_000, labels, 2)
    honest, sure = least_log_loss(logits, target), least_log_loss(logits * 20.0, target)
    assert honest == pytest.approx(sure, abs=1e-6)
    assert honest is not None and honest <= log_losses(logits, target).mean()
    rng = np.random.default_rng(0)
    worse = least_log_loss(logits + rng.normal(size=logits.shape), target)
    assert worse is not None and worse > honest + 0.01
    assert least_log_loss(logits[: LEAST_ROWS - 1], target[: LEAST_ROWS - 1]) is None


def test_probabilities_that_are_right_stay_nearly_as_they_are() -> None:
    logits, target = sample(5_000, 2, 3)
    result = fit(logits, target)
    assert result is not None
    assert result.calibration.scale == pytest.approx(1.0, abs=0.1) and abs(result.calibration.shift) < 0.1


def test_folds_are_fitted_as_all_rows_are() -> None:
    logits, target = sample(MANY_ROWS, 2, 5)
    result = fit(logits * 0.3 + 2.0, target)
    assert result is not None and result.kept
    assert result.calibration.scale > 1.0 and result.calibration.shift < -1.0
    assert result.calibrated_log_loss == pytest.approx(log_losses(logits, target).mean(), abs=0.05)


def test_rows_without_an_error_have_a_finite_scale() -> None:
    target = np.arange(1000) % 2
    result = fit(np.where(target, 3.0, -3.0)[:, None], target)
    assert result is not None
    assert 1.0 < result.calibration.scale < 100.0 and result.kept


def test_few_rows_and_infinite_logits_are_not_fitted() -> None:
    logits, target = sample(LEAST_ROWS, 2, 0)
    assert fit(logits, target) is not None
    assert fit(logits[1:], target[1:]) is None
    logits[1] = np.inf
    assert fit(logits, target) is None


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("rows", [LEAST_ROWS, 24, MANY_ROWS - 1])
def test_few_rows_without_an_error_do_not_make_a_model_sure(rows: int, labels: int) -> None:
    target = np.arange(rows) % labels
    logits = 20.0 * (np.where(target, 1.0, -1.0)[:, None] if labels == 2 else np.eye(labels)[target])
    result = fit(logits, target)
    assert result is not None and result.kept
    assert result.calibrated_log_loss > result.log_loss
    losses = log_losses(result.calibration.apply(logits), target)
    assert np.exp(-losses) == pytest.approx(1.0 - 0.5 / (rows + 1), rel=1e-3)
    assert least_log_loss(logits, target) == pytest.approx(losses.mean())


@examples(25, long=200)
@given(st.integers(0, 1000), st.sampled_from([2, 3]), st.integers(LEAST_ROWS, MANY_ROWS - 1), st.floats(0.1, 10.0))
def test_few_rows_lower_the_confidence_only(seed: int, labels: int, rows: int, scale: float) -> None:
    logits, target = sample(rows, labels, seed)
    result = fit(logits * scale, target)
    assert result is not None and result.kept
    assert 0.0 < result.calibration.scale <= 1.0 and result.calibration.shift == 0.0


def test_a_calibration_that_does_not_help_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_minimum", lambda *arguments: Calibration(-1.0))
    result = fit(*sample(400, 2, 0))
    assert result is not None and not result.kept and result.to_json()["kept"] is False


def test_rows_count_by_their_weights() -> None:
    logits, target = sample(3_000, 2, 4)
    plain = fit(logits * 2.0, target)
    weight = np.arange(3_000) % 3
    repeated = fit(np.repeat(logits * 2.0, weight, axis=0), np.repeat(target, weight))
    weighted = fit(logits * 2.0, target, weight)
    assert plain is not None and repeated is not None and weighted is not None
    assert weighted.calibration.scale == pytest.approx(repeated.calibration.scale, rel=1e-2)
    assert weighted.log_loss == pytest.approx(repeated.log_loss)
    assert (weighted.rows, repeated.rows) == (2_000, 3_000)
    balanced = fit(logits, target, np.where(target == 1, 4.0, 1.0))
    assert balanced is not None and balanced.calibration.shift == pytest.approx(np.log(4.0), abs=0.2)
