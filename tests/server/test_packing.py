"""What the feed sends is what the query returns: every type, in real frames from a real worker.

The executor of these tests is recorder.py; its frames are decoded as the executor decodes them
(pg_tensile.execution.data.columns) and compared with the values that went into the table.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import pickle
import shutil
import signal
import struct
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pg_tensile.execution.data.columns import Chunk, Column, columns_from_header, concatenate, decode, decode_dictionary
from pyworker.wire import FrameType
from scripts.cluster import child_python

Connection = psycopg.Connection[tuple[Any, ...]]
EPOCH = dt.datetime(2000, 1, 1)
MAX_ROWS = 16_384
MAX_BYTES = 8 << 20


class Recording(NamedTuple):
    """One pass over a query, decoded."""

    columns: list[Column]
    rows: Chunk
    frame_rows: list[int]
    frame_bytes: list[int]
    dictionaries: dict[str, list[str]]
    fingerprint: str

    def values(self, name: str) -> list[Any]:
        """The column's values as Python objects; None = null; lists for arrays."""
        index = [column.name for column in self.columns].index(name)
        column, values = self.columns[index], self.rows.columns[index]
        data: list[Any] = values.data.tolist()
        if column.type == "text":
            strings = self.dictionaries[name] or [""]  # a null's code is undefined
            data = [strings[code] for code in data]
        if values.offsets is None:
            return [None if null else value for null, value in zip(values.nulls, data, strict=True)]
        if values.element_nulls is not None:
            data = [None if null else value for null, value in zip(values.element_nulls, data, strict=True)]
        pairs = zip(values.nulls, values.offsets[:-1], values.offsets[1:], strict=True)
        return [None if null else data[start:stop] for null, start, stop in pairs]


class Recorder:
    """Feeds queries to the recording executor."""

    def __init__(self, cluster: Any, conn: Connection, folder: Path) -> None:
        self.cluster = cluster
        self.conn = conn
        self._folder = folder

    def job(self, query: str, target: str) -> int:
        row = self.conn.execute("SELECT train_model('recorder', %s, %s)", (query, target)).fetchone()
        assert row is not None
        return int(row[0])

    def end(self, job: int) -> tuple[str, str, str | None, str | None]:
        """SQLSTATE, message, hint and detail of the job, all of which fail here."""
        with pytest.raises(psycopg.Error):
            self.conn.execute("SELECT wait_for_job(%s, '60 s')", (job,))
        row = self.conn.execute(
            "SELECT sqlstate, error, hint, detail FROM tensile.jobs WHERE id = %s", (job,)
        ).fetchone()
        assert row is not None
        return row

    def __call__(self, query: str, target: str = "y") -> Recording:
        job = self.job(query, target)
        _, message, _, detail = self.end(job)
        assert message == "recorded", (message, detail)
        return decode_frames(pickle.loads((self._folder / f"{job}.pickle").read_bytes()))


def decode_frames(frames: list[tuple[int, dict[str, Any], list[bytes]]]) -> Recording:
    types = [frame[0] for frame in frames]
    rows_frames = types.count(FrameType.ROWS)
    assert types == [FrameType.JOB, FrameType.COLUMNS, *[FrameType.ROWS] * rows_frames, FrameType.ROWS_END]
    columns = columns_from_header(frames[1][1]["columns"])
    chunks = [decode(columns, header["rows"], buffers) for _, header, buffers in frames[2:-1]]
    _, header, buffers = frames[-1]
    assert header["rows"] == sum(chunk.rows for chunk in chunks)
    text = [column.name for column in columns if column.type == "text"]
    assert len(buffers) == 2 * len(text)
    return Recording(
        columns,
        concatenate(chunks) if chunks else decode(columns, 0, empty_buffers(columns)),
        [chunk.rows for chunk in chunks],
        [sum(len(buffer) for buffer in buffers) for _, _, buffers in frames[2:-1]],
        {name: decode_dictionary(*buffers[2 * i : 2 * i + 2]) for i, name in enumerate(text)},
        header["fingerprint"],
    )


def empty_buffers(columns: list[Column]) -> list[bytes]:
    return [b""] * (1 + sum(4 if column.is_array else 2 for column in columns))


@pytest.fixture(scope="module")
def recorder(new_cluster: Callable[..., Any]) -> Iterator[Recorder]:
    """A cluster of its own, whose children record."""
    cluster = new_cluster()
    folder = cluster.folder / "recorded"
    try:
        cluster.configure({"pg_tensile.python": install_recorder(cluster, folder)})
        cluster.reload()
        with cluster.connect() as conn:
            conn.execute("""SELECT register_model('recorder', '{"type": "mlp"}')""")
            yield Recorder(cluster, conn, folder)
    finally:
        cluster.end()


def install_recorder(cluster: Any, folder: Path) -> Path:
    """A folder that the server's user may write, and in it the script that stands in for the children's Python."""
    folder.mkdir()
    shutil.copy(Path(__file__).parent / "recorder.py", folder)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{child_python()}" "{folder}/recorder.py" "{folder}"\n')
    script.chmod(0o755)
    shutil.chown(folder, cluster.os_user)
    return script


# -- every type ------------------------------------------------------------------------------------------------------


class Type(NamedTuple):
    """An SQL type, how it travels, values for it, and what such a value must be on the other side."""

    sql: str
    wire: str
    values: st.SearchStrategy[Any]
    expected: Callable[[Any], Any] = lambda value: value


def microseconds(value: dt.datetime | dt.date) -> int:
    if not isinstance(value, dt.datetime):
        value = dt.datetime.combine(value, dt.time())
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC).replace(tzinfo=None)
    return (value - EPOCH) // dt.timedelta(microseconds=1)


def seconds(value: dt.time) -> float:
    return (value.hour * 3600 + value.minute * 60 + value.second) + value.microsecond / 1e6


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def numerics() -> st.SearchStrategy[Decimal]:
    """Of every size: with few digits (the fast path), with many, very large and very small, NaN and infinite."""
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


def each(expected: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
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
    Type("bool[]", "bool[]", arrays(st.booleans()), each(int)),
    Type("int2[]", "int2[]", arrays(integers(16))),
    Type("int4[]", "int4[]", arrays(integers(32))),
    Type("int8[]", "int8[]", arrays(integers(64))),
    Type("float4[]", "float4[]", arrays(FLOAT4), each(float4)),
    Type("float8[]", "float8[]", arrays(FLOAT8)),
    Type("numeric[]", "float8[]", arrays(numerics()), each(float)),
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


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


# The last value of each type that has a limit, all at once, and a row of nulls
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


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
@example(rows=[])
@example(rows=[tuple(EXTREMES), (None,) * len(TYPES)])
def test_every_value_of_every_type_arrives(types: Recorder, rows: list[tuple[Any, ...]]) -> None:
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


# -- frames ----------------------------------------------------------------------------------------------------------


def test_frames_keep_to_their_rows_and_bytes(recorder: Recorder) -> None:
    narrow = recorder("SELECT i AS x, i % 2 AS y FROM generate_series(1, 40000) i")
    assert narrow.frame_rows == [MAX_ROWS, MAX_ROWS, 40_000 - 2 * MAX_ROWS]
    columns = ", ".join(f"i + {n} AS x{n}" for n in range(300))
    wide = recorder(f"SELECT {columns}, i % 2 AS y FROM generate_series(1::int8, 8000) i")
    assert max(wide.frame_bytes) <= MAX_BYTES
    assert wide.values("x299") == list(range(300, 8300))
    arrays = recorder("SELECT array_fill(i::float8, '{1000}') AS a, i % 2 AS y FROM generate_series(1, 3000) i")
    assert max(arrays.frame_bytes) <= MAX_BYTES + 8000 + 4096
    assert arrays.values("a")[2999] == [3000.0] * 1000


def test_codes_are_in_order_of_first_appearance(recorder: Recorder) -> None:
    recording = recorder("SELECT 'v' || i % 1000 AS x, i % 2 AS y FROM generate_series(0, 39999) i")
    assert recording.dictionaries["x"] == [f"v{i}" for i in range(1000)]
    assert recording.values("x")[39_999] == "v999"


# -- hashes ----------------------------------------------------------------------------------------------------------


def test_hashes_belong_to_content_and_not_to_order(recorder: Recorder) -> None:
    query = (
        "SELECT i AS a, 'c' || i % 100 AS b, array[i, i + 1] AS d, 1 AS y FROM generate_series(1, 20000) i ORDER BY {}"
    )
    up, down = recorder(query.format("i")), recorder(query.format("i DESC"))
    assert up.fingerprint == down.fingerprint
    assert up.rows.hashes.tolist() == down.rows.hashes.tolist()[::-1]
    assert len(set(up.rows.hashes.tolist())) == 20_000
    assert up.fingerprint == f"20000:{int(np.sum(up.rows.hashes, dtype=np.uint64)):016x}"


def test_a_parallel_scan_feeds_the_same_rows(recorder: Recorder) -> None:
    conn = recorder.conn
    conn.execute("CREATE TABLE spread AS SELECT i AS x, i % 2 AS y FROM generate_series(1, 100000) i")
    alone = recorder("SELECT * FROM spread")
    parallel = {"parallel_setup_cost": 0, "parallel_tuple_cost": 0, "min_parallel_table_scan_size": 0}
    for name, setting in parallel.items():
        conn.execute(f"ALTER DATABASE postgres SET {name} = {setting}")
        conn.execute(f"SET {name} = {setting}")
    plan = "\n".join(row[0] for row in conn.execute("EXPLAIN SELECT * FROM spread").fetchall())
    assert "Parallel Seq Scan" in plan
    try:
        together = recorder("SELECT * FROM spread")
    finally:
        for name in parallel:
            conn.execute(f"ALTER DATABASE postgres RESET {name}")
            conn.execute(f"RESET {name}")
    assert together.fingerprint == alone.fingerprint
    assert sorted(together.values("x")) == list(range(1, 100_001))


def test_equal_numbers_have_equal_hashes_and_others_not(recorder: Recorder) -> None:
    other_nan = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert math.isnan(other_nan)
    recorder.conn.execute("CREATE TABLE floats (n int, x float8, a float8[], y int)")
    with recorder.conn.cursor() as cursor, cursor.copy("COPY floats FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(["int4", "float8", "float8[]", "int4"])
        for n, x in enumerate([0.0, -0.0, math.nan, other_nan, None, 1.0]):
            copy.write_row((n, x, [x, 1.0], 1))
    hashes = recorder("SELECT x, a, y FROM floats ORDER BY n").rows.hashes.tolist()
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    assert len(set(hashes)) == 4


def test_null_empty_and_position_make_different_hashes(recorder: Recorder) -> None:
    recording = recorder(
        "SELECT a, b, c, y FROM (VALUES (1, 2, NULL, 1), (2, 1, NULL, 1), (NULL, 1, NULL, 1), (1, NULL, NULL, 1),"
        " (0, 1, NULL, 1), (1, 2, '{}'::int[], 1), (1, 2, '{NULL}', 1), (1, 2, '{0}', 1), (1, 2, '{NULL,0}', 1),"
        " (1, 2, '{0,NULL}', 1)) t(a, b, c, y)"
    )
    assert len(set(recording.rows.hashes.tolist())) == 10


# -- what does not fit, and what goes wrong ----------------------------------------------------------------------------


def test_a_million_distinct_strings_are_enough(recorder: Recorder) -> None:
    job = recorder.job("SELECT i::text AS x, 1 AS y FROM generate_series(1, 1000001) i", "y")
    sqlstate, message, hint, _ = recorder.end(job)
    assert (sqlstate, message) == ("54000", "a text column has more than 1000000 distinct values")
    assert hint is not None and "fewer categories" in hint


def test_a_row_of_more_than_a_gigabyte_is_refused(recorder: Recorder) -> None:
    columns = ", ".join(f"b AS b{n}" for n in range(11))
    query = f"SELECT {columns}, 1 AS y FROM (SELECT convert_to(repeat('x', 100000000), 'UTF8') AS b OFFSET 0) t"
    sqlstate, message, hint, detail = recorder.end(recorder.job(query, "y"))
    assert (sqlstate, message) == ("54000", "the data does not fit into a message to the child process")
    assert hint is not None and "1 GB" in hint
    assert detail is not None and "bytes" in detail


def test_an_error_names_the_row_of_the_query(recorder: Recorder) -> None:
    query = "SELECT 1 / (20005 - i) AS x, i % 2 AS y FROM generate_series(1, 30000) i"
    sqlstate, message, _, detail = recorder.end(recorder.job(query, "y"))
    assert (sqlstate, message, detail) == ("22012", "division by zero", "row 20005 of the training query")


def test_a_date_that_no_timestamp_reaches_is_an_error_with_its_row(recorder: Recorder) -> None:
    query = "SELECT d, 1 AS y FROM unnest('{2000-01-01,5874897-01-01}'::date[]) d"
    sqlstate, _, _, detail = recorder.end(recorder.job(query, "y"))
    assert (sqlstate, detail) == ("22008", "row 2 of the training query")


def test_an_executor_that_takes_no_data_is_given_up(recorder: Recorder, wait_until: Callable[..., Any]) -> None:
    conn, cluster = recorder.conn, recorder.cluster
    conn.execute("ALTER SYSTEM SET pg_tensile.executor_timeout = '2 s'")
    conn.execute("ALTER SYSTEM SET pg_tensile.max_retries = 0")
    cluster.reload()
    try:
        job = recorder.job(
            "SELECT i AS x, j % 2 AS y FROM generate_series(1, 10000) i, generate_series(1, 10000) j", "y"
        )

        def executor() -> int | None:
            return next((pid for pid, command in cluster.processes().items() if "recorder.py" in command), None)

        pid = wait_until(executor, what="the executor")
        phase = "SELECT count(*) FROM tensile._progress() WHERE job = %s AND phase = 'loading'"
        wait_until(lambda: conn.execute(phase, (job,)).fetchone() == (1,), what="rows on their way")
        os.kill(pid, signal.SIGSTOP)
        sqlstate, message, _, _ = recorder.end(job)
    finally:
        conn.execute("ALTER SYSTEM RESET pg_tensile.executor_timeout")
        conn.execute("ALTER SYSTEM RESET pg_tensile.max_retries")
        cluster.reload()
    assert sqlstate == "58000"
    assert message == "the executor took no data for 2 s"
    wait_until(lambda: pid not in cluster.processes(), what="the executor's end")


def test_the_query_cannot_feed_again(recorder: Recorder) -> None:
    query = "SELECT tensile._feed(1, 'SELECT 1 AS x, 2 AS y', 'y', '{}') AS x, 1 AS y"
    assert recorder.end(recorder.job(query, "y"))[0] == "42501"


def test_a_session_cannot_feed(recorder: Recorder) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        recorder.conn.execute("SELECT tensile._feed(1, 'SELECT 1 AS x, 2 AS y', 'y', '{}')")


def test_the_query_runs_with_the_submitters_settings_and_leaves_none_behind(recorder: Recorder) -> None:
    conn = recorder.conn
    conn.execute("CREATE SCHEMA elsewhere")
    conn.execute("CREATE TABLE elsewhere.hidden AS SELECT '2024-03-01'::date AS d, 1 AS y")
    conn.execute("SET search_path = elsewhere, public; SET timezone = 'Asia/Tokyo'; SET datestyle = 'German'")
    try:
        recording = recorder("SELECT d::text AS d, d::timestamptz AS z, y FROM hidden")
    finally:
        conn.execute("RESET search_path; RESET timezone; RESET datestyle")
    assert recording.values("d") == ["01.03.2024"]
    assert recording.values("z") == [microseconds(dt.datetime(2024, 2, 29, 15))]


def test_strings_of_other_encodings_arrive_as_utf8(fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "latin"}, extension=False)
    folder = cluster.folder / "recorded"
    cluster.configure({"pg_tensile.python": install_recorder(cluster, folder)})
    cluster.reload()
    with cluster.connect() as conn:
        conn.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with cluster.connect("latin") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute("""SELECT register_model('recorder', '{"type": "mlp"}')""")
        recording = Recorder(cluster, conn, folder)("""SELECT 'caf' || chr(233) AS "père", 'x'::name AS n, 1 AS y""")
    assert recording.dictionaries == {"père": ["café"], "n": ["x"]}
