"""The batch size that is chosen, and the learning rate that goes with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import BatchSizeError, OptionError
from pg_tensile.planning.batchsize.choose import LEAST_STEPS, TIE, Candidate, choose, most_rows
from pg_tensile.planning.batchsize.learning_rate import scaled_learning_rate

BUDGET = 1_000_000


def candidates(samples_per_s: Callable[[int], float], row_bytes: int) -> Callable[[int], Candidate]:
    """Return the predictions for a job of that throughput, whose memory grows with the batch."""

    def predict(size: int) -> Candidate:
        nbytes, rate = 1000 + row_bytes * size, samples_per_s(size)
        if nbytes > BUDGET:
            return Candidate(size, False, 0.0, 0.0, 0.0, nbytes, "it does not fit")
        return Candidate(size, True, size / rate * 1e6, 0.0, rate, nbytes)

    return predict


def saturating(size: int, half: float, stalls_from: float) -> float:
    """Samples a second as on a device: more with the batch, level, and fewer when transfers take longer than work."""
    return 1000 * size / (size + half) / max(1.0, size / stalls_from) ** 0.5


@given(
    rows=st.integers(1, 5000),
    half=st.floats(0.1, 200),
    stalls_from=st.floats(1, 10_000),
    row_bytes=st.integers(100, 100_000),
)
def test_chosen_batch_is_as_good_as_the_best_of_all(rows: int, half: float, stalls_from: float, row_bytes: int) -> None:
    predict = candidates(lambda size: saturating(size, half, stalls_from), row_bytes)
    choice = choose(predict, rows, most=rows, budget_bytes=BUDGET)
    everything = [candidate for size in range(1, rows + 1) if (candidate := predict(size)).feasible]
    best = max(candidate.samples_per_s for candidate in everything)
    assert choice.candidates[0].samples_per_s >= (1 - TIE) ** 2 * best
    assert choice.candidates[0].device_bytes <= BUDGET
    assert choice.batch_size <= rows
    feasible = [candidate for candidate in choice.candidates if candidate.feasible]
    assert len(feasible) >= min(13, len(everything))
    assert [candidate.samples_per_s for candidate in feasible[1:]] == sorted(
        (candidate.samples_per_s for candidate in feasible[1:]), reverse=True
    )
    assert len({candidate.batch_size for candidate in choice.candidates}) == len(choice.candidates)


def test_smallest_of_equally_fast_batches_is_chosen() -> None:
    choice = choose(candidates(lambda size: 1000 + size / 1000, 100), 4000, most=4000, budget_bytes=BUDGET)
    assert choice.batch_size == 1
    choice = choose(candidates(lambda size: min(size, 48) * 100, 100), 4000, most=4000, budget_bytes=BUDGET)
    assert choice.batch_size == 48


def test_an_epoch_keeps_its_steps() -> None:
    faster_with_size = candidates(float, 1)
    assert choose(faster_with_size, 100_000, budget_bytes=BUDGET).batch_size == pytest.approx(
        100_000 // LEAST_STEPS, rel=TIE
    )
    assert choose(faster_with_size, 500, budget_bytes=BUDGET).batch_size == 64
    assert choose(faster_with_size, 10, budget_bytes=BUDGET).batch_size == 10
    assert most_rows(1) == 1


def test_nothing_fits() -> None:
    with pytest.raises(
        BatchSizeError, match=r"a batch of 1 needs at least 2,001,000 bytes .*; the budget is 1,000,000"
    ) as e:
        choose(candidates(float, 2_000_000), 100, budget_bytes=BUDGET)
    assert e.value.hint and e.value.least_bytes == 2_001_000


def test_what_does_not_fit_is_never_chosen_whatever_is_predicted() -> None:
    def predict(size: int) -> Candidate:
        return Candidate(size, True, 1.0, 0.0, float(size), 300_000 * size)

    choice = choose(predict, 1000, budget_bytes=BUDGET)
    assert choice.batch_size == 3
    assert [candidate.batch_size for candidate in choice.candidates if not candidate.feasible] == [4]


def test_sizes_that_the_model_cannot_be_trained_with_are_passed_over() -> None:
    def predict(size: int) -> Candidate:
        if size == 1:
            return Candidate(1, False, 0.0, 0.0, 0.0, 0, "batch norm wants more than one row")
        return Candidate(size, True, 1.0, 0.0, float(size), 1)

    assert choose(predict, 40).batch_size == 40
    with pytest.raises(BatchSizeError, match="a batch of 1 cannot be trained") as e:
        choose(predict, 1)
    assert e.value.detail == "batch norm wants more than one row"


def test_learning_rate_of_equation_9() -> None:
    """0.1 for 256 rows, with which ResNets are trained, becomes the paper's 0.22 for 592."""
    assert scaled_learning_rate(0.1, 256, 592) == pytest.approx(0.22, abs=0.005)
    assert scaled_learning_rate(0.1, 64, 128) == pytest.approx(1 - 0.9**2)
    assert scaled_learning_rate(1e-3, 64, 64) == pytest.approx(1e-3, rel=1e-12)
    assert scaled_learning_rate(2.0, 64, 640) == 2.0


@given(st.floats(1e-6, 0.99), st.integers(1, 4096), st.integers(1, 4096))
def test_learning_rate_stays_between_none_and_linear(rate: float, base: int, batch: int) -> None:
    scaled = scaled_learning_rate(rate, base, batch)
    low, high = sorted((rate, scaled_learning_rate(rate, base, batch, "linear")))
    assert low * (1 - 1e-9) <= scaled <= high * (1 + 1e-9)
    assert scaled_learning_rate(rate, base, batch, "linear") == pytest.approx(rate * batch / base)
    assert scaled_learning_rate(rate, base, batch, "none") == rate


@pytest.mark.parametrize(
    "rate, batch, law", [(0.0, 1, "accudnn"), (math.inf, 1, "linear"), (1.0, 0, "none"), (1.0, 1, "root")]
)
def test_rates_that_mean_nothing(rate: float, batch: int, law: str) -> None:
    with pytest.raises(OptionError):
        scaled_learning_rate(rate, 64, batch, law)  # type: ignore[arg-type]
