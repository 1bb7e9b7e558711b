"""Weights of an earlier version are used only where its preprocessing suits the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.preprocessing import Feature, Kind, Preprocessing, Task
from pg_tensile.execution.data.targets import Target
from pg_tensile.execution.data.warm_start import begun_with, difference

X = Feature("x", Kind.NUMERIC, "float8", mean=1.0)
C = Feature("c", Kind.CATEGORY, "text", categories=("a", "b"))
IMAGE = Feature("p", Kind.ARRAY, "float4[]", length=9)
TOKENS = Feature("t", Kind.ARRAY, "int4[]", length=9, tokens=(1, 2))
LABELS = Preprocessing(Task.BINARY, Target("y", "text"), ("no", "yes"), None, (X, C, IMAGE, TOKENS))
NUMBER = Preprocessing(Task.REGRESSION, Target("y", "float8", 1.0, 2.0), None, None, (X, C))


def test_values_of_the_rows_make_no_difference() -> None:
    features = (replace(X, mean=5.0), replace(C, categories=("b", "z")), IMAGE, replace(TOKENS, length=20, tokens=(7,)))
    assert difference(LABELS, replace(LABELS, features=features)) is None
    assert difference(NUMBER, replace(NUMBER, target=Target("y", "float8", 7.0, 8.0))) is None


@pytest.mark.parametrize(
    ("fitted", "reason"),
    [
        (replace(LABELS, features=(X, C, IMAGE)), "the features are different: t"),
        (replace(LABELS, features=(C, X, IMAGE, TOKENS)), "another order"),
        (replace(LABELS, features=(X, C, replace(IMAGE, length=16), TOKENS)), '"p" has another type or length'),
        (replace(LABELS, features=(replace(X, kind=Kind.CATEGORY), C, IMAGE, TOKENS)), '"x" has another type'),
        (replace(LABELS, features=(X, C, IMAGE, replace(TOKENS, tokens=None))), '"t" has another type'),
        (replace(LABELS, labels=("no", "perhaps")), "the labels are different"),
        (replace(LABELS, labels=("a", "b", "c"), task=Task.MULTICLASS), "the target is different"),
        (replace(LABELS, target=Target("z", "text")), "the target is different"),
        (replace(LABELS, quantiles=(0.1, 0.9)), "quantiles are different"),
        (replace(LABELS, target=Target("y", "text", transform="log")), "transformation"),
    ],
)
def test_differences(fitted: Preprocessing, reason: str) -> None:
    assert reason in (difference(LABELS, fitted) or "")


def test_what_follows_from_validation_is_derived_anew() -> None:
    earlier = replace(LABELS, calibration=Calibration(2.0))
    assert begun_with(earlier, LABELS) == LABELS


def test_new_rows_tell_whether_answers_may_be_negative() -> None:
    amounts = replace(NUMBER, target=replace(NUMBER.target, nonnegative=True))
    assert begun_with(amounts, NUMBER) == NUMBER
    assert begun_with(NUMBER, amounts) == amounts
