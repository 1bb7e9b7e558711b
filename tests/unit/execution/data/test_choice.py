"""Architectures that are chosen by the values of arrays: images, tokens and numbers, some of them real data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_sample_image

from pg_tensile.execution.data.choice import choose_architecture
from pg_tensile.execution.data.roles import Roles
from pg_tensile.execution.models import build, parse, takes_ranks, token_limits
from tests.unit.rows import Prepared, Rows

RNG = np.random.default_rng(5)
COUNT = 200
NUMBERS = '"v" is the only array, and is taken as numbers:'
DIGITS = load_digits().images[:COUNT]
LARGE_DIGITS = np.kron(DIGITS, np.ones((4, 4)))[:, 2:30, 2:30] * 15.9  # as MNIST has them: 28×28, 0 to 255
HOURS = np.arange(168)
LOAD = 50 + RNG.normal(size=(COUNT, 168)) * 3 + 20 * np.sin(2 * np.pi * HOURS / 24)
DAY = 50 + np.cumsum(RNG.normal(size=(COUNT, 144)), axis=1)  # every ten minutes; 12 · 12
STARTS = RNG.integers(0, 5000, (COUNT, 1))  # of windows on a series


def daily(length: int, period: int, starts: NDArray[Any]) -> NDArray[Any]:
    """Return windows on a count whose days of `period` values are alike, with hours of zero: calls at night."""
    at = starts + np.arange(length)
    level = 1 + 0.4 * np.sin(2 * np.pi * at / (7 * period) + 0.1)
    return RNG.poisson(60 * level * np.maximum(np.sin(2 * np.pi * at / period), 0))


EMBEDDING = np.tanh(DIGITS.reshape(COUNT, -1) @ RNG.normal(size=(64, 1536)) / 50)
WORDS = np.minimum(RNG.zipf(1.3, (COUNT, 32)), 5000)
PEOPLE = np.stack([RNG.integers(low, high, COUNT) for low, high in ((0, 2), (18, 90), (0, 100_000))], axis=1)
COUNTS = RNG.poisson(RNG.lognormal(3, 1.5, 100), (COUNT, 100))  # of 100 products


def patches(side: int) -> NDArray[Any]:
    """Return square patches [patches, side, side, 3] of a photograph."""
    photo = load_sample_image("china.jpg")
    corners = [(y, x) for y in range(0, 400, 40) for x in range(0, 600, 40)]
    return np.stack([photo[y : y + side, x : x + side] for y, x in corners])


def padded(words: NDArray[Any]) -> NDArray[Any]:
    """Return token sequences of different lengths, with zeros behind them."""
    lengths = RNG.integers(1, words.shape[1] + 1, len(words))
    return np.where(np.arange(words.shape[1]) < lengths[:, None], words, 0)


def rows_of(kind: str, values: Any, **others: tuple[str, Any]) -> Rows:
    lists = [None if value is None else np.asarray(value).ravel().tolist() for value in values]
    target = ("float8", np.arange(len(lists), dtype=float).tolist())
    return Rows({"v": (kind, lists), **others, "y": target})


def chosen(rows: Rows) -> tuple[dict[str, Any], str]:
    """Return the choice, after checking that the model can be built."""
    store = rows.store()
    architecture, reason = choose_architecture(store, Roles.of(store.columns))
    parsed = parse(architecture)
    prepared: Prepared = rows.prepare(tokens=token_limits(parsed), ranks=takes_ranks(parsed))
    build(parsed, prepared.fitted.preprocessing.model_inputs, 1)
    return architecture, reason


@pytest.mark.parametrize(
    ("kind", "values", "architecture"),
    [
        ("float8[]", DIGITS, {"type": "cnn"}),
        ("int4[]", DIGITS.astype(int), {"type": "cnn"}),
        ("int4[]", LARGE_DIGITS.astype(int), {"type": "cnn"}),
        ("uint8[]", LARGE_DIGITS.astype(int), {"type": "cnn"}),
        ("bool[]", DIGITS > 7, {"type": "cnn"}),
        ("uint8[]", patches(16).mean(axis=3).astype(int), {"type": "cnn"}),
        ("uint8[]", patches(16).transpose(0, 3, 1, 2), {"type": "cnn", "shape": [3, 16, 16]}),
        ("int4[]", [row[: 5 + i % 20] for i, row in enumerate(WORDS)], {"type": "transformer"}),
        (
            "uint8[]",
            [list(f"a text of bytes, {'n' * (i % 9)}".encode()) for i in range(COUNT)],
            {"type": "transformer"},
        ),
        ("int4[]", WORDS, {"type": "transformer"}),
        ("int8[]", padded(WORDS), {"type": "transformer"}),
        ("int4[]", padded(RNG.permutation(5001)[WORDS]), {"type": "transformer"}),
        ("float4[]", EMBEDDING[:, :12], {"type": "tabular"}),
        ("float4[]", EMBEDDING[:, :384], {"type": "tabular"}),
        ("float4[]", EMBEDDING[:, :1024], {"type": "tabular"}),  # 32 · 32, and negative
        ("float4[]", np.abs(EMBEDDING[:, :1024]), {"type": "tabular"}),
        ("float4[]", EMBEDDING, {"type": "tabular"}),
        ("float8[]", LOAD, {"type": "tabular"}),
        ("int4[]", LOAD.astype(int), {"type": "tabular"}),
        ("float8[]", DAY, {"type": "tabular"}),
        ("float8[]", daily(144, 24, STARTS), {"type": "tabular"}),
        ("float8[]", daily(144, 12, 0 * STARTS), {"type": "tabular"}),  # years of months
        ("int4[]", daily(400, 24, STARTS), {"type": "tabular"}),  # 20 is nearly a day
        ("int4[]", daily(400, 24, 24 * STARTS), {"type": "tabular"}),
        ("int4[]", daily(576, 24, STARTS), {"type": "tabular"}),
        ("int4[]", daily(576, 24, 0 * STARTS), {"type": "tabular"}),  # 24 days, each from midnight
        ("int4[]", daily(784, 7, STARTS), {"type": "tabular"}),
        ("int4[]", daily(441, 7, STARTS), {"type": "tabular"}),  # three weeks in a row of 21
        (
            "uint8[]",
            patches(16),
            {"type": "tabular"},
        ),  # the colours of a pixel are neighbours, which a cnn does not take
        ("int4[]", PEOPLE, {"type": "tabular"}),
        ("int4[]", COUNTS, {"type": "tabular"}),
        ("int4[]", RNG.integers(0, 4, (COUNT, 60)), {"type": "tabular"}),
        ("int4[]", RNG.integers(-500, 500, (COUNT, 60)), {"type": "tabular"}),
        ("float8[]", [None, [1.0, None], [None, None], *[[2.0, 3.0]] * 9], {"type": "tabular"}),
    ],
)
def test_the_values_decide(kind: str, values: Any, architecture: dict[str, Any]) -> None:
    assert chosen(rows_of(kind, values))[0] == architecture


def test_the_reason_says_what_was_seen() -> None:
    for values, reason in (
        (DIGITS, '"v" is the only array, and can be an image of 8×8 pixels'),
        (LOAD, f"{NUMBERS} an image would not have 168 of them, but be a square of 8×8 or more, or three"),
        (EMBEDDING[:, :1024], f"{NUMBERS} an image would have no negative ones"),
        (DAY, f"{NUMBERS} in an image of 12×12, they would resemble those below them"),
        (daily(400, 24, STARTS), f"{NUMBERS} an image of 20×20 would not continue a row with the next one"),
        (daily(576, 24, 0 * STARTS), f"{NUMBERS} 24×24 of them can be a series of days or years as well"),
    ):
        assert chosen(rows_of("float8[]", values))[1] == reason
    some = [row[: 5 + i % 20] for i, row in enumerate(WORDS)]
    reason = '"v" has integers in arrays of 5 to 24 elements, which are taken as tokens'
    assert chosen(rows_of("int4[]", some))[1] == reason


def test_several_arrays_are_numbers_unless_one_has_tokens() -> None:
    vectors = ("float4[]", EMBEDDING[:, :8].tolist())
    architecture, reason = chosen(rows_of("float8[]", DIGITS, more=vectors))
    assert (architecture["type"], reason) == ("tabular", "2 columns are arrays, which are taken as numbers")
    some = [row[: 5 + i % 20] for i, row in enumerate(WORDS)]
    assert chosen(rows_of("int4[]", some, more=vectors))[0]["type"] == "transformer"


def test_a_query_without_arrays_is_a_table() -> None:
    rows = Rows({"x": ("float8", [1.0, 2.0, 3.0]), "y": ("float8", [1.0, 2.0, 3.0])})
    assert chosen(rows) == ({"type": "tabular"}, "no column is an array")


def test_rows_without_a_target_do_not_count() -> None:
    """They are not trained on, so their arrays may be of another length."""
    rows = rows_of("float8[]", [*DIGITS, [1.0]])
    rows.columns["y"] = ("float8", [*rows.columns["y"][1][:-1], None])
    assert chosen(rows)[0]["type"] == "cnn"


@pytest.mark.parametrize("order", [None, list(range(COUNT))[::-1]])
def test_the_order_of_the_rows_does_not_matter(order: list[int] | None) -> None:
    store = rows_of("int4[]", padded(WORDS)).store(order)
    assert choose_architecture(store, Roles.of(store.columns)).architecture == {"type": "transformer"}
