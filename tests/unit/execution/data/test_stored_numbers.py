"""What is stored with a version comes back as the number that it was."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data.calibration import Calibration
from pg_tensile.execution.data.conformal import Conformal
from pg_tensile.execution.data.preprocessing import Preprocessing
from tests.examples import examples
from tests.unit.rows import Prepared, Rows


def through_jsonb(value: Any) -> Any:
    """Return a JSON value as jsonb gives it back: numbers are numeric, written without an exponent."""

    def number(text: str) -> float | int:
        written = format(Decimal(text), "f")
        return float(written) if "." in written else int(written)

    return json.loads(json.dumps(value, allow_nan=False), parse_float=number)


def stored(prepared: Prepared) -> Preprocessing:
    return Preprocessing.from_json(through_jsonb(prepared.fitted.preprocessing.to_json()))


def apply(prepared: Prepared, preprocessing: Preprocessing) -> list[bytes]:
    (block,) = prepared.store.blocks()
    return [array.tobytes() for array in preprocessing.apply(prepared.fitted.inputs(block)).flat()]


FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@examples(25, long=500)
@example([1e26, -3.4028234663852886e38, 0.0], [1e308, -1e308, 2.0**64])
@given(st.lists(FLOATS, min_size=2, max_size=30), st.lists(FLOATS, min_size=2, max_size=30))
def test_any_float_comes_back_and_computes_the_same(x: list[float], y: list[float]) -> None:
    count = min(len(x), len(y))
    for transform in ("none", "quantile"):
        rows = Rows({"x": ("float8", x[:count]), "y": ("float8", y[:count])})
        try:
            prepared = rows.prepare(0.0, transform=transform, ranks=True)
        except DataError:  # a constant target
            assume(False)
        preprocessing = prepared.fitted.preprocessing
        again = stored(prepared)
        assert again == preprocessing
        assert apply(prepared, again) == apply(prepared, preprocessing)
        answers = np.array([-1e9, 0.0, 1e9])
        assert again.target.original(answers).tobytes() == preprocessing.target.original(answers).tobytes()


def test_calibrations_and_intervals_are_floats() -> None:
    prepared = Rows({"x": ("int4", [1, 2, 3]), "y": ("bool", [True, False, True])}).prepare(0.0)
    value = prepared.fitted.preprocessing.to_json()
    value |= {"calibration": Calibration(1e20, -2.0)._asdict(), "quantiles": [0, 1]}
    value["conformal"] = Conformal(3, (0.0, 1e300)).to_json()
    again = Preprocessing.from_json(through_jsonb(value))
    assert again.calibration is not None and again.conformal is not None
    numbers = [*again.calibration, *again.conformal.scores, *again.quantiles]
    assert numbers == [1e20, -2.0, 0.0, 1e300, 0.0, 1.0] and {type(number) for number in numbers} == {float}


@pytest.mark.parametrize("kind", ["int8", "text"])
@examples(15, long=200)
@given(labels=st.sets(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=6))
@example(labels={2**53, 2**53 + 1, 2**53 + 2})
def test_any_integer_is_a_label_of_its_own(kind: str, labels: set[int]) -> None:
    values = [label for label in sorted(labels) for _ in range(3)]
    given: Any = [str(value) for value in values] if kind == "text" else values
    prepared = Rows({"x": ("int4", [*range(len(values))]), "y": (kind, given)}).prepare(0.0, task="classification")
    again = stored(prepared)
    assert again == prepared.fitted.preprocessing
    assert again.labels is not None and again.label_values is not None
    assert set(map(int, again.labels)) == set(again.label_values) == labels
    (block,) = prepared.store.blocks()
    encoded = prepared.fitted.encode_target(block).astype(int)
    expected = {label: again.labels.index(str(label)) for label in labels}
    row = block.columns[0].data  # the number of each row
    assert [expected[values[number]] for number in row.tolist()] == encoded.tolist()
