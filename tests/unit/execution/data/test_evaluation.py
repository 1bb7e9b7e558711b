"""Rows of an evaluation: targets of all types, groups, limits, and the memory that is kept for a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pg_tensile.errors import DataError
from pg_tensile.execution.data.columns import SCALAR_TYPES, Chunk, Column, Values
from pg_tensile.execution.data.evaluation import EvaluatedRows, encoded
from pg_tensile.execution.data.preprocessing import Preprocessing, Target, Task

NUMBER = Column("y", "float8", True)
TEXT = Column("y", "text", True)
GROUP = Column("group", "text")
LIMIT = 1 << 30


def regression() -> Preprocessing:
    return Preprocessing(Task.REGRESSION, Target("y", "float8", 5.0, 2.0), None, None, ())


def classification(*labels: str, values: tuple[float, ...] | None = None, type: str = "text") -> Preprocessing:
    task = Task.BINARY if len(labels) == 2 else Task.MULTICLASS
    return Preprocessing(task, Target("y", type), labels, values, ())


def chunk(*columns: tuple[str, list[Any]]) -> Chunk:
    """Return a chunk of columns, each with its type and its values, None for null."""
    arrays = []
    for type, values in columns:
        nulls = np.array([value is None for value in values])
        arrays.append(Values(nulls, np.array([0 if value is None else value for value in values], SCALAR_TYPES[type])))
    return Chunk(np.zeros(len(columns[0][1]), np.uint64), arrays)


def dictionary(*strings: str) -> tuple[bytes, bytes]:
    return np.array([len(text.encode()) for text in strings], "<i4").tobytes(), "".join(strings).encode()


def by_group(rows: list[Any]) -> dict[str | None, dict[str, float | None]]:
    groups: dict[str | None, dict[str, float | None]] = {}
    for group, metric, label, predicted, quantile, value, _ in rows:
        if (label, predicted, quantile) == (None, None, None):
            groups.setdefault(group, {})[metric] = value
    return groups


def test_rows_of_many_chunks_are_those_of_one() -> None:
    random = np.random.default_rng(1)
    outputs, target = random.normal(size=(50, 1)).astype(np.float32), random.normal(size=50).tolist()
    target[7] = None
    whole = EvaluatedRows(regression(), [NUMBER], LIMIT)
    whole.add(outputs, chunk(("float8", target)))
    parts = EvaluatedRows(regression(), [NUMBER], LIMIT)
    for start in range(0, 50, 8):
        parts.add(outputs[start : start + 8], chunk(("float8", target[start : start + 8])))
    assert whole.result([]) == parts.result([])
    values = by_group(whole.result([]))[None]
    assert (values["rows"], values["skipped_rows"]) == (49, 1)


def test_what_is_kept_of_a_row_does_not_depend_on_its_features() -> None:
    rows = 100_000
    evaluated = EvaluatedRows(classification("a", "b"), [TEXT, GROUP], LIMIT)
    codes = np.zeros(rows, np.int32).tolist()
    evaluated.add(np.ones((rows, 1), np.float64), chunk(("text", codes), ("text", codes)))
    assert evaluated.nbytes == 12 * rows
    numbers = EvaluatedRows(regression(), [NUMBER], LIMIT)
    numbers.add(np.ones((rows, 1), np.float32), chunk(("float8", codes)))
    assert numbers.nbytes == 16 * rows


def test_outputs_that_float32_cannot_hold_stay_exact() -> None:
    evaluated = EvaluatedRows(regression(), [NUMBER], LIMIT)
    evaluated.add(np.array([[0.1]]), chunk(("float8", [5.0])))
    assert by_group(evaluated.result([]))[None]["mae"] == pytest.approx(0.2, abs=1e-15)


def test_more_than_the_limit_is_refused() -> None:
    evaluated = EvaluatedRows(regression(), [NUMBER], 1000)
    with pytest.raises(DataError, match="take more than 1,000 bytes"):
        evaluated.add(np.ones((100, 1), np.float32), chunk(("float8", [1.0] * 100)))


def test_groups_with_nulls_and_without_targets() -> None:
    evaluated = EvaluatedRows(regression(), [NUMBER, GROUP], LIMIT)
    outputs: NDArray[np.float32] = np.zeros((5, 1), np.float32)
    evaluated.add(outputs, chunk(("float8", [5.0, 6.0, None, None, 7.0]), ("text", [0, 1, 1, 2, None])))
    groups = by_group(evaluated.result(dictionary("x", "y", "z")))
    assert {name: (values["rows"], values["skipped_rows"]) for name, values in groups.items()} == {
        None: (1, 0),
        "x": (1, 0),
        "y": (1, 1),
        "z": (0, 1),
    }
    assert {name: values["mae"] for name, values in groups.items()} == {None: 2.0, "x": 0.0, "y": 1.0, "z": None}


def test_only_nulls_are_an_error() -> None:
    evaluated = EvaluatedRows(regression(), [NUMBER], LIMIT)
    evaluated.add(np.zeros((2, 1), np.float32), chunk(("float8", [None, np.inf])))
    with pytest.raises(DataError, match="null, NaN or infinite in all 2 rows"):
        evaluated.result([])


YES = classification("no", "yes")
FLAGS = classification("false", "true", values=(0.0, 1.0), type="bool")
CODES = classification("10", "9", values=(10.0, 9.0))  # texts in the training query
SINGLE = classification("0.1", "2", values=(float(np.float32(0.1)), 2.0), type="float4")


@pytest.mark.parametrize(
    ("preprocessing", "column", "values", "strings", "classes", "labels"),
    [
        (YES, "text", [1, 0, 2], ["no", "yes", "maybe"], [1, 0, 2], ["no", "yes", "maybe"]),
        (YES, "int4", [1, 0], None, [3, 2], ["no", "yes", "0", "1"]),
        (classification("false", "true"), "bool", [1, 0], None, [1, 0], ["false", "true"]),
        (FLAGS, "bool", [0, 1], None, [0, 1], ["false", "true"]),
        (FLAGS, "int8", [1, 0, 7], None, [1, 0, 2], ["false", "true", "7"]),
        (FLAGS, "text", [0, 1], ["true", "1"], [1, 2], ["false", "true", "1"]),
        (CODES, "text", [0, 1], ["9", "10"], [1, 0], ["10", "9"]),
        (CODES, "int2", [9, 10], None, [1, 0], ["10", "9"]),
        (CODES, "float8", [9.0, 9.5], None, [1, 2], ["10", "9", "9.5"]),
        (SINGLE, "float8", [0.1, 2.0], None, [0, 1], ["0.1", "2"]),
    ],
)
def test_targets_of_other_types_than_those_of_the_training(
    preprocessing: Preprocessing,
    column: str,
    values: list[Any],
    strings: list[str] | None,
    classes: list[int],
    labels: list[str],
) -> None:
    kept = np.array(values, np.int32 if strings else np.float64)
    targets = encoded(kept, Column("y", column, True), strings, preprocessing)
    assert (targets.values.tolist(), targets.labels) == (classes, labels)


def test_a_number_is_no_column_of_labels() -> None:
    with pytest.raises(DataError, match="20000 values"):
        encoded(np.arange(20_000.0), NUMBER, None, FLAGS)
