"""Runs: order of batches, metrics, early stopping, resuming to the bit, and what stops them."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from pg_tensile.errors import ArchitectureError, DataError, NotFiniteError, TrainingError
from pg_tensile.execution import models
from pg_tensile.execution.data import batches
from pg_tensile.execution.data.batches import Batch, Batches
from pg_tensile.execution.data.dataset import Table
from pg_tensile.execution.data.preprocessing import Features
from pg_tensile.execution.training import checkpoint, course
from pg_tensile.execution.training import trainer as training
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.execution.training.observer import EpochMetrics, Progress, StopTraining
from pg_tensile.execution.training.recipe import PLATEAU_FACTOR
from pg_tensile.execution.training.run_steps import StepResult
from pg_tensile.execution.training.schedule import cosine
from pg_tensile.execution.training.settings import EarlyStopping, Settings, check_batch_size, check_model
from pg_tensile.execution.training.steps import EagerSteps
from pg_tensile.execution.training.trainer import Trainer
from tests.unit.rows import Prepared, Rows, every_type

CPU = torch.device("cpu")
MLP = {"type": "mlp", "hidden": [16], "dropout": 0.2, "norm": "batch", "embedding": 4}


class Recorder:
    """An observer that keeps everything, and stops the run before a step if told to. `free`: checkpoints cost nothing,
    so that only the interval is between them."""

    def __init__(self, stop_after: int | None = None, save: bool = True, free: bool = False) -> None:
        self.free = free
        self.progresses: list[Progress] = []
        self.epochs: list[EpochMetrics] = []
        self.checkpoints: list[tuple[bytes, dict[str, Any]]] = []
        self._polls = itertools.count(1)
        self._stop_after = stop_after
        self._save = save

    def progress(self, progress: Progress) -> None:
        self.progresses.append(progress)

    def metrics(self, metrics: EpochMetrics) -> None:
        self.epochs.append(metrics)

    def checkpoint(self, state: Checkpoint, written: Callable[[float], None]) -> None:
        self.checkpoints.append((state.to_bytes(), state.meta))
        written(0.0 if self.free else time.monotonic())

    def poll(self) -> None:
        if next(self._polls) == self._stop_after:
            raise StopTraining(self._save)

    def without_seconds(self) -> list[EpochMetrics]:
        return [epoch._replace(seconds=0.0) for epoch in self.epochs]


def trainer(
    prepared: Prepared, observer: Recorder, architecture: dict[str, Any] = MLP, **settings: Any
) -> tuple[Trainer, nn.Module]:
    chosen = Settings(**{"epochs": 3, "batch_size": 32, "seed": 5, **settings})
    checkpoint.seed_generators(chosen.seed)
    preprocessing = prepared.fitted.preprocessing
    model = models.build(models.parse(architecture), preprocessing.model_inputs, preprocessing.outputs)
    identity = {"architecture": architecture}
    steps = eager_steps(model, chosen, prepared)
    return Trainer(chosen, steps, prepared.dataset, preprocessing, observer, identity), model


def eager_steps(model: nn.Module, settings: Settings, prepared: Prepared) -> EagerSteps:
    preprocessing = prepared.fitted.preprocessing
    check_model(model, min(settings.batch_size, prepared.dataset.training.rows))
    return EagerSteps(model, settings, preprocessing.task, CPU, 64)


def weights(model: nn.Module) -> bytes:
    return checkpoint.to_bytes(checkpoint.model_tensors(model))


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return every_type(400).prepare()


# ---- batches ----


def table(rows: int, width: int = 1) -> Table:
    numbers = np.arange(rows, dtype=np.float32)
    return Table(Features(np.repeat(numbers[:, None], width, 1), np.empty((rows, 0), np.int64), ()), numbers)


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (10, 3), (10, 10), (1000, 7), (1000, 64), (1001, 1000), (5000, 13)])
def test_an_epoch_has_every_row_once_and_starts_anywhere(
    rows: int, size: int, read_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "WINDOW_BYTES", 2000)  # many windows
    monkeypatch.setattr(batches, "BLOCK_BYTES", 300)
    made = Batches(table(rows, 3), size, 1, CPU, read_ahead)
    order = [batch.target.tolist() for batch in made.epoch(0)]
    assert sorted(itertools.chain(*order)) == list(range(rows))
    assert len(order) == made.steps(0)
    assert [len(batch) for batch in order[:-1]] == [size] * (len(order) - 1)
    assert rows == 1 or len(order[-1]) > 1 or size == 1  # a last row alone joins the batch before
    for first in {0, 1, len(order) // 2, len(order) - 1, len(order)}:
        assert [batch.target.tolist() for batch in made.epoch(0, first)] == order[first:]
    if rows > 10:
        assert [batch.target.tolist() for batch in made.epoch(1)] != order
        other = Batches(table(rows, 3), size, 2, CPU, read_ahead)
        assert [batch.target.tolist() for batch in other.epoch(0)] != order


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("lead", [(2, 4, 4), (300, 1), (999,), (1000,), (7,) * 20])
def test_a_lead_is_the_beginning_of_the_first_epoch(
    lead: tuple[int, ...], read_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows come in the order that they would have without it, whatever batches they are cut into."""
    monkeypatch.setattr(batches, "WINDOW_BYTES", 2000)
    monkeypatch.setattr(batches, "BLOCK_BYTES", 300)
    made = Batches(table(1000, 3), 64, 1, CPU, read_ahead, lead)
    plain = Batches(table(1000, 3), 64, 1, CPU, read_ahead)
    first = [batch.target.tolist() for batch in made.epoch(0)]
    assert [len(batch) for batch in first[: len(lead)]] == list(lead)
    assert {len(batch) for batch in first[len(lead) : -1]} <= {64} and len(first) == made.steps(0)
    in_order = [batch.target.tolist() for batch in plain.epoch(0)]
    assert list(itertools.chain(*first)) == list(itertools.chain(*in_order))
    for start in {0, 1, len(lead), len(first) - 1, len(first)}:
        assert [batch.target.tolist() for batch in made.epoch(0, start)] == first[start:]
    following = [batch.target.tolist() for batch in made.epoch(1)]
    assert following == [batch.target.tolist() for batch in plain.epoch(1)] and len(following) == made.steps(1)


def test_order_does_not_touch_the_global_generators() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    list(Batches(table(100), 10, 1, CPU, False).epoch(0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]


# ---- metrics ----


def test_validation_metrics_are_those_of_the_final_model(prepared: Prepared) -> None:
    recorder = Recorder()
    run, model = trainer(prepared, recorder)
    outcome = run.run()
    validation = prepared.dataset.validation
    model.eval()
    with torch.no_grad():
        logits = model(Features.from_flat([torch.from_numpy(array) for array in validation.features.flat()]))[:, 0]
    last = recorder.epochs[-1]
    assert (last.epoch, last.split, last.metrics.samples) == (3, "validation", validation.rows)
    assert last.metrics.accuracy == pytest.approx(((logits > 0).numpy() == validation.target).mean())
    target = torch.from_numpy(validation.target)
    assert last.metrics.loss == pytest.approx(
        nn.functional.binary_cross_entropy_with_logits(logits, target).item(), rel=1e-5
    )
    assert outcome.metrics["epoch"] == 3 and outcome.metrics["validation"]["loss"] == last.metrics.loss
    assert [(epoch.epoch, epoch.split) for epoch in recorder.epochs] == [
        (number, split) for number in (1, 2, 3) for split in ("training", "validation")
    ]


# ---- resuming ----


def uninterrupted(prepared: Prepared, **settings: Any) -> tuple[bytes, list[EpochMetrics]]:
    recorder = Recorder()
    run, model = trainer(prepared, recorder, **settings)
    assert not run.run().stopped
    return weights(model), recorder.without_seconds()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("stop_after", [1, 5, 10, 11, 12, 25, 33])
def test_a_run_resumed_anywhere_ends_with_the_same_bits(prepared: Prepared, optimizer: str, stop_after: int) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "clip": 1.0, "early_stopping": EarlyStopping(9)}
    options |= {"momentum": 0.9} if optimizer == "sgd" else {"weight_decay": 0.1}
    expected, expected_metrics = uninterrupted(prepared, **options)
    first = Recorder(stop_after)
    assert trainer(prepared, first, **options)[0].run().stopped
    second = Recorder()
    run, model = trainer(prepared, second, **options)
    np.random.seed(99)
    torch.manual_seed(99)
    assert run.resume(Checkpoint.from_bytes(*first.checkpoints[-1])) is None
    assert not run.run().stopped
    assert weights(model) == expected
    assert first.without_seconds() + second.without_seconds() == expected_metrics


def test_checkpoints_during_the_epochs_change_nothing(prepared: Prepared) -> None:
    recorder = Recorder(free=True)
    run, model = trainer(prepared, recorder, checkpoint_interval_s=1e-9)
    run.run()
    assert len(recorder.checkpoints) > 30
    assert 0 in {meta["step"] for _, meta in recorder.checkpoints}  # between epochs, too
    assert weights(model) == uninterrupted(prepared)[0]
    for data, meta in recorder.checkpoints[:: len(recorder.checkpoints) // 5]:
        again, other = trainer(prepared, Recorder())
        again.resume(Checkpoint.from_bytes(data, meta))
        again.run()
        assert weights(other) == weights(model)


@pytest.mark.parametrize("free", [True, False])
def test_interval_0_makes_checkpoints_between_epochs_only(prepared: Prepared, free: bool) -> None:
    """Those that their cost allows; none after the last epoch, whose weights are the result."""
    recorder = Recorder(free=free)
    run, _ = trainer(prepared, recorder, epochs=5, checkpoint_interval_s=0)
    run.run()
    made = [(meta["epoch"], meta["step"]) for _, meta in recorder.checkpoints]
    assert made[0] == (1, 0)
    if free:
        assert made == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_checkpoint_is_due_only_after_its_interval(prepared: Prepared) -> None:
    """However many epochs end before that."""
    recorder = Recorder(free=True)
    trainer(prepared, recorder, epochs=30, checkpoint_interval_s=3600)[0].run()
    assert recorder.checkpoints == []


def test_no_checkpoint_is_made_while_another_is_being_written(prepared: Prepared) -> None:
    class Slow(Recorder):
        def checkpoint(self, state: Checkpoint, written: Callable[[float], None]) -> None:
            super().checkpoint(state, lambda at: None)  # it is not told

    recorder = Slow()
    run, _ = trainer(prepared, recorder, checkpoint_interval_s=1e-9)
    run.run()
    assert len(recorder.checkpoints) == 1


def test_a_run_stopped_without_a_checkpoint_makes_none(prepared: Prepared) -> None:
    recorder = Recorder(stop_after=3, save=False)
    assert trainer(prepared, recorder)[0].run().stopped
    assert recorder.checkpoints == []


def test_other_data_or_another_model_start_over_and_say_so(prepared: Prepared) -> None:
    recorder = Recorder(stop_after=5)
    trainer(prepared, recorder)[0].run()
    data, meta = recorder.checkpoints[-1]
    for change, reason in (({"fingerprint": "17:ff"}, "the data changed"), ({"identity": {}}, "the architecture or")):
        run, model = trainer(prepared, Recorder())
        before = weights(model)
        assert str(run.resume(Checkpoint.from_bytes(data, meta | change))).startswith(reason)
        assert weights(model) == before
        run.run()
        assert weights(model) == uninterrupted(prepared)[0]


def test_spooled_data_trains_to_the_same_bits(tmp_path: Any) -> None:
    rows = every_type(400)
    in_memory = uninterrupted(rows.prepare())
    rows.cache_bytes, rows.spool_directory = 10_000, str(tmp_path)
    spooled = rows.prepare()
    assert spooled.dataset.spooled
    assert uninterrupted(spooled) == in_memory


# ---- how runs end ----


def noise(count: int) -> Prepared:
    rng = np.random.default_rng(0)
    columns = {name: ("float8", rng.normal(size=count).tolist()) for name in ("a", "b", "y")}
    return Rows(columns).prepare(validation=0.5)


def test_early_stopping_returns_the_best_model() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"epochs": 200, "learning_rate": 0.05, "early_stopping": EarlyStopping(3, 0.0)}
    run, model = trainer(noise(64), recorder, {"type": "mlp", "hidden": [64]}, **options)
    outcome = run.run()
    losses = [epoch.metrics.loss or math.nan for epoch in recorder.epochs if epoch.split == "validation"]
    best = int(np.argmin(losses))
    assert len(losses) == best + 1 + 3 < 200
    assert outcome.metrics["epoch"] == best + 1 and outcome.metrics["validation"]["loss"] == losses[best]
    short = Recorder()
    again, shorter = trainer(noise(64), short, {"type": "mlp", "hidden": [64]}, **(options | {"epochs": best + 1}))
    again.run()
    assert weights(shorter) == weights(model)


def test_min_delta_counts_only_real_improvements(prepared: Prepared) -> None:
    recorder = Recorder()
    run, _ = trainer(prepared, recorder, epochs=50, learning_rate=1e-6, early_stopping=EarlyStopping(2, 0.5))
    outcome = run.run()
    assert (outcome.epochs, outcome.reason) == (3, "early_stopping")
    losses = [epoch.metrics.loss or math.nan for epoch in recorder.epochs if epoch.split == "validation"]
    assert min(losses) > losses[0] - 0.5
    assert outcome.metrics["epoch"] == int(np.argmin(losses)) + 1  # of improvements that do not count, too


def labelled(count: int) -> Prepared:
    """Return rows with a label that follows from one of two numbers nine times out of ten."""
    rng = np.random.default_rng(0)
    a, b, chance = rng.normal(size=count), rng.normal(size=count), rng.random(count)
    labels = np.where((a > 0) ^ (chance < 0.1), "yes", "no")
    columns = {"a": ("float8", a.tolist()), "b": ("float8", b.tolist()), "y": ("text", labels.tolist())}
    return Rows(columns).prepare(validation=0.5)


@pytest.mark.parametrize("calibrate", [True, False])
def test_a_classifier_that_will_be_calibrated_is_judged_as_if_it_were(calibrate: bool) -> None:
    recorder, prepared = Recorder(), labelled(600)
    options: dict[str, Any] = {"epochs": 30, "learning_rate": 0.05, "calibrate": calibrate}
    outcome = trainer(prepared, recorder, {"type": "mlp", "hidden": [64]}, **options)[0].run()
    metrics = [epoch.metrics for epoch in recorder.epochs if epoch.split == "validation"]
    calibrated = [epoch.calibrated_log_loss for epoch in metrics]
    losses = [epoch.log_loss or math.nan for epoch in metrics]
    if not calibrate:
        assert calibrated == [None] * 30 and outcome.metrics["epoch"] == int(np.argmin(losses)) + 1
        return
    decisive = [loss for loss in calibrated if loss is not None]
    assert len(decisive) == 30 and all(map(operator.lt, decisive, losses))
    assert outcome.metrics["epoch"] == int(np.argmin(decisive)) + 1 != int(np.argmin(losses)) + 1


def test_averaged_weights_are_those_that_validation_has_seen(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights themselves go on: without validation in between, the averages are the same."""
    recorder, architecture = Recorder(), {"type": "mlp", "hidden": [16]}
    run, model = trainer(prepared, recorder, architecture, average_weights=True, keep="last")
    outcome = run.run()
    loss = outcome.metrics["validation"]["loss"]
    again, _ = trainer(prepared, Recorder(), architecture)
    checkpoint.load_model(again._steps.model, checkpoint.model_tensors(model))
    seen = again._evaluate()
    assert seen is not None and seen.metrics.loss == loss
    other, twin = trainer(prepared, Recorder(), architecture, average_weights=True, keep="last")
    monkeypatch.setattr(other, "_evaluate", lambda: None)
    monkeypatch.setattr(other._averages, "in_use", contextlib.nullcontext)
    other.run()
    assert weights(twin) == weights(model)


@pytest.mark.parametrize("stop_after", [7, 15, 31])
def test_averages_are_part_of_a_checkpoint(prepared: Prepared, stop_after: int) -> None:
    options: dict[str, Any] = {"average_weights": True, "early_stopping": EarlyStopping(9)}
    expected, _ = uninterrupted(prepared, **options)
    first = Recorder(stop_after)
    assert trainer(prepared, first, **options)[0].run().stopped
    resumed, model = trainer(prepared, Recorder(), **options)
    assert resumed.resume(Checkpoint.from_bytes(*first.checkpoints[-1])) is None
    resumed.run()
    assert weights(model) == expected


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_model_is_the_best_epochs_or_the_last_ones(keep: str) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"epochs": 12, "learning_rate": 0.05, "keep": keep}
    run, model = trainer(noise(64), recorder, {"type": "mlp", "hidden": [64]}, **options)
    outcome = run.run()
    losses = [epoch.metrics.loss or math.nan for epoch in recorder.epochs if epoch.split == "validation"]
    epoch = int(np.argmin(losses)) + 1 if keep == "best" else 12
    assert (outcome.reason, outcome.epochs, outcome.metrics["epoch"]) == ("epochs", 12, epoch)
    assert int(np.argmin(losses)) + 1 < 12
    again, other = trainer(
        noise(64), Recorder(), {"type": "mlp", "hidden": [64]}, **(options | {"epochs": epoch, "keep": "last"})
    )
    again.run()
    assert weights(other) == weights(model)


def limited(prepared: Prepared, recorder: Recorder, seconds: float, **settings: Any) -> tuple[Trainer, nn.Module]:
    """A run of at most `seconds`, by a clock that goes on by a second with each step."""
    run, model = trainer(prepared, recorder, epochs=50, max_time_s=seconds, **settings)
    train, steps = run._steps.train, itertools.count(1)
    now = 0.0

    def timed(*arguments: Any) -> StepResult:
        nonlocal now
        now = float(next(steps))
        return train(*arguments)

    run._steps.train = timed  # type: ignore[method-assign, assignment]
    run._course._clock = lambda: now
    return run, model


@pytest.mark.parametrize("keep", ["best", "last"])
def test_an_unfinished_epoch_does_not_count_at_the_end_of_the_time(prepared: Prepared, keep: str) -> None:
    recorder = Recorder()
    run, model = limited(prepared, recorder, 25, keep=keep)
    outcome = run.run()
    assert outcome.reason == "max_time" and outcome.epochs == 2
    assert recorder.progresses[-1].epoch == 3 and max(epoch.epoch for epoch in recorder.epochs) == 2
    shorter = uninterrupted(prepared, epochs=outcome.metrics["epoch"], keep="last")
    assert weights(model) == shorter[0]


def test_the_first_epoch_counts_even_if_it_is_unfinished(prepared: Prepared) -> None:
    recorder = Recorder()
    run, model = limited(prepared, recorder, 1)
    before = weights(model)
    outcome = run.run()
    assert outcome.reason == "max_time" and outcome.epochs == outcome.metrics["epoch"] == 1
    assert outcome.metrics["training"]["samples"] == 32 and outcome.metrics["validation"]["samples"] > 32
    assert weights(model) != before


@pytest.mark.parametrize("stop_after", [2, 11, 13, 17])
def test_the_time_goes_on_after_a_resume(prepared: Prepared, stop_after: int) -> None:
    whole = limited(prepared, Recorder(), 25)
    expected = whole[0].run()
    first = Recorder(stop_after)
    assert limited(prepared, first, 25)[0].run().stopped
    run, model = limited(prepared, Recorder(), 25)
    assert run.resume(Checkpoint.from_bytes(*first.checkpoints[-1])) is None
    outcome = run.run()
    assert outcome.reason == "max_time" and 1 <= outcome.epochs <= expected.epochs
    assert weights(model) == uninterrupted(prepared, epochs=outcome.metrics["epoch"], keep="last")[0]
    spent = Recorder()
    over, _ = limited(prepared, spent, first.checkpoints[-1][1]["trained_s"])  # nothing is left
    over.resume(Checkpoint.from_bytes(*first.checkpoints[-1]))
    assert over.run().epochs == max(1, first.checkpoints[-1][1]["epoch"])


def test_a_lead_is_taken_as_a_whole(prepared: Prepared) -> None:
    """The graphs that follow it do not fit its batches."""
    run, _ = limited(prepared, Recorder(), 1, lead=(8, 8, 16, 16))
    assert run.run_lead() and run.state().meta["step"] == 4


def test_a_checkpoint_of_an_earlier_version_is_resumed(prepared: Prepared) -> None:
    """It knows the best epoch only, and only with early stopping."""
    expected, _ = uninterrupted(prepared, early_stopping=EarlyStopping(9))
    first = Recorder(stop_after=12)
    trainer(prepared, first, early_stopping=EarlyStopping(9))[0].run()
    data, meta = first.checkpoints[-1]
    earlier = {key: value for key, value in meta.items() if key not in ("improved", "reductions", "trained_s")}
    run, model = trainer(prepared, Recorder(), early_stopping=EarlyStopping(9))
    assert run.resume(Checkpoint.from_bytes(data, earlier)) is None
    run.run()
    assert weights(model) == expected


@pytest.mark.parametrize("stop_after", [3, 15, 40])
@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_a_schedule_lowers_the_learning_rate_and_a_resumed_run_goes_on_with_it(
    schedule: str, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "PLATEAU_EPOCHS", 2)
    options: dict[str, Any] = {"epochs": 20, "learning_rate": 0.05, "learning_rate_schedule": schedule}
    architecture = {"type": "mlp", "hidden": [64]}
    rates: list[float | None] = []

    def run_of(recorder: Recorder) -> tuple[Trainer, nn.Module]:
        run, model = trainer(noise(64), recorder, architecture, **options)
        train = run._steps.train

        def recorded(batch: Batch, rate: float | None) -> StepResult:
            rates.append(rate)
            return train(batch, rate)

        monkeypatch.setattr(run._steps, "train", recorded)
        return run, model

    run, model = run_of(Recorder())
    run.run()
    expected = list(rates)
    if schedule == "plateau":
        assert expected[0] is None and expected == sorted(expected, key=lambda rate: -(rate or 1.0))
        assert {rate for rate in expected if rate} >= {0.05 * PLATEAU_FACTOR, 0.05 * PLATEAU_FACTOR**2}
    else:
        middles = (np.arange(len(expected)) + 0.5) / len(expected)
        assert expected == pytest.approx([0.05 * cosine(part) for part in middles.tolist()])
    rates.clear()
    first = Recorder(stop_after)
    assert run_of(first)[0].run().stopped
    resumed, other = run_of(Recorder())
    resumed.resume(Checkpoint.from_bytes(*first.checkpoints[-1]))
    resumed.run()
    assert rates == expected and weights(other) == weights(model)


def test_unknown_words_in_settings_are_refused() -> None:
    for name in ("keep", "learning_rate_schedule", "compression"):
        with pytest.raises(TrainingError, match=f'no {name} "median"') as error:
            Settings(1, 1, **cast(Any, {name: "median"}))
        assert error.value.hint


def test_without_validation_the_training_loss_decides() -> None:
    recorder = Recorder()
    prepared = every_type(100).prepare(validation=0.0)
    run, _ = trainer(prepared, recorder, early_stopping=EarlyStopping(2), epochs=2)
    assert run.run().metrics["validation"] is None
    assert {epoch.split for epoch in recorder.epochs} == {"training"}


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_that_is_not_finite_stops_at_that_step(prepared: Prepared) -> None:
    recorder = Recorder(free=True)
    architecture = {"type": "mlp", "hidden": []}
    run, _ = trainer(prepared, recorder, architecture, learning_rate=1e38, optimizer="sgd", checkpoint_interval_s=1e-9)
    with pytest.raises(NotFiniteError, match="at step") as error:
        run.run()
    assert error.value.hint and error.value.step is not None
    for data, _ in recorder.checkpoints:  # only good ones
        assert all(torch.isfinite(t).all() for t in Checkpoint.from_bytes(data, {}).get("model").values())


def test_a_nan_loss_names_its_step(prepared: Prepared) -> None:
    recorder = Recorder(stop_after=None)
    run, model = trainer(prepared, recorder)
    steps = itertools.count(1)
    model.register_forward_hook(lambda module, args, out: out * math.nan if next(steps) == 4 else out)
    with pytest.raises(NotFiniteError, match="the loss became nan at step 4") as error:
        run.run()
    assert error.value.step == 4


def test_a_single_row_is_named_as_one() -> None:
    fitted = SimpleNamespace(training_rows=1, validation_rows=0, skipped_rows=0)
    with pytest.raises(DataError, match="batch_size is 2, but there is only 1 row to train on"):
        check_batch_size(2, cast(Any, fitted))


def test_batches_larger_than_the_data_are_an_error(prepared: Prepared) -> None:
    rows = prepared.fitted.training_rows
    check_batch_size(rows, prepared.fitted)
    with pytest.raises(DataError, match=f"batch_size is {rows + 1}, but there are only {rows} rows") as error:
        check_batch_size(rows + 1, prepared.fitted)
    assert f"at most {rows}" in str(error.value.hint)


def test_batch_normalisation_survives_a_last_row_and_refuses_single_ones() -> None:
    prepared = every_type(97).prepare(validation=0.0)
    outcome = trainer(prepared, Recorder(), batch_size=32)[0].run()  # 97 = 3 × 32 + 1
    assert outcome.metrics["training"]["samples"] == 97
    with pytest.raises(TrainingError, match="batches of one row") as error:
        trainer(prepared, Recorder(), batch_size=1)
    assert error.value.hint


def test_models_without_parameters_are_refused(prepared: Prepared) -> None:
    with pytest.raises(ArchitectureError, match="no parameters to train"):
        check_model(nn.Identity(), 2)


def test_progress_comes_often_enough(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_INTERVAL_S", 0.0)
    recorder = Recorder()
    run, _ = trainer(prepared, recorder, epochs=2)
    run.run()
    steps = [(p.epoch, p.step) for p in recorder.progresses if p.phase == "training"]
    count = recorder.progresses[0].steps
    assert steps == [(epoch, step) for epoch in (1, 2) for step in range(count + 1)]
    assert {p.epoch for p in recorder.progresses if p.phase == "validating"} == {1, 2}
    assert all(p.step == 0 if p.loss is None else math.isfinite(p.loss) for p in recorder.progresses)


def test_samples_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch may be smaller; the clock goes on by a second whenever somebody looks."""
    monkeypatch.setattr(training, "REPORT_INTERVAL_S", 0.0)
    prepared = every_type(80).prepare(validation=0.0)
    recorder = Recorder()
    run, _ = trainer(prepared, recorder, epochs=2, batch_size=32)
    clock = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    run.run()
    rates = [p.samples_per_s for p in recorder.progresses if p.samples_per_s is not None]
    assert [rates[1] / rates[0], rates[2] / rates[0]] == [1.0, 0.5] and len(rates) == 6


def test_a_change_of_phase_is_reported_at_once(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_INTERVAL_S", 3600.0)
    recorder = Recorder()
    run, _ = trainer(prepared, recorder, epochs=2)
    run.run()
    phases = [(p.epoch, p.phase) for p in recorder.progresses]
    assert phases == [(1, "training"), (1, "validating"), (2, "training"), (2, "validating")]
