"""Recipes choose what a job leaves open, and keep what it gives."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.training import recipe as recipes
from pg_tensile.execution.training.recipe import (
    BATCH_SIZES,
    BATCH_SIZES_OF,
    EPOCHS,
    EPOCHS_ROWS,
    STEPS,
    Explicit,
    Subject,
    batch_size_for,
    epochs_for,
    recipe,
)

LATE = Subject("mlp", 50_000)


@given(st.integers(1, 10**9))
def test_a_batch_size_is_a_power_of_two_within_its_bounds_or_all_rows(rows: int) -> None:
    size = batch_size_for(rows)
    assert 1 <= size <= rows
    if rows < BATCH_SIZES[0]:
        assert size == rows
        return
    assert size & (size - 1) == 0 and BATCH_SIZES[0] <= size <= BATCH_SIZES[1]
    if BATCH_SIZES[0] < size < BATCH_SIZES[1]:
        assert math.sqrt(0.5) <= size * STEPS / rows <= math.sqrt(2)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_more_rows_never_have_a_smaller_batch_size(rows: int, more: int) -> None:
    assert batch_size_for(rows) <= batch_size_for(rows + more)


def test_what_is_given_is_kept() -> None:
    for yes in (False, True):
        explicit = Explicit(0, 0.5, 0, "plateau", yes, yes, 7, 0.5)
        assert recipe(LATE, explicit) == explicit
    chosen = recipe(LATE)
    assert recipe(LATE, Explicit(learning_rate=0.5)) == chosen._replace(learning_rate=0.5)
    assert recipe(LATE, Explicit(batch_size=7)) == chosen._replace(batch_size=7)


@given(st.integers(1, 10**9))
def test_a_chosen_schedule_ends_after_epochs_by_the_number_of_rows(rows: int) -> None:
    subject = Subject("tabular", rows)
    chosen = recipe(subject)
    assert chosen.learning_rate_schedule == "cosine" and chosen.epochs == epochs_for(rows)
    assert EPOCHS[0] <= chosen.epochs <= EPOCHS[1]
    if EPOCHS[0] < chosen.epochs < EPOCHS[1]:
        assert 0 <= EPOCHS_ROWS - chosen.epochs * rows < rows
    assert recipe(subject, Explicit(epochs=3)).epochs == 3
    given_schedule = Explicit(learning_rate_schedule="cosine", epochs=1000)
    assert recipe(subject, given_schedule).epochs == 1000  # of the schedule that is asked for
    least, most = BATCH_SIZES_OF["tabular"]
    assert min(rows, least) <= chosen.batch_size <= most


@pytest.mark.parametrize("architecture", ["mlp", "tabular", "cnn", "transformer", "pretrained", "import", "python"])
def test_every_architecture_has_a_learning_rate(architecture: str) -> None:
    rate = recipe(LATE._replace(architecture=architecture)).learning_rate
    assert rate == recipes.LEARNING_RATES.get(architecture, recipes.LEARNING_RATE) > 0


def test_pretrained_models_have_small_batches_and_rates_by_what_is_trained() -> None:
    late = LATE._replace(architecture="pretrained")
    assert recipe(late).batch_size == 32 and recipe(late._replace(training_rows=9)).batch_size == 9
    full, lora, head = (recipe(late._replace(tune=tune)).learning_rate for tune in ("full", "lora", "head"))
    assert full < lora < head and recipe(late).learning_rate == lora


def test_images_have_smaller_batches_and_less_patience() -> None:
    images, other = (recipe(Subject(architecture, 3200)) for architecture in ("cnn", "transformer"))
    assert (images.batch_size, other.batch_size) == (32, 64) and images.patience < other.patience
    assert images.learning_rate_schedule == "plateau" and images.patience > recipes.PLATEAU_EPOCHS
