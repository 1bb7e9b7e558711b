"""Tables with the extremes of every type: they train, and each row has a prediction, however it is given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.server.refusals import refused
from tests.server.shared import SharedServer
from tests.server.support import Connection, finish, submit, value

# Values of each type: the extremes, and ordinary ones for the rest of the rows.
TYPES = {
    "bool": "true, false",
    "int2": "-32768, 32767, 0",
    "int4": "-2147483648, 2147483647, 0",
    "int8": "-9223372036854775808, 9223372036854775807, 0",
    "numeric": "1e131071, -1e131071, 1e-16383, NaN, Infinity, -Infinity, 0.1",
    "float4": "3.4028235e38, -3.4028235e38, 1e-45, NaN, Infinity, -0",
    "float8": "1.7976931348623157e308, -1.7976931348623157e308, 5e-324, NaN, -Infinity, -0",
    "money": "-92233720368547758.08, 92233720368547758.07",
    "date": "4713-01-01 BC, 5874897-12-31, infinity, -infinity, 2026-02-28",
    "time": "00:00, 24:00, 12:34:56.789012",
    "timetz": "00:00+15:59, 24:00-15:59",
    "timestamp": "4713-01-01 00:00 BC, 294276-12-31 23:59:59.999999, infinity, -infinity, 2026-02-28 12:00",
    "timestamptz": "4713-01-01 00:00 BC, 294276-12-31 23:59:59.999999+00, infinity, -infinity, 2026-02-28 12:00",
    "interval": "-178000000 years, 178000000 years, 1 month -30 days 24:00, 0",
    "text": '"", " ", NULL, "it\'\'s", "\\\\x", 😀, {long}',
    "varchar": '"", "null", NaN',
    "bpchar": '"a  ", a, ""',
    "name": '"", {name}',
    "uuid": "00000000-0000-0000-0000-000000000000, ffffffff-ffff-ffff-ffff-ffffffffffff",
    "bytea": '"\\\\x00ff", "\\\\xff00"',
    "int8[]": '"{NULL,NULL}", "{-9223372036854775808,9223372036854775807}"',
    "numeric[]": '"{NaN,1e131071}", "{-1e131071,1e-16383}"',
    "float8[]": '"{1.7976931348623157e308,-Infinity,NaN,NULL}", "{{1,2},{3,5e-324}}"',
    "bool[]": '"{t,NULL}", "{f,f}"',
}
REFUSED = {"money", "timetz"}  # 0A000, with a hint
TRAINING: dict[str, Any] = {"target": "y", "epochs": 1, "batch_size": 8}
NEARLY_ALL = " WHERE i <= 40"


def values(type: str) -> str:
    """Return an expression of the type that is one of the values in row i, and null in some rows."""
    literals = TYPES[type].replace("{long}", "x" * 100_000).replace("{name}", "n" * 63)
    array = f"('{{{literals}}}'::text[])"
    return f"({array}[1 + i % (cardinality({array}) + 1)])::{type}"


@pytest.fixture
def conn(shared_server: SharedServer) -> Iterator[Connection]:
    """A session whose tables are temporary names of this test only."""
    with shared_server.connect() as made:
        yield made
        made.execute("DROP TABLE IF EXISTS extremes")


def table(conn: Connection, columns: dict[str, str], rows: int = 60) -> None:
    listed = ", ".join(f'{expression} AS "{name}"' for name, expression in columns.items())
    conn.execute(f"CREATE TABLE extremes AS SELECT i, {listed} FROM generate_series(1, {rows}) i".encode())


def test_as_features(conn: Connection) -> None:
    types = [type for type in TYPES if type not in REFUSED]
    table(conn, {type: values(type) for type in types} | {"y": "sin(i)"})
    finish(conn, submit(conn, "features", query="SELECT * FROM extremes" + NEARLY_ALL, **TRAINING))
    as_row = [row[0] for row in conn.execute("SELECT predict('features', e) FROM extremes e ORDER BY i")]
    as_json = [row[0] for row in conn.execute("SELECT predict('features', to_jsonb(e)) FROM extremes e ORDER BY i")]
    rows = "SELECT prediction FROM predict_rows('features', 'SELECT * FROM extremes ORDER BY i') ORDER BY row_number"
    together = [row[0] for row in conn.execute(rows)]
    assert len(as_row) == 60 and all(map(math.isfinite, as_row)) and as_row == as_json
    assert together == pytest.approx(as_row, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("type", sorted(REFUSED))
def test_types_that_no_feature_has(conn: Connection, type: str) -> None:
    table(conn, {"x": values(type), "y": "sin(i)"})
    call = partial(submit, conn, "refused", query="SELECT x, y FROM extremes", **TRAINING)
    refused("0A000", '"x" has type', "ast", call)


@pytest.mark.parametrize("type", ["bool", "int2", "int8", "numeric", "float4", "float8", "text", "varchar", "uuid"])
def test_as_targets(conn: Connection, type: str) -> None:
    """Numbers as a regression: those that are finite count, and predictions lie within the range of numbers."""
    table(conn, {"x": "i % 7", "y": values(type)})
    number = type in ("int2", "int8", "numeric", "float4", "float8")
    options = {"task": "regression"} if number else {}
    finish(conn, submit(conn, f"target {type}", query="SELECT x, y FROM extremes", options=options, **TRAINING))
    predict = "predict" if number else "predict_class"
    predicted = [row[0] for row in conn.execute(f"SELECT {predict}(%s, e) FROM extremes e", (f"target {type}",))]
    if number:
        assert all(map(math.isfinite, predicted))
    else:
        known: Any = value(conn, "SELECT array_agg(DISTINCT y::text) FROM extremes")
        assert set(predicted) <= set(known)
