"""The feed sends the values that the query returns: every type, in real frames from a real worker.

The trainer of these tests is recorder.py; its frames are decoded as the trainer decodes them
(pg_tensile.execution.data.columns) and compared with the values that went into the table.
"""

from __future__ import annotations

import datetime as dt
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.server.recording import Recorder, microseconds

# -- every type ------------------------------------------------------------------------------------------------------


class Type(NamedTuple):
    """An SQL type, its element type in frames, a strategy of values, and the function to the expected values."""

    sql: str
    wire: str
    values: st.SearchStrategy[Any]
    expected: Callable[[Any], Any] = lambda value: value


def seconds(value: dt.time) -> float:
    return (value.hour * 3600 + value.minute * 60 + value.second) + value.microsecond / 1e6


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def numerics() -> st.SearchStrategy[Decimal]:
    """Generate numerics: few digits (the fast path), many, very large and very small ones, NaN, infinities."""
    small = st.decimals(-(10**12), 10**12, allow_nan=False, places=4)
    digits = st.builds(
        lambda sign, d, e: Decimal((sign, d, e)),
        st.integers(0, 1),
        st.lists(st.integers(0, 9), min_size=1, max_size=40),
        st.integers(-60, 60),
    )
    special = st.sampled_from(
        [Decimal("NaN"), Decimal("Infinity"), Decimal("-Infinity"), Decimal("1e-400"), Decimal("9007199254740993")]
    )
    return small | digits | special


def arrays(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | elements, max_size=20)


def elementwise(expected: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda array: [None if item is None else expected(item) for item in array]


def float4(value: float) -> float:
    return float(np.float32(value))


FLOAT4 = st.floats(width=32)


FLOAT8 = st.floats()


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


DATETIMES = st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31))


TYPES = [
    Type("bool", "bool", st.booleans(), int),
    Type("int2", "int2", integers(16)),
    Type("int4", "int4", integers(32)),
    Type("int8", "int8", integers(64)),
    Type("float4", "float4", FLOAT4, float4),
    Type("float8", "float8", FLOAT8),
    Type("numeric", "float8", numerics(), float),
    Type("numeric(12, 3)", "float8", st.decimals(-(10**8), 10**8, allow_nan=False, places=3), float),
    Type("interval", "float8", st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999)), dt.timedelta.total_seconds),
    Type("time", "float8", st.times(), seconds),
    Type("date", "timestamp", st.dates(dt.date(1, 1, 1)), microseconds),
    Type("timestamp", "timestamp", DATETIMES, microseconds),
    Type("timestamptz", "timestamp", st.datetimes(dt.datetime(2, 1, 1), timezones=st.just(dt.UTC)), microseconds),
    Type("text", "text", TEXT),
    Type("varchar", "text", TEXT),
    Type("char(5)", "text", st.text("ab ", max_size=5), lambda value: value.rstrip(" ")),
    Type('"char"', "text", st.sampled_from("abc")),
    Type("name", "text", st.text("abcdé", max_size=20)),
    Type("uuid", "text", st.uuids(), str),
    Type("mood", "text", st.sampled_from(["sad", "ok", "happy"])),
    Type("score", "int4", st.integers(0, 10)),
    Type("label", "text", st.sampled_from(["x", "y"])),
    Type("bool[]", "bool[]", arrays(st.booleans()), elementwise(int)),
    Type("int2[]", "int2[]", arrays(integers(16))),
    Type("int4[]", "int4[]", arrays(integers(32))),
    Type("int8[]", "int8[]", arrays(integers(64))),
    Type("float4[]", "float4[]", arrays(FLOAT4), elementwise(float4)),
    Type("float8[]", "float8[]", arrays(FLOAT8)),
    Type("numeric[]", "float8[]", arrays(numerics()), elementwise(float)),
    Type("score[]", "int4[]", arrays(st.integers(0, 10))),
    Type("bytea", "uint8[]", st.binary(max_size=20), list),
]


NAMES = [f"c{i}" for i in range(len(TYPES))]


ROWS = st.lists(st.tuples(*(st.none() | kind.values for kind in TYPES)), max_size=12)


@pytest.fixture(scope="module")
def types(recorder: Recorder) -> Recorder:
    recorder.conn.execute("CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')")
    recorder.conn.execute("CREATE DOMAIN score AS int CHECK (VALUE >= 0)")
    recorder.conn.execute("CREATE DOMAIN label AS text")
    columns = ", ".join(f"{name} {kind.sql}" for name, kind in zip(NAMES, TYPES, strict=True))
    recorder.conn.execute(f"CREATE TABLE everything (n int, {columns}, y int DEFAULT 1)")
    return recorder


def same(received: Any, expected: Any) -> bool:
    if isinstance(received, list) and isinstance(expected, list):
        return len(received) == len(expected) and all(map(same, received, expected))
    if isinstance(received, float) and isinstance(expected, float):
        return received == expected or (math.isnan(received) and math.isnan(expected))
    return bool(received == expected)


# A row with the limits of all types that have one, and a row of nulls
EXTREMES: list[Any] = [None] * len(TYPES)


for _name, _value in {
    "int2": -32768,
    "int4": -(2**31),
    "int8": 2**63 - 1,
    "float4": -math.inf,
    "float8": 5e-324,
    "numeric": Decimal("1" + "0" * 400),
    "text": "\U0001f418" * 3,
    "float8[]": [math.nan, -math.inf, -0.0, None],
    "numeric[]": [],
    "bytea": b"",
}.items():
    EXTREMES[[kind.sql for kind in TYPES].index(_name)] = _value


# A value of each type, in their order
ORDINARY = [
    *(True, -300, 70_000, -5_000_000_000, 1.5, 0.1, Decimal("-12.5"), Decimal("1.125"), dt.timedelta(1, 2.5)),
    *(dt.time(12, 30), dt.date(2024, 2, 29), dt.datetime(2024, 2, 29, 1), dt.datetime(1999, 12, 31, tzinfo=dt.UTC)),
    *("é", "a b", "ab", "c", "abcdé", uuid.UUID(int=1), "ok", 7, "x", [True, None, False], [1, None, -300]),
    *([70_000, None], [None, 5_000_000_000], [1.5, None, -2.25], [0.1, math.inf], [Decimal("0.1"), None, Decimal(3)]),
    *([None, 10, 3], b"\0a\xff"),
]


def test_limits_nulls_and_ordinary_values_of_every_type_arrive(types: Recorder) -> None:
    nothing = (None,) * len(TYPES)
    check_arrival(types, [tuple(ORDINARY), nothing, tuple(EXTREMES), tuple(ORDINARY)])


@pytest.mark.long
@examples(15, suppress=list(HealthCheck))
@given(rows=ROWS)
@example(rows=[])
def test_every_value_of_every_type_arrives(types: Recorder, rows: list[tuple[Any, ...]]) -> None:
    """Takes seconds: each example is a job."""
    check_arrival(types, rows)


def check_arrival(types: Recorder, rows: list[tuple[Any, ...]]) -> None:
    types.conn.execute("TRUNCATE everything")
    values = ", ".join(f"%s::{kind.sql}" for kind in TYPES)
    with types.conn.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO everything (n, {', '.join(NAMES)}) VALUES (%s, {values})",
            [(n, *(str(v) if isinstance(v, uuid.UUID) else v for v in row)) for n, row in enumerate(rows)],
        )
    recording = types("SELECT * FROM everything ORDER BY n")
    assert recording.rows.rows == len(rows)
    for index, (name, kind) in enumerate(zip(NAMES, TYPES, strict=True)):
        column = next(column for column in recording.columns if column.name == name)
        assert column.type == kind.wire
        expected = [None if row[index] is None else converted(kind, row[index]) for row in rows]
        assert same(recording.values(name), expected), (kind.sql, recording.values(name), expected)


def converted(kind: Type, value: Any) -> Any:
    return kind.expected(value)


def test_numeric_is_rounded_correctly_at_every_number_of_digits(recorder: Recorder) -> None:
    texts = [f"{'123456789' * 4}"[:digits] for digits in range(1, 36)]
    texts += [f"{text[:i]}.{text[i:]}" for text in texts for i in (1, len(text) // 2)]
    texts += [
        "9007199254740992",
        "9007199254740993",
        "0.1",
        "1e22",
        "1e23",
        "1e-22",
        "1e-23",
        "123.4500",
        "0",
        "-0.00001",
    ]
    values = ", ".join(f"({n}, '{text}'::numeric)" for n, text in enumerate(texts))
    recording = recorder(f"SELECT v, 1 AS y FROM (VALUES {values}) t(n, v) ORDER BY n")
    assert recording.values("v") == [float(Decimal(text)) for text in texts]


def test_infinite_dates_are_null(recorder: Recorder) -> None:
    recording = recorder(
        "SELECT d, d::timestamp AS t, d::timestamptz AS z, 1 AS y"
        " FROM unnest('{infinity,-infinity,2000-01-02}'::date[]) d"
    )
    day = 86_400_000_000
    assert recording.values("d") == recording.values("t") == recording.values("z") == [None, None, day]


def test_months_and_years_have_the_seconds_of_extract_epoch(recorder: Recorder) -> None:
    recording = recorder(
        "SELECT i, extract(epoch FROM i)::float8 AS e, 1 AS y"
        " FROM unnest('{1 year 2 months,-13 months 3 days}'::interval[]) i"
    )
    assert recording.values("i") == recording.values("e")


def test_arrays_of_any_dimensions_are_flattened(recorder: Recorder) -> None:
    recording = recorder(
        "SELECT '{{1,2},{3,4}}'::int[] AS a, '[5:6]={7,8}'::float8[] AS b, '1 2'::int2vector AS v, 1 AS y"
    )
    assert (recording.values("a"), recording.values("b"), recording.values("v")) == (
        [[1, 2, 3, 4]],
        [[7.0, 8.0]],
        [[1, 2]],
    )
