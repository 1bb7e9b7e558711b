"""Preprocessings from elsewhere: those of training pass, and changed ones are refused or can be applied."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import ModelFileError
from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Inputs, Preprocessing, TokenLimits
from pg_tensile.execution.exchange.fields import checked_preprocessing
from tests.examples import examples
from tests.unit.rows import every_type


@cache
def fitted(kind: str) -> dict[str, Any]:
    """Return the JSON of a preprocessing as the catalogue has it."""
    rows = every_type(300)
    regression = kind != "labels"
    if regression:
        power = 2 if kind == "amounts" else 1
        rows.columns = {**rows.columns, "y": ("float8", [float(i) ** power for i in range(300)])}
    tokens = TokenLimits(None, 50) if kind == "tokens" else None
    transform = "quantile" if kind == "quantile" else "none"
    preprocessing = rows.prepare(tokens=tokens, ranks=kind == "ranks", transform=transform).fitted.preprocessing
    value = preprocessing.to_json() | {"rows": {"training": 240, "validation": 60, "skipped": 0}}
    if regression:
        value["conformal"] = Conformal.of(np.arange(60.0)).to_json()  # type: ignore[union-attr]
    else:
        value["calibration"] = {"scale": 1.5, "shift": 0.25}
    return json.loads(json.dumps(value))


def nulls(preprocessing: Preprocessing) -> Inputs:
    return Inputs(
        1,
        np.full((len(preprocessing.numbers), 1), np.nan),
        [CategoryInput(np.array([-1]), preprocessing.table(i, [])) for i in range(len(preprocessing.categories))],
        [ArraysInput(np.array([-1]), np.empty(0)) for _ in preprocessing.arrays],
    )


KINDS = ("labels", "numbers", "amounts", "tokens", "ranks", "quantile")


@pytest.mark.parametrize("kind", KINDS)
def test_what_training_fits_passes(kind: str) -> None:
    value = fitted(kind)
    preprocessing = checked_preprocessing(copy.deepcopy(value))
    assert preprocessing == Preprocessing.from_json(value)
    assert json.loads(json.dumps(preprocessing.to_json())) == {key: value[key] for key in value if key != "rows"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in it, of lists the first items only."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


OTHERS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.integers(-3, 5), st.floats(), st.text(max_size=4),
    st.lists(st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=2)), max_size=4),
    st.dictionaries(st.sampled_from(["values", "deviates", "name", "x"]), st.integers(), max_size=3),
)  # fmt: skip


@examples(40, long=300)
@given(st.data())
def test_a_changed_one_is_refused_or_can_be_applied(data: st.DataObject) -> None:
    value = copy.deepcopy(fitted(data.draw(st.sampled_from(KINDS))))
    path = data.draw(st.sampled_from(list(places(value))))
    place: Any = value
    for step in path[:-1]:
        place = place[step]
    if data.draw(st.booleans()) and isinstance(place, dict):
        del place[path[-1]]
    else:
        place[path[-1]] = data.draw(OTHERS)
    try:
        preprocessing = checked_preprocessing(value)
    except ModelFileError as error:
        assert error.hint and "cannot be used" in error.message
        return
    features = preprocessing.apply(nulls(preprocessing))
    assert np.isfinite(features.numeric).all()


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (("features", 0, "std"), -1.0),
        (("features", 0, "mean"), float("nan")),
        (("features", 0, "secret"), 1),
        (("features", 0, "nulls"), True),
        (("features",), []),
        (("labels",), ["no"]),
        (("labels",), ["no", "no"]),
        (("labels",), ["no", "\ud800"]),
        (("target", "name"), "bool"),
        (("calibration", "scale"), float("inf")),
        (("conformal",), {"rows": 1, "scores": [1.0]}),
        (("quantiles",), [0.5]),
        (("text",), {"path": "/etc/passwd"}),
    ],
)
def test_the_error_names_the_field(path: tuple[Any, ...], other: Any) -> None:
    value = copy.deepcopy(fitted("labels"))
    place: Any = value
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = other
    with pytest.raises(ModelFileError, match=str(path[-1]) if path[-1] != "name" else "target"):
        checked_preprocessing(value)
