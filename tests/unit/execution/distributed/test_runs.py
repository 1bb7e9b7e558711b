"""Runs of several ranks: the same numbers on all of them, under any plan; they stop, save and fail at the same step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import safetensors.torch

from pg_tensile.errors import TrainingError
from tests.unit import ranked_runs
from tests.unit.ranked import Ranks
from tests.unit.ranked_runs import PLAIN, Result, Run

SGD = {"optimizer": "sgd", "learning_rate": 0.05}


def of_all(results: list[Result]) -> Result:
    """Return rank 0's result, after a check that the others have the same weights, metrics and end."""
    first, *others = results
    for other in others:
        assert other.weights == first.weights and other.epochs == first.epochs
        assert (other.outcome, other.error) == (first.outcome, first.error)
    return first


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd", "momentum": 0.9, "clip": 0.5}], ids=["adamw", "sgd"])
def test_plans_of_the_ranks_do_not_matter(ranks: Ranks, settings: dict[str, object]) -> None:
    """With batch norm, dropout, and a last batch of another size."""
    eager = of_all(ranks.call(2, ranked_runs.run, Run(settings)))
    planned = of_all(ranks.call(2, ranked_runs.run, Run(settings, parts=(0.0, 0.6))))
    assert len(eager.epochs) == 4 and all(epoch.metrics.accuracy for epoch in eager.epochs)
    assert eager.weights == planned.weights and eager.epochs == planned.epochs


@pytest.mark.parametrize("size", [2, 4])
def test_an_epoch_is_that_of_one_process(ranks: Ranks, size: int) -> None:
    described = Run({**SGD, "epochs": 1}, PLAIN)
    alone, together = ranked_runs.run(described), of_all(ranks.call(size, ranked_runs.run, described))
    assert largest_difference(alone, together) < 1e-6
    untrained = ranked_runs.run(Run({**SGD, "epochs": 1, "learning_rate": 0.0}, PLAIN))
    assert largest_difference(untrained, together) > 1e-2
    for one, other in zip(alone.epochs, together.epochs, strict=True):
        expected, found = one.metrics.to_json(), other.metrics.to_json()
        assert found.keys() == expected.keys()
        assert [value is None for value in found.values()] == [value is None for value in expected.values()]
        known = {name: value for name, value in expected.items() if value is not None}
        assert {name: found[name] for name in known} == pytest.approx(known, rel=1e-5)
    assert together.epochs[1].metrics.roc_auc is not None


def largest_difference(first: Result, second: Result) -> float:
    weights, others = safetensors.torch.load(first.weights), safetensors.torch.load(second.weights)
    return max(float((others[name] - value).abs().max()) for name, value in weights.items())


def test_runs_repeat_to_the_bit(ranks: Ranks) -> None:
    first, second = (of_all(ranks.call(4, ranked_runs.run, Run({"epochs": 1}))) for _ in range(2))
    assert first.weights == second.weights and first.epochs == second.epochs


def test_ranks_draw_other_random_numbers(ranks: Ranks) -> None:
    first, second = ranks.call(2, ranked_runs.drawn)
    assert not set(first) & set(second)
    assert ranks.call(2, ranked_runs.drawn) == [first, second]


@pytest.mark.parametrize("validation", [0.0, 0.005], ids=["none", "two rows"])
def test_ranks_without_validation_rows_wait_for_the_others(ranks: Ranks, validation: float) -> None:
    result = of_all(ranks.call(4, ranked_runs.run, Run({"epochs": 1}, validation=validation, parts=(0.5,))))
    samples = {epoch.split: epoch.metrics.samples for epoch in result.epochs}
    assert samples == ({"training": 395, "validation": 2} if validation else {"training": 397})


def test_a_stop_on_one_rank_stops_all_at_the_same_step_and_they_continue(ranks: Ranks) -> None:
    """From rank 0's checkpoint, in the middle of an epoch."""
    undisturbed = of_all(ranks.call(2, ranked_runs.run, Run(parts=(0.5,))))
    stopped = ranks.call(2, ranked_runs.run, Run(parts=(0.5,), stop_after=(None, 18)))
    assert all(result.outcome is not None and result.outcome.stopped for result in stopped)
    last = [result.checkpoints[-1] for result in stopped]
    assert [(meta["epoch"], meta["step"]) for _, meta in last] == [(1, 3)] * 2
    resumed = of_all(ranks.call(2, ranked_runs.run, Run(), last[:1]))
    assert resumed.weights == undisturbed.weights
    assert [*stopped[0].epochs, *resumed.epochs] == undisturbed.epochs


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_continues(ranks: Ranks, size: int) -> None:
    """The sums of the epoch are those of all rows, whoever counted them."""
    described = Run(SGD, PLAIN)
    undisturbed = of_all(ranks.call(2, ranked_runs.run, described))
    stopped = ranks.call(2, ranked_runs.run, replace(described, stop_after=(None, 18)))
    resumed = of_all(ranks.call(size, ranked_runs.run, described, stopped[0].checkpoints[-1:]))
    assert largest_difference(undisturbed, resumed) < 1e-6
    for expected, found in zip(undisturbed.epochs[2:], resumed.epochs, strict=True):
        assert (found.epoch, found.split) == (expected.epoch, expected.split)
        assert found.metrics.samples == expected.metrics.samples
        assert found.metrics.loss == pytest.approx(expected.metrics.loss, rel=1e-5)
        assert found.metrics.accuracy == pytest.approx(expected.metrics.accuracy)


def test_a_stop_during_validation_stops_all(ranks: Ranks) -> None:
    """The run begins with a poll, ten steps follow, so the twelfth poll is in the validation of the first epoch."""
    stopped = ranks.call(2, ranked_runs.run, Run(stop_after=(12, None)))
    assert [(meta["epoch"], meta["step"]) for result in stopped for _, meta in result.checkpoints[-1:]] == [(0, 10)] * 2


def test_a_loss_that_is_not_a_number_fails_on_all_ranks_at_the_same_step(ranks: Ranks) -> None:
    for result in ranks.call(2, ranked_runs.run, Run(nan_at=(None, 4))):
        assert result.error == "the loss became nan at step 5" and result.outcome is None


def test_the_time_is_that_of_rank_0(ranks: Ranks) -> None:
    """Its clock goes a second with each reading, that of the other rank does not matter."""
    described = Run({"max_time_s": 14.0, "epochs": 50}, hurried=True)
    ended = of_all(ranks.call(2, ranked_runs.run, described))
    assert ended.outcome is not None and (ended.outcome.reason, ended.outcome.epochs) == ("max_time", 1)


def test_checkpoints_are_made_at_the_same_steps(ranks: Ranks) -> None:
    """A rank that has not written the last one yet makes no other, so none does."""
    for slow, expected in ((True, 1), (False, None)):
        described = Run({"checkpoint_interval_s": 1e-6, "epochs": 1}, slow=slow)
        results = ranks.call(2, ranked_runs.run, described)
        made = [[(meta["epoch"], meta["step"]) for _, meta in result.checkpoints] for result in results]
        assert made[0] == made[1] and made[0][0] == (0, 1)
        assert expected is None or len(made[0]) == expected


def test_all_ranks_train_again_on_all_rows(ranks: Ranks) -> None:
    described = Run({"refit": True, "average_weights": True}, parts=(0.3, 0.8))
    result = of_all(ranks.call(2, ranked_runs.run, described))
    assert result.outcome is not None and result.outcome.refitted_rows == 397
    assert result.weights == of_all(ranks.call(2, ranked_runs.run, replace(described, parts=()))).weights


def test_settings_of_all_ranks_agree(ranks: Ranks) -> None:
    with pytest.raises(TrainingError, match="ranks 0 and 1 differ in data and settings"):
        ranks.call(2, ranked_runs.run_with_a_seed_of_its_own)
    with pytest.raises(TrainingError, match="ranks 0 and 1 differ in the model's weights"):
        ranks.call(2, ranked_runs.run_with_a_model_of_its_own, ())
    with pytest.raises(TrainingError, match="a batch of 3 rows cannot be divided among 4 ranks"):
        ranks.call(4, ranked_runs.run, Run({"batch_size": 3}))
