"""The training of the final model on all rows: what it learns from, and that it goes on from any checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pg_tensile.execution.data.batches import Batches
from pg_tensile.execution.data.dataset import together
from pg_tensile.execution.training import checkpoint
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.execution.training.recipe import MOST_REFITTED, Explicit, Subject, recipe
from pg_tensile.execution.training.refit import WORSE
from pg_tensile.execution.training.run_steps import StepResult
from pg_tensile.execution.training.schedule import cosine
from pg_tensile.execution.training.settings import EarlyStopping
from tests.examples import examples
from tests.unit.execution.training.test_training import CPU, Recorder, trainer, weights
from tests.unit.rows import Prepared, Rows, every_type

PLAIN = {"type": "mlp", "hidden": [16]}
TABULAR = {"type": "tabular", "hidden": 16, "projection": 16, "members": 2}
SETTINGS: dict[str, Any] = {"epochs": 4, "refit": True, "early_stopping": EarlyStopping(2)}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return every_type(400).prepare()


def run(prepared: Prepared, recorder: Recorder, **settings: Any) -> tuple[Any, nn.Module]:
    made, model = trainer(prepared, recorder, PLAIN, **(SETTINGS | settings))
    return made.run(), model


def test_the_model_is_trained_again_from_its_first_weights_on_all_rows(prepared: Prepared) -> None:
    """The same as a run without validation rows, of as many epochs as the first one kept, and with full batches only.

    Metrics and the validation's outputs stay those of the first model."""
    plain_recorder, recorder = Recorder(), Recorder()
    plain, first = run(prepared, plain_recorder, refit=False)
    outcome, model = run(prepared, recorder)
    table = together(prepared.dataset.training, prepared.dataset.validation)
    assert outcome.refitted_rows == table.rows == 400 and plain.refitted_rows is None
    assert outcome.metrics == plain.metrics and recorder.without_seconds() == plain_recorder.without_seconds()
    assert all(torch.equal(outcome.validation[name], tensor) for name, tensor in plain.validation.items())
    expected, _ = trainer(prepared, Recorder(), PLAIN, epochs=outcome.metrics["epoch"])
    batches = Batches(table, 32, 5, CPU, False, full_only=True)
    for epoch in range(outcome.metrics["epoch"]):
        taken = [expected._steps.train(batch) for batch in batches.epoch(epoch)]
        assert len(taken) == batches.steps(epoch) == 400 // 32
    assert weights(model) == weights(expected._steps.model) != weights(first)


def test_averages_begin_anew(prepared: Prepared) -> None:
    """After a few steps, the first step's weight in the average shows whether it does."""
    few: dict[str, Any] = {"epochs": 1, "refit": True, "average_weights": True, "batch_size": 128}
    outcome, model = run(prepared, Recorder(), **few)
    assert outcome.refitted_rows == 400 and not outcome.warnings
    expected, _ = trainer(prepared, Recorder(), PLAIN, **(few | {"refit": False}))
    table = together(prepared.dataset.training, prepared.dataset.validation)
    for batch in Batches(table, 128, 5, CPU, False, full_only=True).epoch(0):
        expected._steps.train(batch)
    expected._averages.exchange()
    assert weights(model) == weights(expected._steps.model)


def numbers(rows: int, classes: int, seed: int) -> Prepared:
    """A target with noise, of a class if there are any."""
    rng = np.random.default_rng(seed)
    x, z, noise = rng.normal(size=(3, rows))
    y = np.sin(x) + z * x + noise / 2
    columns: dict[str, tuple[str, Sequence[Any]]] = {"x": ("float8", x.tolist()), "z": ("float8", z.tolist())}
    if not classes:
        return Rows(columns | {"y": ("float8", (1000 + 50 * y).tolist())}).prepare()
    labels = np.searchsorted(np.quantile(y, np.arange(1, classes) / classes), y)
    return Rows(columns | {"y": ("text", [f"class {label}" for label in labels])}).prepare()


@given(
    rows=st.one_of(st.integers(5, 150), st.sampled_from([1000, 5000])),
    classes=st.sampled_from([0, 2, 3]),
    epochs=st.integers(1, 9),
    batch_size=st.sampled_from([2, 32, 64]),
    architecture=st.sampled_from([PLAIN, TABULAR]),
    seed=st.integers(0, 100),
)
@examples(8, long=200)
def test_on_all_rows_the_final_model_is_as_good_as_the_validated_one(
    rows: int, classes: int, epochs: int, batch_size: int, architecture: dict[str, Any], seed: int
) -> None:
    made = numbers(rows, classes, seed)
    table = together(made.dataset.training, made.dataset.validation)
    batch_size = max(batch_size, rows // 20)
    losses = []
    for refit in (False, True):
        average = architecture is TABULAR
        options = {"epochs": epochs, "batch_size": batch_size, "average_weights": average}
        run_, _ = trainer(made, Recorder(), architecture, refit=refit, **options)
        outcome = run_.run()
        batch = next(Batches(table, rows, 0, CPU, False).in_order(rows))
        losses.append(run_._steps.evaluate(batch).loss)
    assert losses[1] <= WORSE * losses[0] * (1 + 1e-5)
    if made.dataset.validation.rows:
        assert (outcome.refitted_rows is None) == bool(outcome.warnings)


@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_each_epoch_has_the_learning_rate_that_it_had(
    schedule: str, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pg_tensile.execution.training import course

    monkeypatch.setattr(course, "PLATEAU_EPOCHS", 0)  # it falls after each epoch
    made, _ = trainer(prepared, Recorder(), PLAIN, **SETTINGS, learning_rate_schedule=schedule)
    rates: list[float | None] = []
    train = made._steps.train

    def recorded(batch: Any, learning_rate: float | None = None) -> StepResult:
        rates.append(learning_rate)
        return train(batch, learning_rate)

    monkeypatch.setattr(made._steps, "train", recorded)
    kept = made.run().metrics["epoch"]
    steps = 400 // 32
    again = rates[-kept * steps :]
    assert kept > 1
    if schedule == "plateau":
        assert list(dict.fromkeys(again)) == list(dict.fromkeys(rates))[:kept]
    else:  # after the same part of the epochs, which have more steps now
        parts = (np.arange(kept * steps) + 0.5) / steps / SETTINGS["epochs"]
        assert again == pytest.approx([1e-3 * cosine(part) for part in parts.tolist()])


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("stop_after", [5, 25, 45, 52, 60, 75])
def test_it_goes_on_from_a_checkpoint_at_any_step(prepared: Prepared, stop_after: int, averages: bool) -> None:
    options = SETTINGS | {"average_weights": averages}
    expected, model = run(prepared, Recorder(), **options)
    stopped = Recorder(stop_after)
    assert run(prepared, stopped, **options)[0].stopped
    resumed, again = trainer(prepared, Recorder(), PLAIN, **options)
    assert resumed.resume(Checkpoint.from_bytes(*stopped.checkpoints[-1])) is None
    outcome = resumed.run()
    assert weights(again) == weights(model) and outcome.metrics == expected.metrics


def test_some_of_these_stops_are_in_the_second_training(prepared: Prepared) -> None:
    recorder = Recorder(75)
    run(prepared, recorder)
    assert recorder.checkpoints[-1][1]["refit"]["epoch"] is not None
    assert {progress.phase for progress in recorder.progresses} == {"training", "validating", "refitting"}


def test_the_first_model_stays_if_the_second_training_fails_or_has_no_time(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = run(prepared, Recorder(), refit=False)
    made, model = trainer(prepared, Recorder(), PLAIN, **SETTINGS)
    train = made._steps.train

    def broken(batch: Any, learning_rate: float | None = None) -> StepResult:
        result = train(batch, learning_rate)
        assert made._refit is not None
        return result if made._refit.epoch is None else result._replace(loss=math.nan)

    monkeypatch.setattr(made._steps, "train", broken)
    assert made.run().refitted_rows is None and weights(model) == weights(first)

    made, model = trainer(prepared, Recorder(), PLAIN, **SETTINGS)
    spoilt = made._steps.train

    def spoiling(batch: Any, learning_rate: float | None = None) -> StepResult:
        result = spoilt(batch, learning_rate)
        if made._refit is not None and made._refit.epoch is not None:
            next(made._steps.model.parameters()).data.fill_(math.inf)
            return result._replace(loss=1.0)
        return result

    monkeypatch.setattr(made._steps, "train", spoiling)
    assert made.run().refitted_rows is None and weights(model) == weights(first)

    made, model = trainer(prepared, Recorder(), PLAIN, **SETTINGS, max_time_s=1e9)
    refit = made._refit
    assert refit is not None
    monkeypatch.setattr(type(made._course), "time_is_up", property(lambda _: refit.epoch is not None))
    assert made.run().refitted_rows is None and weights(model) == weights(first)


def test_a_checkpoint_without_it_goes_on_without_it(prepared: Prepared) -> None:
    """As one of a version that did not train again."""
    stopped = Recorder(25)
    run(prepared, stopped, refit=False)
    expected, model = run(prepared, Recorder(), refit=False)
    resumed, again = trainer(prepared, Recorder(), PLAIN, **SETTINGS)
    assert resumed.resume(Checkpoint.from_bytes(*stopped.checkpoints[-1])) is None
    outcome = resumed.run()
    assert outcome.refitted_rows is None and outcome.metrics == expected.metrics
    assert weights(again) == weights(model)


@pytest.mark.parametrize("settings", [{"keep": "last"}, {"refit": False}])
def test_without_it_checkpoints_have_nothing_of_it(prepared: Prepared, settings: dict[str, Any]) -> None:
    made, _ = trainer(prepared, Recorder(), PLAIN, **(SETTINGS | settings))
    state = made.state()
    assert "refit" not in state.meta and not state.get("first")
    assert made.run().refitted_rows is None


def test_it_is_the_default_of_small_tables_only() -> None:
    assert recipe(Subject("tabular", MOST_REFITTED)).refit
    assert not recipe(Subject("tabular", MOST_REFITTED + 1)).refit
    assert not recipe(Subject("mlp", 100)).refit
    assert recipe(Subject("mlp", 10**6), Explicit(refit=True)).refit
    assert not recipe(Subject("tabular", 100), Explicit(refit=False)).refit
    assert checkpoint.Checkpoint({}).get("first") == {}
